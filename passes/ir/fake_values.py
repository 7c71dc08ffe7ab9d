"""Fake values say what a call computes, as far as shapes, dtypes, devices and memory go.

A model of equal layers makes the same few calls on values of the same kinds thousands of times, and running an
operator on fake tensors costs about 100 microseconds. Calls are therefore described by all that a result depends on
(``canonical_form.py``), and each distinct one is run once per process: once by the passes, which make values
(``VALUES``), and once by the verifier, which does not trust them (``KINDS``). Calls of operators that others have
registered are run each time.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.canonical_form import NotDescribed, describe_call, describe_value
from graph_fsdp.passes.ir.operands import function


def evaluate(node: fx.Node) -> Any:
    """Compute the value of a call on the fake values of its inputs."""
    found: Any = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = found
    if node.target is operator.getitem and isinstance(args[0], (tuple, list)):  # no operator: a mode would cost more
        return args[0][args[1]]
    with fake_mode_of(node.all_input_nodes) or contextlib.nullcontext():
        return function(node)(*args, **kwargs)


def fake_mode_of(nodes: Iterable[fx.Node]) -> Any:
    """Return the fake mode of the values of nodes, None where none of them is a fake tensor."""
    values = (value for node in nodes for value in iterate_tensors(node.meta.get("val")))
    return next((value.fake_mode for value in values if isinstance(value, compat.FakeTensor)), None)


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a node's value: one, or those of a list or tuple, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iterate_tensors(item)


def kind(value: Any) -> Any:
    """Say what must not change of a value: shape, dtype and device of its tensors."""
    if isinstance(value, torch.Tensor):
        return (tuple(str(s) for s in value.shape), value.dtype, value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(kind(v) for v in value)
    return type(value).__name__


_T = TypeVar("_T")


class Memory(dict[Hashable, _T]):
    """Keeps what is known of calls, in a bounded number: a process may compile any number of models."""

    LIMIT = 20_000

    def __setitem__(self, key: Hashable, value: _T) -> None:
        if len(self) >= self.LIMIT:
            self.clear()
        super().__setitem__(key, value)


@dataclass(frozen=True)
class _Recipe:
    """Says how to make the value of a call again. ``view``: in the memory of the first argument; else in its own."""

    view: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class FakeValues:
    """Makes the fake values of calls. An equal call's value is made from the first one's metadata, without running
    the operator; it is a tensor of its own, in the memory that the operator would have put it in."""

    def __init__(self) -> None:
        self._recipes: Memory[_Recipe | None] = Memory()

    def of(self, node: fx.Node) -> Any:
        """Return the value of a call on the fake values of its inputs. Raises what the operator raises."""
        key = _key(node)
        recipe = self._recipes.get(key)
        if recipe is None:
            value = evaluate(node)
            if key is not None and key not in self._recipes:
                self._recipes[key] = _recipe(node, value)
            return value
        memory = _first_argument(node) if recipe.view else None
        layout = (recipe.shape, recipe.stride, recipe.dtype, recipe.device)
        return compat.fake_tensor(fake_mode_of(node.all_input_nodes), *layout, memory, recipe.offset)


def _key(node: fx.Node) -> Hashable:
    """Return what equal calls have in common; None for a call that is run each time."""
    try:
        key = describe_call(node)
        hash(key)
    except (NotDescribed, TypeError):  # not described, or not hashable
        return None
    mode = fake_mode_of(node.all_input_nodes)  # nothing else says in which mode the value is made
    return key if mode is not None else None


def _recipe(node: fx.Node, value: Any) -> _Recipe | None:
    """Return how a value is made again, None where there is more to it than a recipe says."""
    try:
        describe_value(value, storage=True)
    except NotDescribed:
        return None
    if not isinstance(value, compat.FakeTensor) or value.requires_grad:
        return None
    inputs = [tensor for i in node.all_input_nodes for tensor in iterate_tensors(i.meta["val"])]
    own = not any(compat.same_memory(value, tensor) for tensor in inputs)
    first = _first_argument(node)
    if own:
        fits = value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
    else:
        fits = first is not None and compat.same_memory(value, first) and value.dtype == first.dtype
    if not fits:
        return None
    return _Recipe(not own, value.shape, value.stride(), int(value.storage_offset()), value.dtype, value.device)


def _first_argument(node: fx.Node) -> torch.Tensor | None:
    first = node.args[0] if node.args else None
    value = first.meta["val"] if isinstance(first, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


class Kinds:
    """Remembers kinds of computed values by what calls depend on."""

    def __init__(self) -> None:
        self._known: Memory[Any] = Memory()

    def computed(self, node: fx.Node) -> Any:
        """Return the kind of what a call computes of the fake values of its inputs. Raises what the operator raises."""
        key = _key(node)
        if key in self._known:
            return self._known[key]
        value = evaluate(node)
        # A size that depends on data is another one each time.
        is_static = all(type(size) is int for tensor in iterate_tensors(value) for size in tensor.shape)
        if key is not None and is_static:
            self._known[key] = kind(value)
        return kind(value)


VALUES, KINDS = FakeValues(), Kinds()
