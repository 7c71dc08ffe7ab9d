"""Find, cast or move the tensors in what a model is given, and in what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from graph_fsdp import compat

Concerns: TypeAlias = Callable[[Any], bool]  # of a tensor or PackedSequence


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in ``value``: in lists, tuples, dicts, what else pytree knows, dataclasses, and the attributes
    of an object of another class."""
    found: list[Tensor] = []
    for leaf in compat.pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif fields := compat.fields_of(type(leaf)):
            found += tensors_of([getattr(leaf, name, None) for name in fields])
        elif type(leaf).__module__ != "builtins":
            attributes = compat.pytree.tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
            found += [tensor for tensor in attributes if isinstance(tensor, Tensor)]
    return found


def tokens_in(value: Any) -> int | None:
    """Count the elements of the first 2-D tensor of integers in a structure; None where there is none."""
    tensors = (leaf for leaf in compat.pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return next((t.numel() for t in tensors if t.dim() == 2 and not t.is_floating_point()), None)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast all floating-point tensors in ``value`` to ``dtype``, as FSDP2 does."""

    def is_other_float(tensor: Any) -> bool:  # without a variable, whose name Dynamo would give to a node
        return bool(_data(tensor).is_floating_point() and _data(tensor).dtype != dtype)

    return _mapped(value, is_other_float, lambda tensor: tensor.to(dtype))


def on_device(value: Any, device: torch.device) -> Any:
    """Copy all tensors in ``value`` that are elsewhere to ``device``, as FSDP2 and DDP do."""
    return _mapped(value, lambda tensor: _data(tensor).device != device, lambda tensor: tensor.to(device))


def _data(tensor: Any) -> Any:
    return tensor.data if isinstance(tensor, PackedSequence) else tensor


def _mapped(tree: Any, concerns: Concerns, change: Callable[[Any], Any]) -> Any:
    """Return ``tree`` with ``change(tensor)`` for each tensor that it concerns, in lists, tuples, dicts, what else
    pytree knows, and dataclasses. What has none of them is not touched, and not copied either: a cache that the model
    writes to stays that of the caller, and a layer that hands something on can be traced for its equals
    (``repeat.py``)."""

    def at(leaf: Any) -> Any:
        if not _is_concerned(leaf, concerns):
            return leaf
        if isinstance(leaf, (Tensor, PackedSequence)):
            return change(leaf)
        fields = {name: getattr(leaf, name, None) for name in compat.fields_of(type(leaf))}
        return dataclasses.replace(leaf, **{n: _mapped(v, concerns, change) for n, v in fields.items() if has(v)})

    def has(tree: Any) -> bool:
        return _has_concerned(tree, concerns)

    return compat.pytree.tree_map(at, tree, is_leaf=lambda tree: isinstance(tree, PackedSequence) or not has(tree))


def _has_concerned(tree: Any, concerns: Concerns) -> bool:
    leaves = compat.pytree.tree_leaves(tree, is_leaf=lambda tree: isinstance(tree, PackedSequence))
    return any(_is_concerned(leaf, concerns) for leaf in leaves)


def _is_concerned(leaf: Any, concerns: Concerns) -> bool:
    if isinstance(leaf, (Tensor, PackedSequence)):
        return concerns(leaf)
    return any(_has_concerned(getattr(leaf, name, None), concerns) for name in compat.fields_of(type(leaf)))
