"""Schedules become traces that Perfetto and Chrome (chrome://tracing) open.

The format is Chrome's Trace Event Format: complete events ("X") on one thread per lane, counters ("C") for memory,
times in microseconds. A predicted schedule and a measured one have the same lanes, names and categories "graph",
"region", "communication" and "exposed".

[Note: when a collective ended]
Regions and waits are measured. A collective runs on threads or streams of its process group, and of it is known only
that it began after its start and after those before it on the same group had ended, and that it ended before the wait
for it, or for a later one, was over. Where compute waited for it, it ended with the wait. Otherwise it is drawn with
the seconds that it takes by itself (as ``Recorder`` has timed it), an estimate: beside compute and other collectives it
may have taken longer. Each slice says which of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.analysis.kernels import value_nbytes
from graph_fsdp.passes.analysis.memory import MemoryProfile
from graph_fsdp.passes.analysis.simulate import Timeline
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import wait_of
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import argument
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.report.provenance import module_name, source_line
from graph_fsdp.runtime.observe import Interval, Place, ProgramRun
from graph_fsdp.runtime.regions.regions import Region, Step, cut, unit_of

COMPUTE = "compute"
MICROSECONDS = 1e6  # in a second
WAITED = "measured: compute waited for it"
ALONE = "estimated: the time that it takes by itself"
_NOTICED = 0.5  # a wait of this part of a collective's own seconds is one for the collective, and not for unpacking


@dataclass(frozen=True)
class ScheduledGraph:
    """Holds a graph after all passes with what is predicted of it: ``memory`` is None where nothing predicts it, and
    with ``whole`` no region runs by itself."""

    graph: Graph
    cost: CostModel
    timeline: Timeline
    memory: MemoryProfile | None = None
    whole: bool = False

    def computing(self) -> dict[fx.Node, float]:
        """Return the nodes that compute, and the seconds of each."""
        found = self.cost.graph_seconds(self.graph).items()
        return {
            node: seconds for node, seconds in found if seconds and self.cost.model_collective_seconds(node) is None
        }

    def held(self) -> dict[int, tuple[float, dict[str, int]]]:
        """Return position → seconds from the graph's begin, and category → bytes, where any of them changes."""
        timeline, starts = self.memory.timeline if self.memory is not None else {}, list(self.timeline.starts.values())
        rows = [dict(zip(timeline, values, strict=True)) for values in zip(*timeline.values(), strict=True)]
        return {at: (starts[at], row) for at, row in enumerate(rows) if not at or row != rows[at - 1]}


@dataclass(frozen=True)
class Slice:
    """Lasts for ``seconds`` on a lane, from ``begin``, in seconds from the start of the schedule."""

    name: str
    category: str
    lane: str
    begin: float
    seconds: float
    args: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Describe it for people, without the parameters, which may be many."""
        return "\n".join(f"{key}: {value}" for key, value in self.args.items() if value and key != "parameters")


@dataclass(frozen=True)
class Process:
    """Holds one schedule of a trace. ``counters`` are seconds from its start, and the values that hold from then on."""

    title: str
    slices: Sequence[Slice]
    counters: Sequence[tuple[float, Mapping[str, int]]] = ()


def trace_of(processes: Sequence[Process]) -> dict[str, Any]:
    """Lay out schedules below each other on one time axis, as a JSON object of the Trace Event Format."""
    lanes = dict.fromkeys([COMPUTE, *(s.lane for process in processes for s in process.slices)])
    threads = {lane: number for number, lane in enumerate(lanes)}
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes):
        events.append(_named("process_name", number, 0, process.title))
        events += [_named("thread_name", number, thread, lane) for lane, thread in threads.items()]
        for s in process.slices:
            place = {"ph": "X", "pid": number, "tid": threads[s.lane], "name": s.name, "cat": s.category}
            times = {"ts": s.begin * MICROSECONDS, "dur": s.seconds * MICROSECONDS}
            events.append({**place, **times, "args": {key: v for key, v in s.args.items() if v is not None}})
        for begin, values in process.counters:
            counter = {"ph": "C", "pid": number, "name": "bytes", "ts": begin * MICROSECONDS}
            events.append({**counter, "args": dict(values)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def in_a_row(graphs: Sequence[ScheduledGraph]) -> Iterator[tuple[float, ScheduledGraph]]:
    """Yield graphs one after the other, each with the seconds at which it begins."""
    return zip(accumulate((g.timeline.seconds for g in graphs), initial=0.0), graphs, strict=False)


def predicted_trace(
    graphs: Sequence[ScheduledGraph], spec: ModelSpec, title: str, others: Iterable[Slice] = ()
) -> dict[str, Any]:
    """Lay out the graphs in a row on one time axis, with each node that takes time, the bytes held, and ``others``."""
    slices = [*predicted_slices(graphs, spec), *others]
    counters: list[tuple[float, Mapping[str, int]]] = []
    for begin, scheduled in in_a_row(graphs):
        slices += computations(begin, scheduled)
        counters += [(begin + seconds, held) for seconds, held in scheduled.held().values()]
    return trace_of([Process(title, slices, counters)])


def predicted_slices(graphs: Sequence[ScheduledGraph], spec: ModelSpec) -> Iterator[Slice]:
    """Yield the regions and communication of graphs in a row: what can be measured, too."""
    for begin, scheduled in in_a_row(graphs):
        starts, seconds = scheduled.timeline.starts, scheduled.computing()
        yield Slice(scheduled.graph.phase, "graph", COMPUTE, begin, scheduled.timeline.seconds)
        for index, step in enumerate([] if scheduled.whole else cut(scheduled.graph)):
            computing = [node for node in step.nodes if node in seconds] if isinstance(step, Region) else []
            if isinstance(step, Region) and computing:
                first, last = starts[computing[0]], starts[computing[-1]] + seconds[computing[-1]]
                yield region_slice(index, step, begin + first, last - first)
        yield from communication(begin, scheduled, spec)


def region_slice(index: int, region: Region, begin: float, seconds: float) -> Slice:
    """Make the slice of a compute region, named as in the printed program, and by whose parameters it computes with."""
    unit = unit_of(region)
    return Slice(f"region_{index} {unit}".rstrip(), "region", COMPUTE, begin, seconds, {"unit": unit or None})


def wait_slice(start: fx.Node, begin: float, seconds: float) -> Slice:
    """Make the slice in which compute waits for a collective or a copy."""
    wait = wait_of(start)
    return Slice(wait.name, "exposed", COMPUTE, begin, seconds, communication_args(wait))


def computations(begin: float, scheduled: ScheduledGraph) -> Iterator[Slice]:
    """Yield the nodes of a graph that take time on the compute lane."""
    waited = {wait_of(event.node): event.exposed for event in scheduled.timeline.events}
    for node, seconds in scheduled.computing().items():
        source = source_line(node)
        args = {"operator": str(node.target), "module": module_name(node)}
        if source is not None:
            args |= {"source": f"{source.file}:{source.line}", "code": source.code}
        at = begin + scheduled.timeline.starts[node] + waited.get(node, 0.0)
        yield Slice(node.name, "compute", COMPUTE, at, seconds, args)


def communication(begin: float, scheduled: ScheduledGraph, spec: ModelSpec) -> Iterator[Slice]:
    """Yield the collectives and copies of a graph, and the waits for them that take time."""
    for event in scheduled.timeline.events:
        if event.exposed:
            at = begin + scheduled.timeline.starts[wait_of(event.node)]
            yield wait_slice(event.node, at, event.exposed)
        args = {**communication_args(event.node), "exposed_us": event.exposed * MICROSECONDS}
        lane, seconds = lane_of(event.node, spec), event.end - event.begin
        yield Slice(event.node.name, "communication", lane, begin + event.begin, seconds, args)


def lane_of(start: fx.Node, spec: ModelSpec) -> str:
    """Name the lane that a collective or a copy runs on, as readers know it."""
    if start.target in dialect.STARTS:
        lanes = {
            spec.mesh.replicate_group: "over replicas",
            **{mesh.group: f"over {mesh.name}" for mesh in spec.own_meshes},
            **{mesh.replicate_group: f"over replicas of {mesh.name}" for mesh in spec.own_meshes},
            spec.own_reduce_group: "reductions",
            spec.mesh.group: "communication",
        }
        return lanes.get(dialect.group_of(start), "in subgroups")
    if dialect.is_model_collective(start):
        return f"of the model, group {argument(start, 'group_name')}"
    if start.target in dialect.ACTIVATION_STARTS:
        return "copies of activations"
    return "copies to the device" if start.target is dialect.fetch_start else "copies to the CPU"


def communication_args(node: fx.Node) -> dict[str, Any]:
    if (record := node.meta.get("fsdp")) is None:
        return {"kind": str(node.target), "bytes": value_nbytes(node.meta["val"])}
    return {
        "kind": record.role.value,
        "unit": record.unit or "root",
        "bucket": record.bucket,
        "bytes": record.nbytes,
        "parameters": ", ".join(record.params),
    }


def slices_as_measured(runs: Sequence[ProgramRun], alone: Mapping[Place, float], spec: ModelSpec) -> list[Slice]:
    """Return the slices of runs as measured. ``alone`` has the seconds that collectives take by themselves."""
    slices: list[Slice] = []
    for run in runs:
        steps = cut(run.program.graph)
        slices.append(Slice(run.program.graph.phase, "graph", COMPUTE, run.begin, run.end - run.begin))
        for interval in run.intervals:
            step = steps[interval.index]
            if isinstance(step, Region):
                slices.append(region_slice(interval.index, step, interval.begin, interval.seconds))
            elif interval.what == "wait":
                slices.append(wait_slice(step, interval.begin, interval.seconds))
        slices += _measured_communication(run, steps, alone, spec)
    return slices


def _measured_communication(
    run: ProgramRun, steps: Sequence[Step], alone: Mapping[Place, float], spec: ModelSpec
) -> Iterator[Slice]:
    """See [Note: when a collective ended]."""
    waits = {interval.index: interval for interval in run.intervals if interval.what == "wait"}
    lanes: dict[str, list[tuple[Interval, fx.Node]]] = {}
    for interval in run.intervals:
        node = steps[interval.index]
        if interval.what == "start" and isinstance(node, fx.Node):
            lanes.setdefault(lane_of(node, spec), []).append((interval, node))
    for lane, started in lanes.items():
        ends = [waits[start.index].end if start.index in waits else run.end for start, _ in started]
        limits = reversed([*accumulate(reversed(ends), min)])
        free = run.begin
        for (start, node), limit in zip(started, limits, strict=True):
            begin = min(max(start.begin, free), limit)
            own, wait = alone.get((run.program, start.index)), waits.get(start.index)
            waited = own is None or wait is None or begin + own >= wait.begin or wait.seconds > _NOTICED * own
            free = limit if waited or own is None else min(begin + own, limit)
            args = {
                **communication_args(node),
                "exposed_us": wait.seconds * MICROSECONDS if wait is not None else 0.0,
                "alone_us": own * MICROSECONDS if own is not None else None,
                "end": WAITED if waited else ALONE,
            }
            yield Slice(node.name, "communication", lane, begin, free - begin, args)


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
