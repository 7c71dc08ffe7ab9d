"""Find what a graph of Dynamo's computes of indices alone: position numbers, and masks that compare them.

A value is followed as long as it is affine: an integer tensor's element at ``[…, i, j]`` is ``constant + … + a·i +
b·j``, and a boolean one is True where each of several such numbers is at least 0. So nothing is computed, sizes may be
symbolic, and what is found holds for every element. Other values are unknown, and those that something writes into.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.passes.analysis.affine import FALSE, Affine, Truth, Value, constant_of, each, truth
from graph_fsdp.passes.ir.operands import operand

_INTEGERS = (torch.int64, torch.int32)


def positions(
    graph: fx.Graph, inputs: Mapping[fx.Node, Value] | None = None, written: Collection[int] = ()
) -> dict[fx.Node, Value]:
    """Return the values that are known of a graph's nodes. ``inputs``: those of its placeholders. ``written``: the
    storages that ``written_by_index`` has found."""
    known = {node: value for node, value in (inputs or {}).items() if not _is_written(sample_of(node), written)}
    for node in graph.nodes:
        handler = _handler(node)
        sample = sample_of(node)
        if handler is None or sample is None or _is_written(sample, written):
            continue
        try:
            value = handler(_Call(node, known))
        except _Unknown:
            continue
        value = _of_type(value, sample.dtype)
        if value is not None:
            known[node] = _within(value, sample.shape)
    return known


def written_by_index(graph: fx.Graph) -> set[int]:
    """Return the storages into which a graph writes by an index. torch 2.9 does not count it in their versions."""
    samples = (sample_of(operand(node)) for node in graph.find_nodes(op="call_function", target=operator.setitem))
    return {compat.storage_id(sample) for sample in samples if sample is not None}


def sample_of(node: Any) -> Tensor | None:
    """Return the fake value of a node, None where it is no tensor."""
    sample = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return sample if isinstance(sample, Tensor) else None


def _is_written(sample: Tensor | None, written: Collection[int]) -> bool:
    """Say whether something writes into a value while its graph runs, or may."""
    if sample is None or sample.is_inference() or sample._version > 0:
        return True
    return bool(written) and compat.storage_id(sample) in written


def _handler(node: fx.Node) -> Callable[[_Call], Value] | None:
    if node.op == "call_method":
        return _HANDLERS.get(str(node.target).strip("_"))
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", "")
    is_known = getattr(torch, name, None) is node.target or getattr(operator, name, None) is node.target
    return _HANDLERS.get(name.strip("_")) if is_known else None


def _of_type(value: Value, dtype: torch.dtype) -> Value:
    """Return the value as one of this dtype; None where it is none of an integer or a boolean tensor."""
    if dtype in _INTEGERS:
        if isinstance(value, frozenset):
            constant = constant_of(value)
            return None if constant is None else Affine(constant)
        return value
    if dtype == torch.bool:
        if isinstance(value, Affine):
            return None if value.steps else frozenset() if value.constant else FALSE
        return value
    return None


def _within(value: Affine | Truth, shape: torch.Size) -> Value:
    """Drop the steps of dimensions of one element, whose index is 0; these are repeated where tensors meet."""
    dims = [None if isinstance(size, int) and size == 1 else dim for dim, size in enumerate(reversed(shape))]
    return each(value, lambda a: a.moved(dims))


class _Unknown(Exception):
    """Says that a value is not followed."""


class _Call:
    """Reads the arguments of a call."""

    def __init__(self, node: fx.Node, known: Mapping[fx.Node, Value]) -> None:
        self.node, self.known = node, known

    def value(self, argument: Any) -> Affine | Truth:
        if isinstance(argument, fx.Node):
            found = self.known.get(argument)
        elif isinstance(argument, bool):
            found = frozenset() if argument else FALSE
        else:
            found = Affine(argument) if isinstance(argument, int) else None
        if found is None:
            raise _Unknown
        return found

    def affine(self, argument: Any) -> Affine:
        found = self.value(argument)
        if not isinstance(found, Affine):
            raise _Unknown
        return found

    def truth(self, argument: Any) -> Truth:
        found = self.value(argument)
        if not isinstance(found, frozenset):
            raise _Unknown
        return found

    def integer(self, name: str, place: int, default: int | None = None) -> int:
        found = self.argument(name, place, default)
        if not isinstance(found, int) or isinstance(found, bool):
            raise _Unknown
        return found

    @property
    def source(self) -> Any:
        """Return the tensor that a function or method of a tensor is called with."""
        return self.argument("input", 0)

    def argument(self, name: str, place: int, default: Any = None) -> Any:
        args = self.node.args
        return args[place] if place < len(args) else self.node.kwargs.get(name, default)

    @property
    def two(self) -> tuple[Affine, Affine]:
        """Return both arguments of a call that has no others."""
        if len(self.node.args) != 2 or self.node.kwargs:
            raise _Unknown
        a, b = map(self.affine, self.node.args)
        return a, b

    def dims(self, argument: Any) -> int:
        """Return the number of dimensions of a tensor."""
        sample = sample_of(argument)
        if sample is None:
            raise _Unknown
        return sample.dim()

    def from_last(self, argument: Any, dim: int) -> int:
        """Return which dimension of a tensor it is, counted from the last one."""
        return -1 - dim if dim < 0 else self.dims(argument) - 1 - dim


def _arange(call: _Call) -> Value:
    args = call.node.args
    start = call.argument("start", 0, 0) if len(args) != 1 else 0
    step = call.argument("step", 2, 1)
    if not isinstance(start, int) or not isinstance(step, int):
        raise _Unknown
    return Affine.of(start, [step])


def _filled(constant: int) -> Callable[[_Call], Value]:
    return lambda call: Affine(constant)


def _full(call: _Call) -> Value:
    return call.value(call.argument("fill_value", 2 if call.node.op == "call_method" else 1))


def _same(call: _Call) -> Value:
    return call.value(call.source)


def _unsqueeze(call: _Call) -> Value:
    source = call.source
    dims = call.dims(source)
    new = call.integer("dim", 1)
    place = -1 - new if new < 0 else dims - new  # in the result, from the last
    order: list[int | None] = list(range(dims))
    order.insert(place, None)
    return each(call.value(source), lambda a: a.moved(order))


def _getitem(call: _Call) -> Value:
    source, index = call.node.args
    entries = list(index) if isinstance(index, tuple) else [index]
    dims = call.dims(source)
    if all(isinstance(entry, fx.Node) for entry in entries):
        return _picked(call, call.value(source), entries, dims)
    if any(isinstance(entry, (fx.Node, list)) for entry in entries):
        raise _Unknown
    taken = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if Ellipsis not in entries:
        entries.append(Ellipsis)
    place = entries.index(Ellipsis)
    entries[place : place + 1] = [slice(None)] * (dims - taken)
    return _sliced(call.value(source), entries, dims)


def _picked(call: _Call, value: Affine | Truth, indices: list[Any], dims: int) -> Value:
    """Return what tensors of indices, one per dimension, pick."""
    places = [call.affine(index) for index in reversed(indices)]
    if len(places) != dims or any(place.constant < 0 or min(place.steps, default=0) < 0 for place in places):
        raise _Unknown  # a negative index counts from the end

    def pick(a: Affine) -> Affine:
        return sum((place * a.step(dim) for dim, place in enumerate(places)), Affine(a.constant))

    return each(value, pick)


def _sliced(value: Affine | Truth, entries: list[Any], dims: int) -> Value:
    """Return what numbers, slices and None, that leave out no dimension, make of a tensor."""
    order: list[int | None] = []
    scales: list[int] = []
    starts = [0] * dims
    dim = dims
    for entry in entries:
        if entry is None:
            order.append(None)
            scales.append(1)
            continue
        dim -= 1
        start, scale = (entry.start or 0, entry.step or 1) if isinstance(entry, slice) else (entry, 1)
        if not isinstance(start, int) or not isinstance(scale, int) or isinstance(start, bool) or start < 0:
            raise _Unknown
        starts[dim] = start
        if isinstance(entry, slice):
            order.append(dim)
            scales.append(scale)
    order.reverse()
    scales.reverse()

    def cut(a: Affine) -> Affine:
        moved = a.moved(order)
        first = a.constant + sum(a.step(d) * start for d, start in enumerate(starts))
        return Affine.of(first, [step * scale for step, scale in zip(moved.steps, scales, strict=False)])

    return each(value, cut)


def _diff(call: _Call) -> Value:
    source = call.source
    prepend = call.argument("prepend", 3)
    if call.integer("n", 1, 1) != 1 or call.argument("append", 4) is not None:
        raise _Unknown
    values = call.affine(source)
    dim = call.from_last(source, call.integer("dim", 2, -1))
    step = Affine(values.step(dim))
    if prepend is not None:
        first = values.moved([None if d == dim else d for d in range(len(values.steps))])
        sample = sample_of(prepend)
        is_one = sample is not None and sample.dim() > dim and sample.shape[-1 - dim] == 1
        if not is_one or first - call.affine(prepend) != step:
            raise _Unknown
    return step


def _cumsum(call: _Call) -> Value:
    source = call.source
    constant = constant_of(call.value(source))
    if constant is None:
        raise _Unknown
    dim = call.from_last(source, call.integer("dim", 1))
    return Affine.of(constant, [*[0] * dim, constant])


def _triangle(sign: int) -> Callable[[_Call], Value]:
    """``tril`` for 1, ``triu`` for -1."""

    def within(call: _Call) -> Value:
        diagonal = call.integer("diagonal", 1, 0)
        return truth({*call.truth(call.source), Affine.of(sign * diagonal, [-sign, sign])})

    return within


def _compared(difference: Callable[[Affine, Affine], Affine]) -> Callable[[_Call], Value]:
    return lambda call: truth({difference(*call.two)})


def _equal(call: _Call) -> Value:
    a, b = call.two
    return truth({a - b, b - a})


def _unequal(call: _Call) -> Value:
    a, b = call.two
    difference = constant_of(a - b)
    if difference is None:
        raise _Unknown
    return frozenset() if difference else FALSE


def _and(call: _Call) -> Value:
    a, b = call.node.args
    return truth(call.truth(a) | call.truth(b))


def _or(call: _Call) -> Value:
    a, b = map(call.truth, call.node.args)
    if not a or not b:
        return frozenset()
    if FALSE not in (a, b):
        raise _Unknown
    return a if b == FALSE else b


def _not(call: _Call) -> Value:
    given = call.truth(call.source)
    if not given:
        return FALSE
    if len(given) > 1:
        raise _Unknown
    (condition,) = given
    return truth({condition * -1 - Affine(1)})


def _times(call: _Call) -> Value:
    a, b = call.two
    constants = [constant_of(a), constant_of(b)]
    if constants[1] is not None:
        return a * constants[1]
    if constants[0] is None:
        raise _Unknown
    return b * constants[0]


# By the names of functions of torch and of ``operator``, and of methods, without the underscores around them.
_HANDLED: dict[str, Callable[[_Call], Value]] = {
    "arange": _arange,
    "ones new_ones ones_like": _filled(1),
    "zeros new_zeros zeros_like": _filled(0),
    "full new_full": _full,
    "to int long bool type clone contiguous expand expand_as": _same,
    "unsqueeze": _unsqueeze,
    "getitem": _getitem,
    "diff": _diff,
    "cumsum": _cumsum,
    "tril": _triangle(1),
    "triu": _triangle(-1),
    "add": lambda call: call.two[0] + call.two[1],
    "sub": lambda call: call.two[0] - call.two[1],
    "mul": _times,
    "le less_equal": _compared(lambda a, b: b - a),
    "lt less": _compared(lambda a, b: b - a - Affine(1)),
    "ge greater_equal": _compared(lambda a, b: a - b),
    "gt greater": _compared(lambda a, b: a - b - Affine(1)),
    "eq": _equal,
    "ne not_equal": _unequal,
    "and logical_and bitwise_and": _and,
    "or logical_or bitwise_or": _or,
    "invert not logical_not bitwise_not": _not,
}
_HANDLERS = {name: handler for names, handler in _HANDLED.items() for name in names.split()}
