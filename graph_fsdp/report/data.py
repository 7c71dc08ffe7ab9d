"""A report as plain data: what is printed, and what a file of a report holds.

Everything here is what ``json.dumps`` takes. Times are in seconds; positions are indices of nodes in the graph after
all passes. The functions that make a part say what it has: a report has captures, a capture graphs, a graph buckets and
stages.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.report.bucket_rows import prefetch_distances

if TYPE_CHECKING:
    from graph_fsdp.report.report import CapturedGraph, GraphReport, GraphView

Data = dict[str, Any]

Change = tuple[Literal["same", "removed", "added"], int]
"""So many lines that are the same in both texts, that only the old one has, or that only the new one has."""


def report_data(report: GraphReport, *, stages: bool, error: Exception | None = None) -> Data:
    """``stages``: with the text of each, which takes seconds where a model is deep. ``error``: what ended a capture."""
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
        "error": None if error is None else {"kind": type(error).__name__, "message": str(error)},
    }


def error_text(report: Data) -> str | None:
    """The error of a report that was saved when a pass or the verifier failed; None for any other."""
    error = report["error"]
    return None if error is None else f"{error['kind']}: {error['message']}"


def capture_data(capture: CapturedGraph, *, stages: bool) -> Data:
    return {
        "index": capture.index,
        "cause_kind": capture.cause.kind,
        "cause": str(capture.cause),
        "graphs": [graph_data(view, stages=stages) for view in capture.all_views()],
    }


def graph_data(view: GraphView, *, stages: bool = False) -> Data:
    """``memory``, ``slots``, ``cuda_graphs``, ``compiled_by_xla``: lines of text; none where nothing is known.
    ``schedule``: None without a cost model. ``passes``: name and seconds. ``nodes``: 0 of a graph that other graphs are
    made of. ``stages``: none in a report that is only printed."""
    timeline = view.timeline
    cost = view.graph.cost if view.graph is not None else None
    schedule = None
    if timeline is not None and cost is not None:
        totals = {name: getattr(timeline, name) for name in ("seconds", "compute", "communication", "exposed")}
        schedule = {"hardware": cost.hardware.name, **totals}
    return {
        "phase": view.phase,
        "nodes": view.nodes,
        "whole": view.whole,
        "buckets": bucket_data(view),
        "slots": str(view.slots).splitlines() if view.slots else [],
        "copied_nbytes": view.copied_nbytes,
        "compiled_by_xla": view.compiled_by_xla(),
        "memory": str(view.memory).splitlines() if view.memory is not None else [],
        "cuda_graphs": str(view.cuda_graphs).splitlines() if view.cuda_graphs is not None else [],
        "schedule": schedule,
        "passes": [(stage.name, stage.seconds) for stage in view.stages.values()],
        "stages": stage_data(view) if stages else [],
    }


def bucket_data(view: GraphView) -> list[Data]:
    """The rows of :class:`graph_fsdp.report.bucket_rows.BucketRow`. ``ahead``: units' uses that begin while it is under
    way. ``seconds``: that the collective takes, ``exposed`` that compute waits for it, as predicted."""
    events: dict[int | None, Any] = {}
    if view.graph is not None and view.timeline is not None:
        positions = view.graph.positions()
        events = {positions[event.node]: event for event in view.timeline.events}
    found = []
    for row, ahead in zip(view.buckets, prefetch_distances(view.buckets), strict=True):
        event = events.get(row.start)
        times = {
            "ahead": ahead,
            "seconds": None if event is None else event.end - event.begin,
            "exposed": None if event is None else event.exposed,
        }
        found.append({**asdict(row), "parameters": len(row.parameters), "kept": row.escapes, **times})
    return found


def unit_data(spec: ModelSpec) -> list[Data]:
    """The units in the order of the storage. ``nbytes``: of the whole parameters; ``shard_nbytes``: of this rank's."""
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


def stage_data(view: GraphView) -> list[Data]:
    """``changes`` and ``added``: how a stage's lines are made of those of the stage before, see ``line_changes``."""
    stages = []
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


def stage_diff(phase: str, names: Sequence[str], stage: str, body: Callable[[str], str]) -> str:
    """Unified diff of a stage against the one before it. ``names``: of all stages; ``body``: the text of one."""
    if stage not in names:
        raise KeyError(f"the {phase} graph has no stage {stage!r}; it has {', '.join(names)}")
    index = names.index(stage)
    title, before = (names[index - 1], body(names[index - 1])) if index else ("(nothing)", "")
    lines = difflib.unified_diff(before.splitlines(), body(stage).splitlines(), title, stage, lineterm="", n=1)
    return "\n".join(lines)


def stage_texts(stages: Iterable[Data]) -> dict[str, str]:
    """Name → the graph after that pass, from what ``stage_data`` made."""
    texts: dict[str, str] = {}
    lines: list[str] = []
    for stage in stages:
        before, added = iter(lines), iter(stage["added"])
        lines = [
            line
            for kind, count in stage["changes"]
            for line in itertools.islice(added if kind == "added" else before, count)
            if kind != "removed"
        ]
        texts[stage["name"]] = "\n".join(lines) + "\n"
    return texts
