"""A report as plain data: what is printed, and what a file of a report holds.

Everything here is what ``json.dumps`` takes. Times are in seconds; positions are indices of nodes in the graph after
all passes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.report.bucket_rows import prefetch_distances

if TYPE_CHECKING:
    from graph_fsdp.report.report import CapturedGraph, GraphReport, GraphView

Change = tuple[Literal["same", "removed", "added"], int]
"""So many lines that are the same in both texts, that only the old one has, or that only the new one has."""


class UnitData(TypedDict):
    """``nbytes``: of the whole parameters; ``shard_nbytes``: of this rank's."""

    name: str
    parameters: int
    numel: int
    nbytes: int
    shard_nbytes: int


class BucketData(TypedDict):
    """See :class:`graph_fsdp.report.bucket_rows.BucketRow`. ``ahead``: units' uses that begin while it is under way.
    ``seconds``: that the collective takes, ``exposed`` that compute waits for it, as predicted."""

    name: str
    unit: str
    kind: str
    parameters: int
    nbytes: int
    start: int | None
    wait: int | None
    first_use: int | None
    free: int | None
    kept: bool
    slots: list[int]
    ahead: int | None
    seconds: float | None
    exposed: float | None


class ScheduleData(TypedDict):
    hardware: str
    seconds: float
    compute: float
    communication: float
    exposed: float


class StageData(TypedDict):
    """``changes`` and ``added``: how its lines are made of those of the stage before, see ``line_changes``."""

    name: str
    header: str
    changes: list[Any]
    added: list[str]


class GraphData(TypedDict):
    """``memory``, ``slots``, ``cuda_graphs``, ``compiled_by_xla``: lines of text; none where nothing is known.
    ``passes``: name and seconds. ``nodes``: 0 of a graph that other graphs are made of. ``stages``: none in a report
    that is only printed."""

    phase: str
    nodes: int
    whole: bool
    buckets: list[BucketData]
    slots: list[str]
    copied_nbytes: int
    compiled_by_xla: list[str]
    memory: list[str]
    cuda_graphs: list[str]
    schedule: ScheduleData | None
    passes: list[tuple[str, float]]
    stages: list[StageData]


class CaptureData(TypedDict):
    index: int
    cause_kind: str
    cause: str
    graphs: list[GraphData]


class ErrorData(TypedDict):
    """What ended the capture. Empty where the error does not say."""

    kind: str
    message: str
    pass_name: str
    phase: str
    node: str


class ReportData(TypedDict):
    parameters: int
    buckets: int
    world_size: int
    replicas: int
    units: list[UnitData]
    whole: bool
    regions: int
    compiled_regions: int
    peak_gathered_bytes: int | None
    kept_nbytes: int
    captures: list[CaptureData]
    error: ErrorData | None


def report_data(report: GraphReport, *, stages: bool) -> ReportData:
    """``stages``: with the text of each, which takes seconds where a model is deep."""
    spec = report.spec
    return {
        "parameters": len(spec.parameters),
        "buckets": len(spec.buckets),
        "world_size": spec.world_size,
        "replicas": spec.replicas,
        "units": unit_data(spec),
        "whole": report.whole,
        "regions": report.regions,
        "compiled_regions": report.compiled_regions,
        "peak_gathered_bytes": report.peak_gathered_bytes,
        "kept_nbytes": report.kept_nbytes,
        "captures": [capture_data(capture, stages=stages) for capture in report.captures],
        "error": None,
    }


def capture_data(capture: CapturedGraph, *, stages: bool) -> CaptureData:
    return {
        "index": capture.index,
        "cause_kind": capture.cause.kind,
        "cause": str(capture.cause),
        "graphs": [graph_data(view, stages=stages) for view in capture.all_views()],
    }


def graph_data(view: GraphView, *, stages: bool) -> GraphData:
    cost = view.graph.cost if view.graph is not None else None
    schedule: ScheduleData | None = None
    if view.timeline is not None and cost is not None:
        t = view.timeline
        schedule = {
            "hardware": cost.hardware.name,
            "seconds": t.seconds,
            "compute": t.compute,
            "communication": t.communication,
            "exposed": t.exposed,
        }
    return {
        "phase": view.phase,
        "nodes": view.nodes,
        "whole": view.whole,
        "buckets": _buckets(view),
        "slots": str(view.slots).splitlines() if view.slots else [],
        "copied_nbytes": view.copied_nbytes,
        "compiled_by_xla": view.compiled_by_xla(),
        "memory": str(view.memory).splitlines() if view.memory is not None else [],
        "cuda_graphs": str(view.cuda_graphs).splitlines() if view.cuda_graphs is not None else [],
        "schedule": schedule,
        "passes": [(stage.name, stage.seconds) for stage in view.stages.values()],
        "stages": stage_data(view) if stages else [],
    }


def _buckets(view: GraphView) -> list[BucketData]:
    events: dict[int, Any] = {}
    if view.graph is not None and view.timeline is not None:
        positions = view.graph.positions()
        events = {positions[event.node]: event for event in view.timeline.events}
    found: list[BucketData] = []
    for row, ahead in zip(view.buckets, prefetch_distances(view.buckets), strict=True):
        event = events.get(row.start) if row.start is not None else None
        found.append(
            {
                "name": row.name,
                "unit": row.unit,
                "kind": row.kind,
                "parameters": len(row.parameters),
                "nbytes": row.nbytes,
                "start": row.start,
                "wait": row.wait,
                "first_use": row.first_use,
                "free": row.free,
                "kept": row.escapes,
                "slots": list(row.slots),
                "ahead": ahead,
                "seconds": None if event is None else event.end - event.begin,
                "exposed": None if event is None else event.exposed,
            }
        )
    return found


def unit_data(spec: ModelSpec) -> list[UnitData]:
    """In the order of the storage."""
    units: dict[str, UnitData] = {}
    for p in spec.parameters.values():
        unit = units.setdefault(
            p.unit, {"name": p.unit or "root", "parameters": 0, "numel": 0, "nbytes": 0, "shard_nbytes": 0}
        )
        numel = math.prod(p.shape)
        unit["parameters"] += 1
        unit["numel"] += numel
        unit["nbytes"] += numel * p.dtype.itemsize
        unit["shard_nbytes"] += p.shard_numel * p.dtype.itemsize
    return list(units.values())


def stage_data(view: GraphView) -> list[StageData]:
    stages: list[StageData] = []
    before: list[str] = []
    for stage in view.stages.values():
        lines = stage.body.splitlines()
        changes, added = line_changes(before, lines)
        stages.append({"name": stage.name, "header": stage.header, "changes": changes, "added": added})
        before = lines
    return stages


def line_changes(old: list[str], new: list[str]) -> tuple[list[Change], list[str]]:
    """What makes ``new`` of ``old``, in order, and the lines that are added; removed before added."""
    changes: list[Change] = []
    added: list[str] = []
    for tag, i, until_i, j, until_j in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            changes.append(("same", until_i - i))
            continue
        if until_i > i:
            changes.append(("removed", until_i - i))
        if until_j > j:
            changes.append(("added", until_j - j))
            added += new[j:until_j]
    return changes, added


def stage_texts(stages: Iterable[StageData]) -> dict[str, str]:
    """Name → the graph after that pass, from what ``stage_data`` made."""
    texts: dict[str, str] = {}
    before: list[str] = []
    for stage in stages:
        lines: list[str] = []
        old, added = 0, iter(stage["added"])
        for kind, count in stage["changes"]:
            if kind == "same":
                lines += before[old : old + count]
            elif kind == "added":
                lines += [next(added) for _ in range(count)]
            old += count if kind != "added" else 0
        texts[stage["name"]] = "\n".join(lines) + "\n"
        before = lines
    return texts
