"""What FSDP2 allocates in a planned step: the activations of a plan, with FSDP2's buffers instead of the plan's.

The published rows were measured with FSDP2 (``torch/distributed/fsdp/_fully_shard``), whose buffers are others:

- a unit's gather lands in a buffer of the gathers' stream, which is copied into the parameters, tensors of the compute
  stream. In forward the buffer is held until the next unit has been copied, in backward it is gathered while the unit
  before computes;
- the root's parameters, here the embedding, the last norm and the output, are one unit, which stays gathered from the
  start of forward to the end of backward, and is reduced last; the last block stays gathered for backward;
- gradients are copied into the reduction's input, in its dtype, which is held until the next unit's is; what comes of
  it is allocated on the reductions' stream, where no other stream can use it when the gradients are dropped.
"""

from __future__ import annotations

import dataclasses

from graph_fsdp.passes.analysis.memory import Category, GraphStorage
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec
from graph_fsdp.planning import Plan
from graph_fsdp.planning.allocator import Allocations, Step

GATHERS, REDUCTIONS, ROOT = "gathers", "reductions", ""
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

    def parameters(self, parameters: list[ParameterSpec], begin: int, end: int) -> list[GraphStorage]:
        return [self.add(_full(p), begin, end, "gathered") for p in parameters]


def fsdp2_step(plan: Plan) -> Step:
    step, units = plan.step(), units_of(plan.traced.context.model)
    forward, backward = plan.traced.forward, plan.traced.backward
    in_forward, kept = _forward(forward, units)
    in_backward, received, gradients = _backward(backward, units, kept)
    _reduce_root_last(backward, step.graphs["backward"])
    ours = {
        phase: dataclasses.replace(
            allocations,
            found=[s for s in allocations.found if s.category not in _OURS and not _is_reduction(s)],
            left=[s for s in allocations.left if s.category not in _OURS and not _is_reduction(s)],
        )
        for phase, allocations in step.graphs.items()
    }
    return dataclasses.replace(
        step,
        graphs={
            "forward": _with(ours["forward"], in_forward, {}, [s for storages in kept.values() for s in storages]),
            "backward": _with(ours["backward"], in_backward, received, gradients),
        },
    )


def units_of(spec: ModelSpec) -> dict[str, list[ParameterSpec]]:
    """Unit → its parameters, the root last."""
    units: dict[str, list[ParameterSpec]] = {}
    for parameter in spec.parameters.values():
        units.setdefault(parameter.unit, []).append(parameter)
    root = units.pop(ROOT)
    return {**units, ROOT: root}


def _forward(graph: Graph, units: dict[str, list[ParameterSpec]]) -> tuple[Buffers, dict[str, list[GraphStorage]]]:
    buffers, last = Buffers(graph), len(graph.nodes) - 1
    begins, ends = _positions(graph, Role.GATHER_WAIT, min), _positions(graph, Role.FREE, max)
    blocks = sorted((name for name in units if name != ROOT), key=begins.__getitem__)
    starts = [0, *(begins[name] for name in blocks)]
    kept: dict[str, list[GraphStorage]] = {}
    for index, name in enumerate([ROOT, *blocks]):
        until = starts[index + 1] if index + 1 < len(starts) else starts[index]
        buffers.add(_unit(units[name]), starts[index], until, "landing", GATHERS)
        stays = name in (ROOT, blocks[-1])
        found = buffers.parameters(units[name], starts[index], last if stays else ends[name])
        if stays:
            kept[name] = found
    return buffers, kept


def _backward(
    graph: Graph, units: dict[str, list[ParameterSpec]], kept: dict[str, list[GraphStorage]]
) -> tuple[Buffers, dict[int, GraphStorage], list[GraphStorage]]:
    buffers, last = Buffers(graph), len(graph.nodes) - 1
    ends = _positions(graph, Role.REDUCE_START, max)
    blocks = sorted((name for name in units if name != ROOT), key=ends.__getitem__)
    received: dict[int, GraphStorage] = {}
    gradients = []
    begin = before = 0
    reduced = [*((name, ends[name]) for name in blocks), (ROOT, last)]
    for index, (name, end) in enumerate(reduced):
        if name in kept:
            own = buffers.parameters(units[name], 0, end)
            received.update((id(mine), theirs) for mine, theirs in zip(own, kept[name], strict=True))
        else:
            buffers.add(_unit(units[name]), before, begin, "landing", GATHERS)
            buffers.parameters(units[name], begin, end)
        wide = [p.reduce_dtype.itemsize * p.world_size * p.shard_numel for p in units[name]]
        until = reduced[index + 1][1] if index + 1 < len(reduced) else last
        buffers.add(sum(wide), end, until, "reducing")
        gradients.append(buffers.add(sum(wide) // units[name][0].world_size, end, last, "gradients", REDUCTIONS))
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


def _with(
    ours: Allocations, buffers: Buffers, received: dict[int, GraphStorage], left: list[GraphStorage]
) -> Allocations:
    kept = {mine for mine, _ in ours.received.items()} & {id(s) for s in ours.found}
    return Allocations(
        [*buffers.found, *ours.found],
        {**{key: source for key, source in ours.received.items() if key in kept}, **received},
        [*ours.left, *left],
        lambda storage: buffers.streams.get(id(storage), "compute"),
    )


def _is_reduction(storage: GraphStorage) -> bool:
    """What a reduction makes, and a packed copy of what it sends."""
    record = storage.node.meta.get("fsdp")
    return record is not None and record.role is Role.REDUCE_START


def _positions(graph: Graph, role: Role, choose: type[min] | type[max]) -> dict[str, int]:
    found: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        record = node.meta.get("fsdp")
        if record is not None and record.role is role:
            found[record.unit] = choose(found.get(record.unit, index), index)
    return found


def _full(parameter: ParameterSpec) -> int:
    return parameter.world_size * parameter.shard_numel * parameter.param_dtype.itemsize


def _unit(parameters: list[ParameterSpec]) -> int:
    return sum(map(_full, parameters))
