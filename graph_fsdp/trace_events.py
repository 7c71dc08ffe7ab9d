"""A predicted schedule as a trace that Perfetto and Chrome (chrome://tracing) open.

The format is Chrome's Trace Event Format: complete events ("X") on one thread per lane, counters ("C") for memory,
times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graph_fsdp.passes import dialect
from graph_fsdp.passes.cost import CostModel
from graph_fsdp.passes.graph import Graph
from graph_fsdp.passes.memory import MemoryProfile
from graph_fsdp.passes.simulate import Timeline
from graph_fsdp.passes.spec import ModelSpec
from graph_fsdp.source_lines import module_name, source_line

COMPUTE = "compute"
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class ScheduledGraph:
    """A graph after all passes with what is predicted of it. ``memory``: None where buffers are the compiler's."""

    graph: Graph
    cost: CostModel
    timeline: Timeline
    memory: MemoryProfile | None


def predicted_trace(graphs: Sequence[ScheduledGraph], spec: ModelSpec, title: str) -> dict[str, Any]:
    """The graphs one after the other on one time axis, as a JSON object of the Trace Event Format."""
    lanes = [COMPUTE, *dict.fromkeys(lane_of(event.node, spec) for g in graphs for event in g.timeline.events)]
    threads = {lane: number for number, lane in enumerate(lanes)}
    events: list[dict[str, Any]] = [_named("process_name", 0, title)]
    events += [_named("thread_name", number, lane) for lane, number in threads.items()]
    begin = 0.0
    for scheduled in graphs:
        events += _events(scheduled, spec, begin, threads)
        begin += scheduled.timeline.seconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def lane_of(start: fx.Node, spec: ModelSpec) -> str:
    """The lane that a collective or a copy runs on, as readers know it."""
    if start.target in dialect.STARTS:
        group = dialect.group_of(start)
        if group == spec.group:
            return "communication"
        return "over replicas" if group == spec.replicate_group else "in subgroups"
    return "copies to the device" if start.target is dialect.fetch_start else "copies to the CPU"


def _events(
    scheduled: ScheduledGraph, spec: ModelSpec, begin: float, threads: dict[str, int]
) -> Iterator[dict[str, Any]]:
    graph, timeline = scheduled.graph, scheduled.timeline
    seconds = scheduled.cost.graph_seconds(graph)

    def slice_(name: str, category: str, lane: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
        return {
            "ph": "X",
            "pid": 0,
            "tid": threads[lane],
            "name": name,
            "cat": category,
            "ts": (begin + start) * _MICROSECONDS,
            "dur": duration * _MICROSECONDS,
            "args": {key: value for key, value in args.items() if value is not None},
        }

    yield slice_(graph.phase, "graph", COMPUTE, 0.0, timeline.seconds)
    waited = {event.node: event for event in timeline.events}
    for node in graph.fx_graph.nodes:
        at = timeline.starts[node]
        if node.target in dialect.WAITS or node.target in dialect.COPY_WAITS:
            exposed = waited[node.args[0]].exposed
            if exposed:
                yield slice_(node.name, "exposed", COMPUTE, at, exposed, **_communication(node))
        elif node not in waited and seconds[node]:
            yield slice_(node.name, "compute", COMPUTE, at, seconds[node], **_computation(node))
    for event in timeline.events:
        args = {**_communication(event.node), "exposed_us": event.exposed * _MICROSECONDS}
        duration = event.end - event.begin
        yield slice_(event.node.name, "communication", lane_of(event.node, spec), event.begin, duration, **args)
    if scheduled.memory is not None:
        yield from _memory(graph, timeline, scheduled.memory, begin)


def _computation(node: fx.Node) -> dict[str, Any]:
    source = source_line(node)
    where = f"{source.file}:{source.line}" if source is not None else None
    code = source.code if source is not None else None
    return {"operator": str(node.target), "module": module_name(node), "source": where, "code": code}


def _communication(node: fx.Node) -> dict[str, Any]:
    record = node.meta["fsdp"]
    return {
        "kind": record.role.value,
        "unit": record.unit or "root",
        "bucket": record.bucket,
        "bytes": record.nbytes,
        "parameters": ", ".join(record.params),
    }


def _memory(graph: Graph, timeline: Timeline, memory: MemoryProfile, begin: float) -> Iterator[dict[str, Any]]:
    """One counter of all categories, where any of them changes."""
    previous: dict[str, int] | None = None
    for index, node in enumerate(graph.fx_graph.nodes):
        values: dict[str, int] = {category: held[index] for category, held in memory.timeline.items()}
        if values != previous:
            at = (begin + timeline.starts[node]) * _MICROSECONDS
            yield {"ph": "C", "pid": 0, "name": "bytes", "ts": at, "args": values}
        previous = values


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": {"name": name}}
