"""A report is plain data: it is printed, saved in a file and drawn on a page.

Everything here is what ``json.dumps`` takes. Times are in seconds; positions are indices of nodes in the graph after
all passes. A report has captures, a capture graphs, a graph buckets and stages.
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import fx

from graph_fsdp.passes.analysis.simulate import Timeline
from graph_fsdp.passes.ir.dialect import Role, has_role, wait_of
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.report.provenance import lives
from graph_fsdp.report.trace_events import MICROSECONDS, ScheduledGraph, communication, computations, in_a_row

if TYPE_CHECKING:
    from graph_fsdp.report.report import GraphReport, GraphView

Data: TypeAlias = dict[str, Any]

Change: TypeAlias = int | tuple[int, list[str]]
"""So many lines that stay, or how many go, and those that come in their place."""

_COUNTS = ("whole", "regions", "compiled_regions", "peak_gathered_bytes", "kept_nbytes")
ROW_KINDS = {
    Role.GATHER_START: "gather",
    Role.KEPT: "kept",  # received from forward
    Role.REDUCE_START: "reduce",
    Role.REPLICATE_START: "replicate",  # reduced again over replicas
    Role.ACCUMULATE: "keep",  # gradients, for a later graph
    Role.FETCH_START: "fetch",  # shards, from the CPU
    Role.OFFLOAD_START: "offload",  # gradients, to the CPU
}


def report_data(
    report: GraphReport, *, stages: bool, drawn: Sequence[GraphView] = (), error: Exception | None = None
) -> Data:
    """Return a report as data. ``stages`` adds the text of each, which takes seconds where a model is deep. ``drawn``
    are graphs that run one after the other, whose timeline a page draws; ``lives`` has, in these, parameter → what it
    is, and of each event phase, position, kind and line of the model. ``error`` is what ended a capture.

    Raises:
        LookupError: a graph that is to be drawn has no cost model.
    """
    spec = report.spec
    scheduled = [view.scheduled() for view in drawn]
    timelines = {v: timeline_data(begin, s, spec) for v, (begin, s) in zip(drawn, in_a_row(scheduled), strict=True)}
    found = lives(spec, [(0, s.graph) for s in scheduled]) if drawn else {}
    step = report.step_predicted()

    def graph(view: GraphView) -> Data:
        return {**graph_data(view), "timeline": timelines.get(view), "stages": stage_data(view) if stages else []}

    return {
        "parameters": len(spec.parameters),
        "buckets": len(spec.buckets),
        "world_size": spec.mesh.world_size,
        "replicas": spec.mesh.replicas,
        "units": unit_data(spec),
        "step": step.lines() if step is not None else [],
        **{name: getattr(report, name) for name in _COUNTS},
        "captures": [
            {
                "index": capture.index,
                "cause_kind": capture.cause.kind,
                "cause": str(capture.cause),
                "graphs": [graph(view) for view in capture.all_views()],
            }
            for capture in report.captures
        ],
        "lives": {
            name: [life.about, [[e.phase, e.position, e.kind, str(e.source or "")] for e in life.events]]
            for name, life in found.items()
        },
        "error": None if error is None else f"{type(error).__name__}: {error}",
    }


def graph_data(view: GraphView) -> Data:
    """Return what is printed of a graph. ``nodes`` is 0 for a graph that other graphs are made of."""
    return {
        "phase": view.phase,
        "nodes": view.nodes,
        "buckets": [asdict(row) for row in view.buckets],
        "lines": view.lines(),
        "passes": list(view.stages),
    }


def unit_data(spec: ModelSpec) -> list[Data]:
    """Return the units in the order of the storage, with bytes of the whole parameters and of this rank's shards."""
    units: dict[str, Data] = {}
    for p in spec.parameters.values():
        new = {"name": p.unit or "root", "parameters": 0, "numel": 0, "nbytes": 0, "shard_nbytes": 0}
        unit = units.setdefault(p.unit, new)
        numel = math.prod(p.shape)
        unit["parameters"] += 1
        unit["numel"] += numel
        unit["nbytes"] += numel * p.dtype.itemsize
        unit["shard_nbytes"] += p.shard_numel * p.dtype.itemsize
    return list(units.values())


# Buckets


@dataclass(frozen=True)
class BucketRow:
    """Describes one gathered or reduced bucket of one graph. Positions are indices of nodes in the scheduled graph;
    None where the event is not in this graph. ``nbytes`` is the size of the gathered buffer, or of the reduced shard;
    ``slots`` are those of its buffer and landing buffer. ``kind`` is one of ``ROW_KINDS``, and the ``unit`` "" is the
    root. ``ahead`` counts the buckets that are first used between its start and its wait: a gather starts so many
    units ahead of its use. ``seconds``, which it takes by itself, and ``exposed``, which compute waits for it, are
    predicted."""

    name: str
    kind: str
    parameters: tuple[str, ...]
    nbytes: int
    start: int | None = None
    wait: int | None = None
    first_use: int | None = None
    free: int | None = None
    escapes: bool = False
    unit: str = ""
    slots: tuple[int, ...] = ()
    ahead: int | None = None
    seconds: float | None = None
    exposed: float | None = None


def bucket_rows(graph: Graph, timeline: Timeline | None) -> list[BucketRow]:
    """Return the rows in the graph's order. Gradients of one bucket that are kept for a later graph are one row."""
    positions = graph.positions()
    gathers = {gather.start or gather.buffer: gather for gather in graph.gathers}
    uses = sorted(positions[gather.reads[0]] for gather in gathers.values() if gather.reads)
    predicted = {event.node: event for event in timeline.events} if timeline is not None else {}
    rows: dict[fx.Node | str, list[fx.Node]] = {}
    for node in graph.with_role(*ROW_KINDS):
        kept = has_role(node, Role.ACCUMULATE)
        rows.setdefault(node.meta["fsdp"].bucket if kept else node, []).append(node)

    def row(nodes: list[fx.Node]) -> BucketRow:
        node, records = nodes[0], [node.meta["fsdp"] for node in nodes]
        record, kind, gather, event = records[0], ROW_KINDS[records[0].role], gathers.get(node), predicted.get(node)
        events: dict[str, fx.Node | None] = {"start": node}
        if gather is not None:
            first_use = next(iter(gather.reads), None)
            events = {"start": gather.start, "wait": gather.wait, "first_use": first_use, "free": gather.free}
        elif kind != "keep":
            wait = wait_of(node)
            used = (user for user in wait.users if user.op != "output")
            events |= {"wait": wait, "first_use": min(used, key=positions.__getitem__, default=None)}
        at = {name: positions[node] for name, node in events.items() if node is not None}
        under_way = "start" in at and "wait" in at
        return BucketRow(
            record.bucket,
            kind,
            tuple(name for r in records for name in r.params),
            sum(r.nbytes for r in records),
            escapes=gather is not None and gather.escapes and kind == "gather",
            unit=record.unit,
            slots=tuple(slot for slot in (record.slot, record.landing_slot) if slot is not None),
            ahead=bisect_left(uses, at["wait"]) - bisect_left(uses, at["start"]) if under_way else None,
            seconds=None if event is None else event.end - event.begin,
            exposed=None if event is None else event.exposed,
            **at,
        )

    return [row(nodes) for nodes in rows.values()]


# Stages


def stage_data(view: GraphView) -> list[Data]:
    """Return the stages; ``changes`` make a stage's lines of those of the stage before, see ``line_changes``."""
    texts = [stage.body.splitlines() for stage in view.stages.values()]
    return [
        {"name": stage.name, "header": stage.header, "changes": line_changes(before, lines)}
        for stage, before, lines in zip(view.stages.values(), [[], *texts], texts, strict=False)
    ]


def line_changes(old: list[str], new: list[str]) -> list[Change]:
    """Return what makes ``new`` of ``old``, from top to bottom."""
    found = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [until - i if tag == "equal" else (until - i, new[j:until_j]) for tag, i, until, j, until_j in found]


def stage_texts(stages: Iterable[Data]) -> dict[str, str]:
    """Return name → the graph after that pass, from what ``stage_data`` made."""
    texts: dict[str, str] = {}
    lines: list[str] = []
    for stage in stages:
        before, lines, position = lines, [], 0
        for change in stage["changes"]:
            count, new = (change, before[position : position + change]) if isinstance(change, int) else change
            position += count
            lines += new
        texts[stage["name"]] = "\n".join(lines) + "\n"
    return texts


def stage_diff(phase: str, names: Sequence[str], stage: str, body: Callable[[str], str]) -> str:
    """Return a unified diff of a stage against the one before it, of all ``names``; ``body`` returns the text of
    one."""
    if stage not in names:
        raise KeyError(f"the {phase} graph has no stage {stage!r}; it has {', '.join(names)}")
    index = names.index(stage)
    title, before = (names[index - 1], body(names[index - 1])) if index else ("(nothing)", "")
    lines = difflib.unified_diff(before.splitlines(), body(stage).splitlines(), title, stage, lineterm="", n=1)
    return "\n".join(lines)


# What is drawn


def timeline_data(begin: float, scheduled: ScheduledGraph, spec: ModelSpec) -> Data:
    """Return what is drawn of a graph. ``names`` are those of the nodes, by position. A slice has lane, position, begin
    and duration in microseconds, whether compute waits, and a text."""
    timeline = scheduled.timeline
    position = {node.name: index for index, node in enumerate(scheduled.graph.nodes)}
    slices = [*computations(begin, scheduled), *communication(begin, scheduled, spec)]
    return {
        "hardware": scheduled.cost.hardware.name,
        "begin": begin * MICROSECONDS,
        **{name: getattr(timeline, name) for name in ("seconds", "compute", "exposed")},
        "names": list(position),
        "slices": [
            [s.lane, position[s.name], _micro(s.begin), _micro(s.seconds), s.category == "exposed", s.text()]
            for s in slices
        ],
        "memory": _memory(begin, scheduled),
    }


def _memory(begin: float, scheduled: ScheduledGraph) -> Data | None:
    memory = scheduled.memory
    if memory is None:
        return None
    held = scheduled.held()
    return {
        "categories": list(memory.timeline),
        "positions": list(held),
        "times": [_micro(begin + seconds) for seconds, _ in held.values()],
        "values": [list(values.values()) for _, values in held.values()],
        "peak": memory.peak,
        "peak_position": memory.peak_index,
        "holders": [[holder.node, holder.category, holder.nbytes] for holder in memory.holders],
    }


def _micro(seconds: float) -> float:
    return round(seconds * MICROSECONDS, 3)
