"""The schedule of a training step as it ran, in the words of the predicted one.

[Note: when a collective ended]
Compute regions and waits have a beginning and an end that are measured. A collective runs on threads or streams of its
process group, and of it is known: it began after its start was called and after those before it on the same group had
ended, and it ended before the wait for it, or for one behind it, was over. Where compute waited for it, it ended when
the wait did. Otherwise it is drawn with the seconds that it takes by itself (as ``Recorder`` has timed it), which is an
estimate: beside compute, and beside other collectives, it may have taken longer. Each slice says which of the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.analysis.simulate import simulate
from graph_fsdp.passes.ir.dialect import wait_of
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.report.trace_events import (
    COMPUTE,
    Slice,
    communication_args,
    lane_of,
    predicted_slices,
    region_name,
)
from graph_fsdp.runtime import Program
from graph_fsdp.runtime.observe.schedule_times import Interval, ProgramRun
from graph_fsdp.runtime.observe.timing import Place
from graph_fsdp.runtime.regions.regions import Region, Step, cut, unit_of

WAITED = "measured: compute waited for it"
ALONE = "estimated: the time that it takes by itself"
_NOTICED = 0.5  # a wait of this part of a collective's own seconds is one for the collective, and not for unpacking


def typical(steps: Sequence[Sequence[ProgramRun]]) -> Sequence[ProgramRun]:
    """The step whose duration is the median (of two in the middle, the shorter)."""
    return sorted(steps, key=lambda runs: runs[-1].end)[(len(steps) - 1) // 2]


def median_waits(steps: Sequence[Sequence[ProgramRun]]) -> dict[Place, float]:
    """Collective → seconds of the wait for it, with unpacking: the median over its runs."""
    found: dict[Place, list[float]] = {}
    for run in (run for runs in steps for run in runs):
        for wait in (interval for interval in run.intervals if interval.what == "wait"):
            found.setdefault((run.program, wait.index), []).append(wait.seconds)
    return {place: statistics.median(seconds) for place, seconds in found.items()}


def median_runs(steps: Sequence[Sequence[ProgramRun]]) -> dict[Program, float]:
    """Program → seconds of a run of it: the median."""
    found: dict[Program, list[float]] = {}
    for run in (run for runs in steps for run in runs):
        found.setdefault(run.program, []).append(run.end - run.begin)
    return {program: statistics.median(seconds) for program, seconds in found.items()}


def slices_as_predicted(runs: Sequence[ProgramRun], cost: CostModel, spec: ModelSpec) -> list[Slice]:
    """What the cost model says of the same runs, one behind the other."""
    slices: list[Slice] = []
    begin = 0.0
    for run in runs:
        timeline = simulate(run.program.graph, cost)
        slices += predicted_slices(run.program.graph, cost, timeline, spec, begin)
        begin += timeline.seconds
    return slices


def slices_as_measured(runs: Sequence[ProgramRun], alone: Mapping[Place, float], spec: ModelSpec) -> list[Slice]:
    """``alone``: seconds that collectives take by themselves."""
    slices: list[Slice] = []
    cuts: dict[Program, list[Step]] = {}
    for run in runs:
        steps = cuts.setdefault(run.program, cut(run.program.graph))
        slices.append(Slice(run.program.graph.phase, "graph", COMPUTE, run.begin, run.end - run.begin))
        for interval in run.intervals:
            step = steps[interval.index]
            if isinstance(step, Region):
                name = region_name(interval.index, step)
                unit = {"unit": unit_of(step) or None}
                slices.append(Slice(name, "region", COMPUTE, interval.begin, interval.seconds, unit))
            elif interval.what == "wait":
                name = wait_of(step).name
                args = communication_args(step)
                slices.append(Slice(name, "exposed", COMPUTE, interval.begin, interval.seconds, args))
        slices += _communication(run, steps, alone, spec)
    return slices


def _communication(
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
        latest: list[float] = []
        for start, _ in reversed(started):
            wait_ended = waits[start.index].end if start.index in waits else run.end
            latest.append(min([wait_ended, *latest[-1:]]))
        free = run.begin
        for (start, node), limit in zip(started, reversed(latest), strict=True):
            begin = min(max(start.begin, free), limit)
            own, wait = alone.get((run.program, start.index)), waits.get(start.index)
            waited = own is None or wait is None or begin + own >= wait.begin or wait.seconds > _NOTICED * own
            free = limit if waited or own is None else min(begin + own, limit)
            args = {
                **communication_args(node),
                "exposed_us": wait.seconds * 1e6 if wait is not None else 0.0,
                "alone_us": own * 1e6 if own is not None else None,
                "end": WAITED if waited else ALONE,
            }
            yield Slice(node.name, "communication", lane, begin, free - begin, args)
