"""Canonical forms are equal for calls, and pieces of graphs, that compute the same whatever their nodes are called.

Equal layers differ only in the names of nodes and parameters: so a fake value is computed once (``fake_values.py``), a
layer is traced once (``repeat/segments.py``) and a compute region is compiled once (``runtime/regions``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.compat import inputs_of
from graph_fsdp.passes.ir import dialect

_NAMESPACES = frozenset({"aten", "prims", "graph_fsdp"})


class NotDescribed(Exception):
    """Says that there is more to a value or an argument than its description would say, and what the value is."""


class _Name(NamedTuple):
    """Stands for a node, whatever it is called."""

    number: int


def canonical_form(
    inputs: Iterable[fx.Node],
    body: Iterable[fx.Node],
    value: Callable[[fx.Node], Hashable],
    target: Callable[[fx.Node], Hashable],
    literal: Callable[[Any], Any] = lambda argument: argument,
) -> tuple[tuple[Hashable, ...], dict[fx.Node, int]]:
    """Return what ``body`` computes of ``inputs``, up to the names of nodes and parameters, and the number of each node
    in it. ``value`` describes the value of a node, ``target`` what it calls, ``literal`` an argument that is none."""
    names: dict[fx.Node, _Name] = {}
    parts: list[Hashable] = []
    for node in inputs:
        parts.append(value(node))
        names[node] = _Name(len(names))
    for node in body:
        given: Any = (dialect.with_parameter(node.target, node.args, ""), node.kwargs)
        renamed = fx.node.map_aggregate(given, lambda a: names[a] if isinstance(a, fx.Node) else literal(a))
        parts.append((target(node), repr(renamed), value(node)))
        names[node] = _Name(len(names))
    return tuple(parts), {node: name.number for node, name in names.items()}


def digest(lines: Iterable[object]) -> str:
    """Return a short text that is equal for equal lines, in all processes."""
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()


def describe_call(node: fx.Node) -> Hashable:
    """Return all that the value of a call depends on, but for the memory of its inputs.

    Raises:
        NotDescribed: it depends on more: symbolic sizes, constants, subgraphs, an operator that writes to its inputs.
    """
    target = node.target
    # A user may register another operator by the same name.
    if not isinstance(target, compat.OpOverload) or target.namespace not in _NAMESPACES:
        raise NotDescribed
    if target._schema.is_mutable and target not in dialect.EXECUTED:  # may change sizes or storages of its inputs
        raise NotDescribed
    names = {source: number for number, source in enumerate(inputs_of(node))}
    given = dialect.with_parameter(target, node.args, "")
    described = [_describe_argument(argument, names) for argument in given]
    named = [(name, _describe_argument(argument, names)) for name, argument in node.kwargs.items()]
    values = [describe_value(source.meta["val"], storage=True) for source in names]
    kinds = ("cpu", "cuda", "xpu")
    autocast = [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds]
    state = torch.is_grad_enabled(), torch.get_default_dtype(), *autocast
    return target, tuple(described), tuple(named), tuple(values), state


# Types of arguments of which equal ones are the same.
_EXACT = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def _describe_argument(argument: Any, names: dict[fx.Node, int]) -> Hashable:
    kind = type(argument)
    if kind is fx.Node:
        return fx.Node, names[argument]
    if kind in _EXACT:
        return kind, argument
    if isinstance(argument, (tuple, list)):
        return (list if isinstance(argument, list) else tuple), *[_describe_argument(item, names) for item in argument]
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise NotDescribed
    return kind, repr(fx.map_arg(argument, lambda source: _Name(names[source])))


_INTEGERS = frozenset({int})


def describe_value(value: Any, *, storage: bool = False, unread: bool = False) -> Hashable:
    """Return all that is known of the fake tensors of a value, and with ``storage`` the bytes of what each lies in;
    with ``unread`` also whether each is a view that is conjugated, or negated, when it is read.

    Raises:
        NotDescribed: that is more than is written down here.
    """
    if isinstance(value, (tuple, list)):
        return tuple([describe_value(item, storage=storage, unread=unread) for item in value])
    if type(value) is not compat.FakeTensor or value.layout is not torch.strided:
        raise NotDescribed(f"a {type(value).__name__}, not an ordinary tensor")
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if storage:
        sizes = (*sizes, value.untyped_storage().nbytes())
    if not _INTEGERS.issuperset(map(type, sizes)):
        raise NotDescribed("of symbolic size")
    when_read = (value.is_conj(), value.is_neg())
    if value.constant is not None or (any(when_read) and not unread):
        raise NotDescribed("a constant, or a view that is conjugated or negated when it is read")
    described = (len(value.shape), sizes, value.dtype, value.device, value.requires_grad)
    return (*described, *when_read) if unread else described
