"""Schedules as traces that Perfetto and Chrome (chrome://tracing) open.

The format is Chrome's Trace Event Format: complete events ("X") on one thread per lane, counters ("C") for memory,
times in microseconds. A predicted schedule and a measured one have the same lanes and the same names in them: "graph",
"region", "communication" and "exposed" are the categories that both have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.analysis.memory import MemoryProfile
from graph_fsdp.passes.analysis.simulate import Timeline
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.report.source_lines import module_name, source_line
from graph_fsdp.runtime.regions.regions import Region, cut, unit_of

COMPUTE = "compute"
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class ScheduledGraph:
    """A graph after all passes with what is predicted of it. ``memory``: None where buffers are the compiler's."""

    graph: Graph
    cost: CostModel
    timeline: Timeline
    memory: MemoryProfile | None


@dataclass(frozen=True)
class Slice:
    """What lasts for a time on a lane; ``begin`` in seconds from the start of the schedule."""

    name: str
    category: str
    lane: str
    begin: float
    seconds: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Counters:
    """Values that hold from a time on, in seconds from the start of the schedule."""

    begin: float
    values: Mapping[str, int]


@dataclass(frozen=True)
class Process:
    """One schedule of a trace."""

    title: str
    slices: Sequence[Slice]
    counters: Sequence[Counters] = ()


def trace_of(processes: Sequence[Process]) -> dict[str, Any]:
    """Schedules below each other on one time axis, as a JSON object of the Trace Event Format."""
    lanes = dict.fromkeys([COMPUTE, *(s.lane for process in processes for s in process.slices)])
    threads = {lane: number for number, lane in enumerate(lanes)}
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes):
        events.append(_named("process_name", number, 0, process.title))
        events += [_named("thread_name", number, thread, lane) for lane, thread in threads.items()]
        for s in process.slices:
            place = {"ph": "X", "pid": number, "tid": threads[s.lane], "name": s.name, "cat": s.category}
            times = {"ts": s.begin * _MICROSECONDS, "dur": s.seconds * _MICROSECONDS}
            events.append({**place, **times, "args": {key: v for key, v in s.args.items() if v is not None}})
        for c in process.counters:
            counter = {"ph": "C", "pid": number, "name": "bytes", "ts": c.begin * _MICROSECONDS}
            events.append({**counter, "args": dict(c.values)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def predicted_trace(graphs: Sequence[ScheduledGraph], spec: ModelSpec, title: str) -> dict[str, Any]:
    """The graphs one after the other on one time axis, with each node that takes time and the bytes held."""
    slices: list[Slice] = []
    counters: list[Counters] = []
    begin = 0.0
    for scheduled in graphs:
        if scheduled.memory is not None:  # else no region runs by itself
            slices += predicted_slices(scheduled.graph, scheduled.cost, scheduled.timeline, spec, begin)
            counters += _memory(scheduled.graph, scheduled.timeline, scheduled.memory, begin)
        else:
            slices.append(Slice(scheduled.graph.phase, "graph", COMPUTE, begin, scheduled.timeline.seconds))
            slices += _communication(scheduled.graph, scheduled.timeline, spec, begin)
        slices += _nodes(scheduled, begin)
        begin += scheduled.timeline.seconds
    return trace_of([Process(title, slices, counters)])


def predicted_slices(
    graph: Graph, cost: CostModel, timeline: Timeline, spec: ModelSpec, begin: float = 0.0
) -> Iterator[Slice]:
    """The graph, its regions and its communication: what can be measured too."""
    seconds = cost.graph_seconds(graph)
    yield Slice(graph.phase, "graph", COMPUTE, begin, timeline.seconds)
    for index, step in enumerate(cut(graph)):
        computing = [node for node in step.nodes if seconds[node]] if isinstance(step, Region) else []
        if isinstance(step, Region) and computing:
            first, last = timeline.starts[computing[0]], timeline.starts[computing[-1]] + seconds[computing[-1]]
            name = region_name(index, step)
            yield Slice(name, "region", COMPUTE, begin + first, last - first, {"unit": unit_of(step) or None})
    yield from _communication(graph, timeline, spec, begin)


def region_name(index: int, region: Region) -> str:
    """As the printed program has it, and whose parameters it computes with."""
    return f"region_{index} {unit_of(region)}".rstrip()


def lane_of(start: fx.Node, spec: ModelSpec) -> str:
    """The lane that a collective or a copy runs on, as readers know it."""
    if start.target in dialect.STARTS:
        group = dialect.group_of(start)
        if group == spec.group:
            return "communication"
        if group == spec.own_reduce_group:
            return "reductions"
        return "over replicas" if group == spec.replicate_group else "in subgroups"
    return "copies to the device" if start.target is dialect.fetch_start else "copies to the CPU"


def communication_args(node: fx.Node) -> dict[str, Any]:
    record = node.meta["fsdp"]
    return {
        "kind": record.role.value,
        "unit": record.unit or "root",
        "bucket": record.bucket,
        "bytes": record.nbytes,
        "parameters": ", ".join(record.params),
    }


def _communication(graph: Graph, timeline: Timeline, spec: ModelSpec, begin: float) -> Iterator[Slice]:
    waited = {event.node: event for event in timeline.events if event.exposed}
    for node in graph.fx_graph.nodes:
        if node.target in dialect.TRANSFER_WAITS and node.args[0] in waited:
            exposed, at = waited[node.args[0]].exposed, begin + timeline.starts[node]
            yield Slice(node.name, "exposed", COMPUTE, at, exposed, communication_args(node))
    for event in timeline.events:
        args = {**communication_args(event.node), "exposed_us": event.exposed * _MICROSECONDS}
        lane, duration = lane_of(event.node, spec), event.end - event.begin
        yield Slice(event.node.name, "communication", lane, begin + event.begin, duration, args)


def _nodes(scheduled: ScheduledGraph, begin: float) -> Iterator[Slice]:
    seconds, starts = scheduled.cost.graph_seconds(scheduled.graph), scheduled.timeline.starts
    communication = dialect.TRANSFER_STARTS | dialect.TRANSFER_WAITS
    for node in scheduled.graph.fx_graph.nodes:
        if node.target not in communication and seconds[node]:
            yield Slice(node.name, "compute", COMPUTE, begin + starts[node], seconds[node], _computation(node))


def _computation(node: fx.Node) -> dict[str, Any]:
    source = source_line(node)
    where = f"{source.file}:{source.line}" if source is not None else None
    code = source.code if source is not None else None
    return {"operator": str(node.target), "module": module_name(node), "source": where, "code": code}


def _memory(graph: Graph, timeline: Timeline, memory: MemoryProfile, begin: float) -> Iterator[Counters]:
    """One counter of all categories, where any of them changes."""
    previous: dict[str, int] | None = None
    for index, node in enumerate(graph.fx_graph.nodes):
        values: dict[str, int] = {category: held[index] for category, held in memory.timeline.items()}
        if values != previous:
            yield Counters(begin + timeline.starts[node], values)
        previous = values


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
