"""Fake values say what a call computes, as far as shapes, dtypes, devices and memory go.

A model of equal layers makes the same few calls thousands of times, and running an operator on fake tensors costs about
100 microseconds. So each distinct call (``canonical_form.py``) is run once per process (``VALUES``). Calls of operators
that others have registered are run each time.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

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
    values = iterate_tensors([node.meta.get("val") for node in nodes])
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


class _Known(NamedTuple):
    """Holds what equal calls have in common. ``kind``: of their values, None where a size depends on data. ``again``:
    makes the value of such a call, None where there is more to it than is known."""

    kind: Any
    again: Callable[[fx.Node], torch.Tensor] | None


class FakeValues:
    """Makes the fake values of calls. An equal call's value is made from the first one's metadata, without running the
    operator, as a tensor of its own in the memory that the operator would have used."""

    LIMIT = 20_000  # calls that are known: a process may compile any number of models

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def of(self, node: fx.Node) -> Any:
        """Return the value of a call on the fake values of its inputs. Raises what the operator raises."""
        known = self._known.get(key := _key(node))
        return self._run(node, key) if known is None or known.again is None else known.again(node)

    def again(self, node: fx.Node) -> Callable[[fx.Node], torch.Tensor] | None:
        """Return what makes the value of a call that is equal to this one, None where it has to be run."""
        known = self._known.get(_key(node))
        return None if known is None else known.again

    def kind_of(self, node: fx.Node) -> Any:
        """Return the kind of what the operator computes, whatever the node's value. Raises what it raises."""
        known = self._known.get(key := _key(node))
        return kind(self._run(node, key)) if known is None or known.kind is None else known.kind

    def _run(self, node: fx.Node, key: Hashable) -> Any:
        value = evaluate(node)
        if key is not None and key not in self._known:
            is_static = all(type(size) is int for tensor in iterate_tensors(value) for size in tensor.shape)
            if len(self._known) >= self.LIMIT:
                self._known.clear()
            self._known[key] = _Known(kind(value) if is_static else None, _again(node, value))
        return value


def _key(node: fx.Node) -> Hashable:
    """Return what equal calls have in common; None for a call that is run each time."""
    if fake_mode_of(node.all_input_nodes) is None:  # nothing else says in which mode the value is made
        return None
    try:
        return describe_call(node)
    except NotDescribed:
        return None


def _again(node: fx.Node, value: Any) -> Callable[[fx.Node], torch.Tensor] | None:
    """Return how to make the value of an equal call, in the memory of its first argument or in its own; else None."""
    try:
        describe_value(value, storage=True)
    except NotDescribed:
        return None
    if not isinstance(value, compat.FakeTensor) or value.requires_grad:
        return None
    inputs = iterate_tensors([source.meta["val"] for source in node.all_input_nodes])
    memory = compat.storage_id(value)
    own = memory not in map(compat.storage_id, inputs)
    first = _first_argument(node)
    if own:
        fits = value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
    else:
        fits = first is not None and compat.storage_id(first) == memory and value.dtype == first.dtype
    if not fits:
        return None
    layout, offset = (value.shape, value.stride(), value.dtype, value.device), int(value.storage_offset())

    def again(equal: fx.Node) -> torch.Tensor:
        memory = None if own else _first_argument(equal)
        return compat.fake_tensor(fake_mode_of(equal.all_input_nodes), *layout, memory, offset)

    return again


def _first_argument(node: fx.Node) -> torch.Tensor | None:
    first = node.args[0] if node.args else None
    value = first.meta["val"] if isinstance(first, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


VALUES = FakeValues()
