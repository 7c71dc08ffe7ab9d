"""What the copies of a trace have in common is found once: their fake values, and where their nodes come from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.canonical_form import NotDescribed, describe_value
from graph_fsdp.passes.ir.fake_values import VALUES
from graph_fsdp.passes.repeat.segments import Segment

_KEYS = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack")  # metadata that says where a node comes from


@dataclass(frozen=True, slots=True)
class _First:
    """Describes the first copy of a node of a trace: what the values are that it reads, what its own value is, and how
    to make the value of an equal call, if that is known."""

    reads: list[Hashable]
    value: Hashable
    again: Callable[[fx.Node], Any] | None


class CopiedValues:
    """Gives copies of the nodes of traces their fake values. A copy that reads what the first one has read has the
    first one's value, in memory of its own or of what it reads: the operator is neither run nor looked up."""

    def __init__(self) -> None:
        self._first: dict[fx.Node, _First] = {}
        self._described: dict[fx.Node, Hashable] = {}  # copy → its value, or the node that it is like the first copy of

    def set(self, node: fx.Node, copy: fx.Node) -> bool:
        """Set the value of a copy of a trace's ``node``, and say whether it is laid out as the first copy is."""
        reads = [self._description(source) for source in compat.inputs_of(copy)]
        first = self._first.get(node)
        if first is not None and first.again is not None and None not in reads and reads == first.reads:
            copy.meta["val"] = first.again(copy)
            self._described[copy] = node
            return True
        copy.meta["val"] = value_of(copy)
        found = _described(copy.meta["val"])
        if first is None:
            self._first[node] = _First(reads, found, VALUES.again(copy))
            self._described[copy] = None if found is None else node
            return False
        is_like = found is not None and found == first.value
        self._described[copy] = node if is_like else found
        return is_like

    def _description(self, node: fx.Node) -> Hashable:
        """Describe a value, so that equal ones of one node of a trace, and of what is around, are equal; None where
        there is more to it than can be written down."""
        if node not in self._described:
            self._described[node] = _described(node.meta.get("val"))
        return self._described[node]


def value_of(node: fx.Node) -> Any:
    """Compute the fake value of a call in the capture that is under way."""
    with contextlib.nullcontext() if node.all_input_nodes else compat.current_fake_mode():
        return VALUES.of(node)


def _described(value: Any) -> Hashable:
    try:
        return describe_value(value, storage=True)
    except NotDescribed:
        return None


class Origins:
    """Tells copies of the nodes of a trace of ``traced`` where they come from: what the traced segment's metadata is
    to a node of the trace, another segment's is to its copy."""

    def __init__(self, traced: Segment, nodes: Iterable[fx.Node]) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._traced = [self._numbered(node.meta, fresh=True) for node in traced.all_nodes]
        self._nodes = {node: self._numbered(node.meta, fresh=False) for node in nodes}

    def of(self, segment: Segment) -> list[dict[int, Any]]:
        """Return for each kind of metadata that of another segment, by the number of the traced one's."""
        found: list[dict[int, Any]] = [{} for _ in _KEYS]
        for numbers, node in zip(self._traced, segment.all_nodes, strict=True):
            for place, number in numbers:
                new = node.meta.get(_source_of(_KEYS[place]))
                if new is not None:
                    found[place][number] = new
        return found

    def rename(self, node: fx.Node, copy: fx.Node, origins: list[dict[int, Any]]) -> None:
        """Give a copy of a trace's ``node`` the metadata of its own segment."""
        for place, number in self._nodes[node]:
            new = origins[place].get(number)
            if new is not None:
                copy.meta[_KEYS[place]] = new

    def _numbered(self, meta: dict[str, Any], *, fresh: bool) -> list[tuple[int, int]]:
        """Return the place of the kind and the number of each of a node's metadata that the traced segment has."""
        found = []
        for place, key in enumerate(_KEYS):
            old = meta.get(_source_of(key) if fresh else key)
            if old is None:
                continue
            hashable = key, tuple(old.items()) if isinstance(old, dict) else old
            if fresh:
                self._numbers.setdefault(hashable, len(self._numbers))
            if hashable in self._numbers:
                found.append((place, self._numbers[hashable]))
        return found


def _source_of(key: str) -> str:
    """Return under which key a segment has what its trace has under ``key``."""
    return "nn_module_stack" if key == "fwd_nn_module_stack" else key


def layout(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.device)
    return tuple(map(layout, value)) if isinstance(value, (tuple, list)) else type(value)
