"""Which storages the values of a scheduled graph lie in, and while which nodes each is live.

What is live when follows the executor, which drops a value after its last use, and not what the graph says alone:

- inputs of forward and inference are live throughout, as the caller holds them. Backward's are dropped at their last
  use: autograd hands them over in a list, which the executor empties. (A batch that backward reads counts likewise,
  though the user may hold it longer; torch 2.9 itself holds the gradients of outputs longer.)
- collectives hold buffers that are no node's value (``_collective_buffers``): the landing buffer of a gather, the
  packed gradients that a reduction sends. (Two ranks on gloo cast half of a gradient and hold the other as it is: as
  many bytes where the reduction's type is twice as wide.)
- a slot is allocated from its first buffer's start to its last buffer's end, whatever it holds in between, and where
  CUDA graphs read it, throughout (``_idle_slots``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.effects import aliased_inputs
from graph_fsdp.passes.ir.fake_values import iterate_tensors
from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.passes.ir.layout import gradients_sent, landing_nbytes, packed_nbytes, scattered_nbytes
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.passes.transforms.slots import Slot, slot_table

# shards: the storage of all parameters of the model, live throughout.
# fetched: shards that are kept on the CPU, copied to the device; until their gather is waited for.
# gathered: unsharded buckets, from the start of their gather to their free.
# landing: what a gather receives rank by rank, from its start to its wait, where it does not land in place.
# pooled: what is allocated for gathered buffers and holds none now: what is unused of slots.
# inputs: the batch, buffers, constants; in backward, the gradients of outputs.
# saved: what goes from forward to backward.
# reducing: full gradients until their reduction starts, and what it sends of them, copied or not, until its wait.
# gradients: what reductions yield and what else backward returns.
# temporary: all else.
Category = Literal[
    "shards", "fetched", "gathered", "landing", "pooled", "inputs", "saved", "reducing", "gradients", "temporary"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass
class GraphStorage:
    """``nbytes`` live while the nodes at the positions ``begin`` to ``end`` run, both included. ``node``: what
    allocates it."""

    node: fx.Node
    nbytes: int
    begin: int
    end: int
    category: Category = "temporary"


@dataclass(frozen=True)
class Storages:
    """``found``: all but the parameters' shards; ``of``: those that each node's value lies in, shards among them."""

    found: list[GraphStorage]
    of: Mapping[fx.Node, list[GraphStorage]]


def storages(graph: Graph, context: PassContext, keep_slots: bool = False) -> Storages:
    """The storages of a graph whose buffers are freed. A slot is the buffers in it and what of it holds nothing.
    ``keep_slots``: slots stay allocated between runs, as CUDA graphs need them. Linear in the graph."""
    nodes = graph.nodes
    values = _values(graph, context)
    idle = _idle_slots(slot_table(graph).slots, len(nodes) if keep_slots else None)
    return Storages([*values.found, *_collective_buffers(nodes), *idle], values.of)


def allocations(graph: Graph, context: PassContext) -> Storages:
    """What is asked of the device's allocator: the storages with each slot as one of them, whatever it holds."""
    given, slots = storages(graph, context), slot_table(graph).slots
    inside = {(b.start, "landing" if b.landing else "gathered") for slot in slots for b in slot.buffers}
    alone = [s for s in given.found if s.category != "pooled" and (s.node, s.category) not in inside]
    whole = [GraphStorage(slot.buffers[0].start, slot.nbytes, slot.begin, slot.end, "gathered") for slot in slots]
    return Storages([*alone, *whole], given.of)


def _values(graph: Graph, context: PassContext) -> Storages:
    """The storages of the nodes' values, with lifetimes and categories."""
    nodes = graph.nodes
    lifetimes = _Lifetimes(nodes)
    storages_of = lifetimes.of
    last = len(nodes) - 1
    for storage in lifetimes.found:
        storage.category = _category_of_origin(storage.node, graph.phase)
        held_outside = storage.node.op == "placeholder" and graph.phase != "backward"
        storage.end = last if held_outside or storage.node.op == "get_attr" else storage.end
    for start in graph.with_role(Role.REDUCE_START):
        _reclassify(start.all_input_nodes, storages_of, "reducing")
    for node in graph.with_role(Role.ACCUMULATE):
        for storage in storages_of[node]:  # no value comes of it
            storage.nbytes = 0
        for storage in storages_of[operand(node)]:  # kept for a later graph
            storage.end = last
            storage.category = "gradients" if storage.category == "temporary" else storage.category
    outputs = graph.outputs
    if graph.phase == "forward":
        _reclassify(outputs[context.forward_outputs :], storages_of, "saved")
    elif graph.phase == "backward":
        _reclassify(outputs, storages_of, "gradients")
    device = context.model.offload.device if context.model.offload is not None else None
    found = [s for s in lifetimes.found if s.category != "shards" and not _is_elsewhere(s.node, device)]
    return Storages(found, storages_of)


def _is_elsewhere(node: fx.Node, device: torch.device | None) -> bool:
    """On the CPU, where the device is another."""
    values = [] if device is None else list(iterate_tensors(node.meta.get("val")))
    return bool(values) and device is not None and all(v.device.type != device.type for v in values)


class _Lifetimes:
    """All storages that a graph's values lie in, in ``found``; in ``of``, those of each node's value.

    The results of an operator that returns several tensors are storages of their own: that the statistics of a norm
    are saved does not keep its output alive. The tuple of them does, until the last one is taken out of it, which the
    executor does within the operator's region.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.found: list[GraphStorage] = []
        self.of: dict[fx.Node, list[GraphStorage]] = {}
        self._positions = {node: index for index, node in enumerate(nodes)}
        self._region_end = _region_ends(nodes)
        self._inputs: dict[int, GraphStorage] = {}
        self._elements: dict[fx.Node, dict[int, list[GraphStorage]]] = {}
        for index, node in enumerate(nodes):
            for source in [*node.all_input_nodes, *_sent_until(node)]:
                until = min(index, self._region_end[source]) if self._is_element(node) else index
                for storage in self.of[source]:
                    storage.end = max(storage.end, until)
            self.of[node] = self._value(node, node.meta.get("val"))

    def _is_element(self, node: fx.Node) -> bool:
        return node.target is operator.getitem and node.args[0] in self._elements

    def _value(self, node: fx.Node, value: Any) -> list[GraphStorage]:
        # Higher-order operators return no views of their inputs.
        is_higher_order = isinstance(node.target, compat.HigherOrderOperator)
        if self._is_element(node):
            return self._element(node, value)
        if not is_higher_order and (aliased := aliased_inputs(node)):
            return list({id(s): s for source in aliased for s in self.of[source]}.values())
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            # Views of one tensor that are saved for backward (queries, keys, values) keep one storage alive.
            key = compat.storage_id(value)
            if key not in self._inputs:
                self._inputs[key] = self._allocate(node, value, 0)
            return [self._inputs[key]]
        if is_higher_order and value is None:
            # The partitioner's repetition of random numbers: only what is taken out of it has a fake value.
            self._elements[node] = {}
            return []
        return self._results(node, value, 0 if node.op == "get_attr" else self._positions[node])

    def _element(self, node: fx.Node, value: Any) -> list[GraphStorage]:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        elements = self._elements[source]
        if index not in elements:
            elements[index] = self._results(node, value, self._positions[source])
            self.of[source] += elements[index]
        return elements[index]

    def _results(self, node: fx.Node, value: Any, begin: int) -> list[GraphStorage]:
        if not isinstance(value, (list, tuple)):
            return [self._allocate(node, value, begin)]
        parts = {index: [self._allocate(node, part, begin)] for index, part in enumerate(value)}
        self._elements[node] = parts
        return [storage for part in parts.values() for storage in part]

    def _allocate(self, node: fx.Node, value: Any, begin: int) -> GraphStorage:
        self.found.append(GraphStorage(node, _nbytes(value), begin, self._positions[node]))
        return self.found[-1]


def _region_ends(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each node, the last one before the next collective or free."""
    ends: dict[fx.Node, int] = {}
    end = len(nodes) - 1
    for index, node in reversed(list(enumerate(nodes))):
        end = index - 1 if node.target in dialect.EXECUTED else end
        ends[node] = max(index, end)
    return ends


def _category_of_origin(node: fx.Node, phase: Phase) -> Category:
    if has_role(node, Role.GATHER_START, Role.KEPT):
        return "gathered"
    if has_role(node, Role.REDUCE_START, Role.OFFLOAD_START):
        return "gradients"
    if has_role(node, Role.FETCH_START):
        return "fetched"
    if has_role(node, Role.SHARD):
        return "shards"
    if has_role(node, Role.OFFLOAD, Role.RELOAD):
        return "saved"
    if node.op == "placeholder" and phase == "backward" and not has_role(node, Role.TANGENT):
        return "saved"
    return "inputs" if node.op in ("placeholder", "get_attr") else "temporary"


def _reclassify(values: Iterable[Any], storages_of: dict[fx.Node, list[GraphStorage]], category: Category) -> None:
    for value in values:
        for storage in storages_of[value] if isinstance(value, fx.Node) else ():
            if storage.category == "temporary":
                storage.category = category


def _collective_buffers(nodes: Sequence[fx.Node]) -> list[GraphStorage]:
    """What collectives hold from their start to their wait, besides the buffer that is their value."""
    positions = {node: index for index, node in enumerate(nodes)}
    buffers = []
    for wait in (node for node in nodes if node.target in dialect.WAITS):
        start = operand(wait)
        live = positions[start], positions[wait]
        if start.target is dialect.all_gather_start:
            buffers += [GraphStorage(start, of(start), *live, "landing") for of in (landing_nbytes, scattered_nbytes)]
        elif start.target is dialect.reduce_scatter_start:
            buffers.append(GraphStorage(start, packed_nbytes(start), *live, "reducing"))
    return [buffer for buffer in buffers if buffer.nbytes]


def _sent_until(wait: fx.Node) -> list[fx.Node]:
    """What a collective reads until this, its wait: the gradients of a reduction, a copy of the shards of a gather."""
    if wait.target not in dialect.WAITS:
        return []
    start = operand(wait)
    if start.target is dialect.all_gather_start and not _casts(start):
        return [shard for shard in dialect.argument(start, "shards") if has_role(shard, Role.FETCH_WAIT)]
    return gradients_sent(start) if start.target is dialect.reduce_scatter_start else []


def _casts(start: fx.Node) -> bool:
    """Whether a gather sends another type than the shards have: it reads them when it starts, and not again."""
    return dialect.argument(start, "shards")[0].meta["val"].dtype is not start.meta["val"].dtype


def _idle_slots(slots: Sequence[Slot], kept: int | None = None) -> list[GraphStorage]:
    """What is allocated of slots and holds nothing: between two buffers the whole slot, and what a buffer is smaller
    than its slot. ``kept``: number of nodes of a graph whose slots are allocated all the time."""
    idle = []
    for slot in slots:
        free = slot.begin if kept is None else 0
        for buffer in slot.buffers:
            start, used = buffer.start, buffer.used_nbytes
            idle.append(GraphStorage(start, slot.nbytes, free, buffer.begin - 1, "pooled"))
            idle.append(GraphStorage(start, slot.nbytes - used, buffer.begin, buffer.end, "pooled"))
            free = buffer.end + 1
        if kept is not None:
            idle.append(GraphStorage(slot.buffers[-1].start, slot.nbytes, free, kept - 1, "pooled"))
    return [storage for storage in idle if storage.nbytes and storage.begin <= storage.end]


def _nbytes(value: Any) -> int:
    """Bytes of the storages of the tensors in a fake value, by hint where sizes are symbolic."""
    return sum(compat.size_hint(tensor.untyped_storage().nbytes()) for tensor in iterate_tensors(value))
