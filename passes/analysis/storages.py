"""Storages are the memory that a scheduled graph's values and collectives lie in, with lifetimes and categories.

Lifetimes are the executor's, which drops a value after its last use:

- inputs of forward and inference are live throughout, as the caller holds them. Backward's are dropped at their last
  use, a batch too, though the user may hold it longer.
- collectives hold buffers that are no node's value (``_collective_buffers``): the landing buffer of a gather, the
  packed gradients that a reduction sends. (Two ranks on gloo cast half of a gradient and hold the other as it is: as
  many bytes where the reduction's type is twice as wide.)
- a slot is allocated from its first buffer's start to its last buffer's end, and where CUDA graphs read it, throughout
  (``_idle_slots``).
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
from graph_fsdp.passes.ir.layout import blocks_nbytes, gradients_sent, landing_nbytes, packed_nbytes, scattered_nbytes
from graph_fsdp.passes.ir.operands import argument, item_of, operand
from graph_fsdp.passes.transforms.slots import Slot, most_at_once, slot_table

# shards: the storage of all parameters of the model, live throughout.
# fetched: shards that are kept on the CPU, copied to the device; until their gather is waited for.
# gathered: unsharded buckets, from the start of their gather to their free; of units that are whole, throughout.
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
    """``node`` allocates ``nbytes``, live while nodes at the positions ``begin`` to ``end`` run, both included."""

    node: fx.Node
    nbytes: int
    begin: int
    end: int
    category: Category = "temporary"


@dataclass(frozen=True)
class Storages:
    """Holds storages: ``found``, all but shards and whole units; ``of``, each node's, with these."""

    found: list[GraphStorage]
    of: Mapping[fx.Node, list[GraphStorage]]


def storages(graph: Graph, context: PassContext, keep_slots: bool = False) -> Storages:
    """Find the storages of a graph whose buffers are freed: of a slot, its buffers and what of it holds nothing. With
    ``keep_slots``, slots stay allocated between runs. Linear in the graph."""
    nodes = graph.nodes
    values = _values(graph, context)
    idle = _idle_slots(slot_table(graph).slots, len(nodes) if keep_slots else None)
    return Storages([*values.found, *_collective_buffers(nodes), *idle], values.of)


def most_bytes_at_once(graph: Graph, context: PassContext) -> int:
    """Return the bytes at the peak of a graph, before its buffers are freed too."""
    return most_at_once((s.begin, s.end, s.nbytes) for s in storages(graph, context).found)


def allocations(graph: Graph, context: PassContext) -> Storages:
    """Find what is asked of the device's allocator: the storages, with each slot as one of them."""
    given, slots = storages(graph, context), slot_table(graph).slots
    inside = {(b.start, "landing" if b.landing else "gathered") for slot in slots for b in slot.buffers}
    alone = [s for s in given.found if s.category != "pooled" and (s.node, s.category) not in inside]
    whole = [GraphStorage(slot.buffers[0].start, slot.nbytes, slot.begin, slot.end, "gathered") for slot in slots]
    return Storages([*alone, *whole], given.of)


def value_storages(graph: Graph) -> Storages:
    """Find the storages that the values of any graph lie in, as executed operator by operator, without categories."""
    found = _Lifetimes(graph)
    return Storages(found.found, found.of)


def _values(graph: Graph, context: PassContext) -> Storages:
    """Find the storages of the nodes' values, with lifetimes and categories."""
    lifetimes = _Lifetimes(graph)
    storages_of = lifetimes.of
    last = len(graph.fx_graph.nodes) - 1
    for storage in lifetimes.found:
        storage.category = _category_of_origin(storage.node, graph.phase)
        outside = storage.node.op == "get_attr" or (storage.node.op == "placeholder" and graph.phase != "backward")
        storage.end = last if outside else storage.end
    for start in graph.with_role(Role.REDUCE_START):
        _reclassify(start.all_input_nodes, storages_of, "reducing")
    for node in graph.with_role(Role.ACCUMULATE, Role.UPDATE):
        for storage in storages_of[node]:  # no value comes of it
            storage.nbytes = 0
    for node in graph.with_role(Role.ACCUMULATE):
        for storage in storages_of[operand(node)]:  # kept for a later graph
            storage.end = last
            storage.category = "gradients" if storage.category == "temporary" else storage.category
    outputs = graph.outputs
    if graph.phase == "forward":
        _reclassify(outputs[context.forward_outputs :], storages_of, "saved")
    elif graph.phase == "backward":
        _reclassify(outputs, storages_of, "gradients")
    found = [s for s in lifetimes.found if s.category != "shards" and not has_role(s.node, Role.UNSHARDED)]
    if copies_are_elsewhere(context):
        found = [storage for storage in found if not _is_copy_on_host(storage.node)]
    return Storages(found, storages_of)


def _is_copy_on_host(node: fx.Node) -> bool:
    """Say whether a node's memory is the CPU's: of offloaded gradients, and of activations, in backward too."""
    if node.op == "placeholder":
        return has_role(node, Role.RELOAD)
    return has_role(node, Role.OFFLOAD, Role.OFFLOAD_START)


class _Lifetimes:
    """Finds all storages that a graph's values lie in (``found``), and those of each node's value (``of``).

    The results of an operator that returns several tensors are storages of their own. The tuple of them keeps all alive
    until the last one is taken out of it, which the executor does within the operator's region.
    """

    def __init__(self, graph: Graph) -> None:
        self.found: list[GraphStorage] = []
        self.of: dict[fx.Node, list[GraphStorage]] = {}
        self._positions, next_executed = graph.positions(), graph.next_of(dialect.EXECUTED)
        self._inputs: dict[int, GraphStorage] = {}
        self._elements: dict[fx.Node, dict[Any, list[GraphStorage]]] = {}
        for node, index in self._positions.items():
            for source in [*compat.inputs_of(node), *_sent_until(node)]:
                region_end = self._positions[next_executed[source]] - 1
                until = min(index, region_end) if self._is_element(node) else index
                for storage in self.of[source]:
                    storage.end = max(storage.end, until)
            self.of[node] = self._value(node, node.meta.get("val"))

    def _is_element(self, node: fx.Node) -> bool:
        return node.target is operator.getitem and operand(node) in self._elements

    def _value(self, node: fx.Node, value: Any) -> list[GraphStorage]:
        # Higher-order operators return no views of their inputs.
        is_higher_order = isinstance(node.target, compat.HigherOrderOperator)
        if self._is_element(node):
            return self._elements[operand(node)][item_of(node)]
        if node.target is dialect.MODEL_WAIT:
            return self.of[operand(node)]
        if not is_higher_order and (aliased := aliased_inputs(node)):
            return list({id(s): s for source in aliased for s in self.of[source]}.values())
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            # Views of one tensor that are saved for backward (queries, keys, values) keep one storage alive.
            key = compat.storage_id(value)
            if key not in self._inputs:
                self._inputs[key] = self._allocate(node, value, 0)
            return [self._inputs[key]]
        begin = 0 if node.op == "get_attr" else self._positions[node]
        if is_higher_order and value is None:
            # The partitioner's repetition of random numbers: only what is taken out of it has a fake value.
            taken = {item_of(user): user for user in reversed(node.users) if user.target is operator.getitem}
            parts = {at: self._results(user, user.meta.get("val"), begin) for at, user in taken.items()}
            return self._keep_parts(node, parts)
        return self._results(node, value, begin)

    def _results(self, node: fx.Node, value: Any, begin: int) -> list[GraphStorage]:
        if not isinstance(value, (list, tuple)):
            return [self._allocate(node, value, begin)]
        return self._keep_parts(node, {at: [self._allocate(node, part, begin)] for at, part in enumerate(value)})

    def _keep_parts(self, node: fx.Node, parts: dict[Any, list[GraphStorage]]) -> list[GraphStorage]:
        self._elements[node] = parts
        return [storage for part in parts.values() for storage in part]

    def _allocate(self, node: fx.Node, value: Any, begin: int) -> GraphStorage:
        # Of symbolic sizes the hints.
        sizes = (compat.size_hint(tensor.untyped_storage().nbytes()) for tensor in iterate_tensors(value))
        self.found.append(GraphStorage(node, sum(sizes), begin, self._positions[node]))
        return self.found[-1]


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
    """Find what collectives hold from their start to their wait, besides the buffer that is their value."""
    positions = {node: index for index, node in enumerate(nodes)}
    buffers: list[GraphStorage] = []
    for wait in (node for node in nodes if node.target in dialect.WAITS):
        start = operand(wait)
        live = positions[start], positions[wait]
        if start.target is dialect.all_gather_start:
            buffers += [GraphStorage(start, of(start), *live, "landing") for of in (landing_nbytes, scattered_nbytes)]
        elif start.target is dialect.reduce_scatter_start:
            buffers.append(GraphStorage(start, packed_nbytes(start), *live, "reducing"))
            if argument(start, "sent_as"):  # received; scaled gradients; and each part of the sum
                part, ranks = blocks_nbytes(start.meta["val"].numel()), argument(start, "world_size")
                buffers.append(GraphStorage(start, packed_nbytes(start), *live, "reducing"))
                buffers.append(GraphStorage(start, ranks * part, live[0], live[0], "reducing"))
                buffers.append(GraphStorage(start, part, live[1], live[1], "reducing"))
    return [buffer for buffer in buffers if buffer.nbytes]


def _sent_until(wait: fx.Node) -> list[fx.Node]:
    """Return what a collective reads until its wait: the gradients of a reduction, a copy of a gather's shards."""
    if wait.target not in dialect.WAITS:
        return []
    start = operand(wait)
    if start.target is dialect.all_gather_start:
        # Shards of another type than is sent are read when the gather starts, and not again.
        shards, sent = argument(start, "shards"), start.meta["val"].dtype
        return [s for s in shards if has_role(s, Role.FETCH_WAIT) and shards[0].meta["val"].dtype is sent]
    return gradients_sent(start) if start.target is dialect.reduce_scatter_start else []


def _idle_slots(slots: Sequence[Slot], kept: int | None) -> list[GraphStorage]:
    """Find what is allocated of slots and holds nothing: the whole slot between two buffers, and what a buffer is
    smaller than its slot. ``kept``: number of nodes of a graph whose slots are allocated all the time."""
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


def copies_are_elsewhere(context: PassContext) -> bool:
    """Say whether what is offloaded to the CPU leaves the device's memory: of an accelerator, or of a graph that was
    traced on the CPU and is planned for one."""
    if context.cost is not None:
        return context.cost.hardware.overlaps
    return context.model.offload is not None and context.model.offload.device.type != "cpu"
