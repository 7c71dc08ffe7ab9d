"""The schedule of a training step as it ran, in the words of the predicted one.

[Note: when a collective ended]
Compute regions and waits have a beginning and an end that are measured. A collective runs on threads or streams of its
process group, and of it is known: it began after its start was called and after those before it on the same group had
ended, and it ended before the wait for it, or for one behind it, was over. Where compute waited for it, it ended when
the wait did. Otherwise it is drawn with the seconds that it takes by itself (as ``Recorder`` has timed it), which is an
estimate: beside compute, and beside other collectives, it may have taken longer. Each slice says which of the two.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.analysis.simulate import simulate
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.report.trace_events import (
    COMPUTE,
    MICROSECONDS,
    ScheduledGraph,
    Slice,
    communication_args,
    lane_of,
    predicted_slices,
    region_slice,
    wait_slice,
)
from graph_fsdp.runtime import Program
from graph_fsdp.runtime.observe import Interval, Place, ProgramRun
from graph_fsdp.runtime.regions.regions import Region, Step, cut

K = TypeVar("K", bound=Hashable)

WAITED = "measured: compute waited for it"
ALONE = "estimated: the time that it takes by itself"
_NOTICED = 0.5  # a wait of this part of a collective's own seconds is one for the collective, and not for unpacking


def typical(steps: Sequence[Sequence[ProgramRun]]) -> Sequence[ProgramRun]:
    """The step whose duration is the median (of two in the middle, the shorter)."""
    return sorted(steps, key=lambda runs: runs[-1].end)[(len(steps) - 1) // 2]


def median_waits(steps: Sequence[Sequence[ProgramRun]]) -> dict[Place, float]:
    """Collective → seconds of the wait for it, with unpacking: the median over its runs."""
    runs = itertools.chain.from_iterable(steps)
    return _medians(((run.program, i.index), i.seconds) for run in runs for i in run.intervals if i.what == "wait")


def median_runs(steps: Sequence[Sequence[ProgramRun]]) -> dict[Program, float]:
    """Program → seconds of a run of it: the median."""
    return _medians((run.program, run.end - run.begin) for run in itertools.chain.from_iterable(steps))


def _medians(found: Iterable[tuple[K, float]]) -> dict[K, float]:
    values: dict[K, list[float]] = {}
    for key, seconds in found:
        values.setdefault(key, []).append(seconds)
    return {key: statistics.median(seconds) for key, seconds in values.items()}


def slices_as_predicted(runs: Sequence[ProgramRun], cost: CostModel, spec: ModelSpec) -> list[Slice]:
    """What the cost model says of the same runs, one behind the other."""
    graphs = [run.program.graph for run in runs]
    return list(predicted_slices([ScheduledGraph(graph, cost, simulate(graph, cost)) for graph in graphs], spec))


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
                slices.append(region_slice(interval.index, step, interval.begin, interval.seconds))
            elif interval.what == "wait":
                slices.append(wait_slice(step, interval.begin, interval.seconds))
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
                "exposed_us": wait.seconds * MICROSECONDS if wait is not None else 0.0,
                "alone_us": own * MICROSECONDS if own is not None else None,
                "end": WAITED if waited else ALONE,
            }
            yield Slice(node.name, "communication", lane, begin, free - begin, args)
