"""Fake values say what a call computes, as far as shapes, dtypes, devices and memory go.

A model of equal layers makes the same few calls thousands of times, and running an operator on fake tensors costs about
100 microseconds. So each distinct call (``canonical_form.py``) is run once per process (``VALUES``). Calls of operators
that others have registered are run each time.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.canonical_form import NotDescribed, describe_call, describe_value
from graph_fsdp.passes.ir.operands import first_operand, function


def evaluate(node: fx.Node) -> Any:
    """Compute the value of a call on the fake values of its inputs."""
    found: Any = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = found
    if node.target is operator.getitem and isinstance(args[0], (tuple, list)):  # no operator: a mode would cost more
        return args[0][args[1]]
    with fake_mode_of(node.all_input_nodes) or contextlib.nullcontext() as mode:
        if "unbacked_bindings" in node.meta:
            return compat.with_sizes_of(node, mode, lambda: function(node)(*args, **kwargs))
        return function(node)(*args, **kwargs)


def fake_mode_of(nodes: Iterable[fx.Node]) -> Any:
    """Return the fake mode of the values of nodes, None where none of them is a fake tensor."""
    for node in nodes:
        value = node.meta.get("val")
        for tensor in (value,) if isinstance(value, torch.Tensor) else iterate_tensors(value):
            if isinstance(tensor, compat.FakeTensor):
                return tensor.fake_mode
    return None


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
    again: Callable[[fx.Node], Any] | None


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

    def again(self, node: fx.Node) -> Callable[[fx.Node], Any] | None:
        """Return what makes the value of a call of the same graph that is equal to this one, None where it has to be
        run."""
        if node.all_input_nodes:
            known = self._known.get(_key(node))
            is_known = known is not None and known.again is not None
        else:
            is_known = _described(node) is not None
        return again_of(node, node.meta["val"], fake_mode_of([node])) if is_known else None

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
            self._known[key] = _Known(kind(value) if is_static else None, again_of(node, value))
        return value


def _key(node: fx.Node) -> Hashable:
    """Return what equal calls have in common; None for a call that is run each time."""
    # Nothing but the inputs says in which mode the value is made.
    return None if fake_mode_of(node.all_input_nodes) is None else _described(node)


def _described(node: fx.Node) -> Hashable:
    """Describe a call; None where there is more to it than can be written down."""
    try:
        return describe_call(node)
    except NotDescribed:
        return None


def again_of(node: fx.Node, value: Any, mode: Any = None) -> Callable[[fx.Node], Any] | None:
    """Return how to make the value of a call that is equal to ``node``'s, with ``value``: tensors in memory of their
    own, one in the memory of the first argument, or None; and None where there is more to it. In ``mode``, or that of
    the inputs."""
    if value is None:
        return lambda _: None
    container = type(value) if type(value) in (tuple, list) else None
    tensors: Sequence[Any] = [value] if container is None else value
    if not all(isinstance(tensor, compat.FakeTensor) and not tensor.requires_grad for tensor in tensors):
        return None
    try:
        describe_value(value, storage=True)
    except NotDescribed:
        return None
    given = {compat.storage_id(tensor) for n in node.all_input_nodes for tensor in iterate_tensors(n.meta["val"])}
    memories = {compat.storage_id(tensor) for tensor in tensors}
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]
    if memories.isdisjoint(given):
        if len(memories) < len(tensors) or not all(map(_fills_its_memory, tensors)):
            return None

        def made(equal: fx.Node) -> Any:
            own_mode = mode or fake_mode_of(equal.all_input_nodes)
            found = [compat.fake_tensor(own_mode, *layout, None, 0) for layout in layouts]
            return found[0] if container is None else container(found)

        return made
    first = _first_argument(node)
    if container is not None or first is None or compat.storage_id(first) not in memories or value.dtype != first.dtype:
        return None
    (layout,), offset = layouts, int(value.storage_offset())
    return lambda equal: compat.fake_tensor(
        mode or fake_mode_of(equal.all_input_nodes), *layout, _first_argument(equal), offset
    )


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's storage is as large as a new tensor of the same layout has it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    numel = last + 1 if tensor.numel() else 0
    return not tensor.storage_offset() and tensor.untyped_storage().nbytes() == numel * tensor.dtype.itemsize


def _first_argument(node: fx.Node) -> torch.Tensor | None:
    first = first_operand(node)
    value = first.meta["val"] if first is not None else None
    return value if isinstance(value, torch.Tensor) else None


VALUES = FakeValues()
