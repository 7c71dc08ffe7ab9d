"""What torchtitan's program allocates in a planned step: a plan's activations, with FSDP2's buffers and without what
compiled kernels never write.

FSDP2's buffers (``torch/distributed/fsdp/_fully_shard``; ``fsdp2_program.py`` says when it does what) are these:

- a unit's gather lands in a buffer of the gathers' stream, beside the shard that was cast for it, and is copied into
  the parameters, tensors of the compute stream. In forward the buffer is held until the next unit has been copied, in
  backward it is gathered while the unit before computes;
- gradients are copied into the reduction's input, in its dtype, which is held until the next unit's is; what comes of
  it is allocated on the reductions' stream, where no other stream can use it when the gradients are dropped.

Selective checkpointing in eager keeps every result that its policy names until the block's backward has ended, also
what backward never reads.
"""

from __future__ import annotations

import dataclasses

from fsdp2_program import (
    ROOT,
    Compiled,
    Units,
    backward_ends,
    forward_begins,
    full_nbytes,
    kept_units,
    positions,
    units_of,
)
from published_llama import NAMED, is_block
from torch import fx

from graph_fsdp.compat import CheckpointPolicy
from graph_fsdp.passes.analysis.kernels import packet
from graph_fsdp.passes.analysis.memory import Category, GraphStorage
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.spec import ParameterSpec
from graph_fsdp.passes.ir.unit_calls import unit_calls
from graph_fsdp.planning import Plan
from graph_fsdp.planning.allocator import Allocations, Step

GATHERS, REDUCTIONS = "gathers", "reductions"
_OURS = ("gathered", "landing", "pooled")


class Buffers:
    """The buffers of one graph, as storages; ``streams``: those that are not of the compute stream."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.found: list[GraphStorage] = []
        self.streams: dict[int, str] = {}

    def add(self, nbytes: int, begin: int, end: int, category: Category, stream: str = "compute") -> GraphStorage:
        storage = GraphStorage(self.graph.nodes[begin], nbytes, begin, end, category)
        self.found.append(storage)
        self.streams[id(storage)] = stream
        return storage

    def gather(self, parameters: list[ParameterSpec], begin: int, end: int) -> None:
        """Add what a unit is gathered into, and its shard, which is cast before."""
        whole = full_nbytes(parameters)
        self.add(whole // parameters[0].world_size, begin, begin, "landing", GATHERS)
        self.add(whole, begin, end, "landing", GATHERS)

    def parameters(self, parameters: list[ParameterSpec], begin: int, end: int) -> list[GraphStorage]:
        return [self.add(full_nbytes([p]), begin, end, "gathered") for p in parameters]


Received = dict[int, GraphStorage]  # the ``id`` of backward's storage → forward's


def fsdp2_step(plan: Plan, compiled: Compiled) -> Step:
    step, units = plan.step(), units_of(plan.traced.context.model)
    forward, backward = plan.traced.forward, plan.traced.backward
    in_forward, kept = _forward(forward, units)
    in_backward, received, gradients = _backward(backward, units, kept)
    _reduce_root_last(backward, step.graphs["backward"])
    named = [] if compiled.blocks else _named_results(plan, step.graphs["forward"])
    ends = backward_ends(backward, units)
    for unit, storage in named:
        storage.end = len(forward.nodes) - 1
        received[id(in_backward.add(storage.nbytes, 0, ends[unit], "saved"))] = storage
    left = [*(s for storages in kept.values() for s in storages), *(storage for _, storage in named)]
    unwritten = {phase: compiled.fused_away(plan.traced.graphs[phase], units) for phase in step.graphs}
    ours = {
        phase: dataclasses.replace(
            allocations,
            found=[s for s in allocations.found if _stays(s, unwritten[phase])],
            left=[s for s in allocations.left if _stays(s, unwritten[phase])],
        )
        for phase, allocations in step.graphs.items()
    }
    return dataclasses.replace(
        step,
        graphs={
            "forward": _with(ours["forward"], in_forward, {}, left),
            "backward": _with(ours["backward"], in_backward, received, gradients),
        },
    )


def _stays(storage: GraphStorage, unwritten: set[fx.Node]) -> bool:
    """Say whether a storage of the plan is one of torchtitan's program: no buffer of the plan's collectives, and
    written by a kernel."""
    record = storage.node.meta.get("fsdp")
    reduces = record is not None and record.role is Role.REDUCE_START
    return storage.category not in _OURS and not reduces and storage.node not in unwritten


def _named_results(plan: Plan, forward: Allocations) -> list[tuple[str, GraphStorage]]:
    """Find what the checkpointing policy names and backward does not read: (unit, storage)."""
    calls = unit_calls(plan.traced.forward, plan.traced.context.model)
    left = {id(storage) for storage in forward.left}
    return [
        (calls[s.node].unit, s)
        for s in forward.found
        if s.node in calls and is_block(calls[s.node].unit) and id(s) not in left and _is_named(s.node)
    ]


def _is_named(node: fx.Node) -> bool:
    return packet(node) in NAMED and node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def _forward(graph: Graph, units: Units) -> tuple[Buffers, dict[str, list[GraphStorage]]]:
    buffers, last = Buffers(graph), len(graph.nodes) - 1
    begins, ends = forward_begins(graph, units), positions(graph, Role.FREE, max)
    starts = [*begins.values(), last]
    kept: dict[str, list[GraphStorage]] = {}
    for index, name in enumerate(begins):
        buffers.gather(units[name], starts[index], starts[index + 1])
        stays = name in kept_units(begins)
        found = buffers.parameters(units[name], starts[index], last if stays else ends[name])
        if stays:
            kept[name] = found
    return buffers, kept


def _backward(
    graph: Graph, units: Units, kept: dict[str, list[GraphStorage]]
) -> tuple[Buffers, Received, list[GraphStorage]]:
    buffers, last = Buffers(graph), len(graph.nodes) - 1
    reduced = list(backward_ends(graph, units).items())
    received: Received = {}
    gradients = []
    begin = before = 0
    for index, (name, end) in enumerate(reduced):
        if name in kept:
            own = buffers.parameters(units[name], 0, end)
            received.update((id(mine), theirs) for mine, theirs in zip(own, kept[name], strict=True))
        else:
            buffers.gather(units[name], before, begin)
            buffers.parameters(units[name], begin, end)
        wide = full_nbytes(units[name], reduced=True)
        until = reduced[index + 1][1] if index + 1 < len(reduced) else last
        buffers.add(wide, end, until, "reducing")
        gradients.append(buffers.add(wide // units[name][0].world_size, end, last, "gradients", REDUCTIONS))
        before, begin = begin, end
    return buffers, received, gradients


def _reduce_root_last(graph: Graph, allocations: Allocations) -> None:
    """The root's gradients, which the plan reduces as soon as they are there, stay until the end."""
    roots = graph.alias_roots()
    starts = [start for start in graph.with_role(Role.REDUCE_START) if start.meta["fsdp"].unit == ROOT]
    sent = {root for start in starts for node in start.all_input_nodes for root in roots[node]}
    for storage in allocations.found:
        if storage.node in sent and storage.category == "reducing":
            storage.end = len(graph.nodes) - 1


def _with(ours: Allocations, buffers: Buffers, received: Received, left: list[GraphStorage]) -> Allocations:
    kept = {mine for mine, _ in ours.received.items()} & {id(s) for s in ours.found}
    return Allocations(
        [*buffers.found, *ours.found],
        {**{key: source for key, source in ours.received.items() if key in kept}, **received},
        [*ours.left, *left],
        lambda storage: buffers.streams.get(id(storage), "compute"),
    )
