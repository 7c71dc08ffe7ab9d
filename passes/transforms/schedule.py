"""The arithmetic of the prefetch pass says when the gathers of one graph start.

Let the gathers be ``g_0, g_1, …`` in the plan's order and ``w_k`` the wait of ``g_k``. A schedule is a list ``after``:
gather ``k`` starts right after ``w_after[k]``, at the top for -1, and right before its own wait for ``k``.

*Latest start* (``latest_starts``). With ``A_k`` the compute time before ``w_k`` and ``d_k`` the gather's duration,
gathers share one lane, so going backwards ``S_k = min(A_k, S_(k+1)) - d_k`` is the latest moment at which gather ``k``
may start and hide all of itself and of those behind it. It starts after the last wait at or before ``S_k``.

*Budget* (``fit``). Interval ``t`` of time ends with ``w_t``. A buffer is live from the interval in which its gather
starts (right before its own wait: the next one) through that of its last use. A gather that would exceed the budget
starts later. That is feasible however early others start: what is live at a gather's own wait was gathered before it
and is still used.

*Choice* (``choose``). The recursion does not see reductions, which share the lane. So it is tried with durations scaled
up, beside fixed distances, and the clock of ``simulate`` decides; of equally fast schedules, the one that holds fewest
byte-intervals wins.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.analysis.room import NO_ROOM, Room
from graph_fsdp.passes.analysis.simulate import Conditions, Simulation, Task
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Gather, Graph

After = list[int]

_SCALES = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_DISTANCES = (1, 2, 3)
_EQUAL = 1.001  # schedules this close on a modelled clock are the same
WORTH = 1.01  # so many times faster is worth more memory


class BudgetError(ValueError):
    """Says that the budget of gathered bytes is smaller than what has to be gathered at once."""


@dataclass(frozen=True)
class Gathers:
    """Describes the gathers of a graph, and when their buffers are used. ``last[k]``: the interval of the last use of
    buffer ``k``; ``received``: (bytes, interval of last use) of the buffers that forward kept."""

    phase: str
    units: list[str]
    nbytes: list[int]
    last: list[int]
    received: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.nbytes)

    def live(self, after: Sequence[int] = ()) -> list[int]:
        """Return the bytes per interval under a schedule; without one, those that are live whatever the schedule."""
        changes = [0] * (len(self) + 2)
        received = ((nbytes, -1, last) for nbytes, last in self.received)
        for nbytes, begin, last in (*received, *zip(self.nbytes, after, self.last, strict=False)):
            changes[begin + 1] += nbytes
            changes[last + 1] -= nbytes
        return list(itertools.accumulate(changes[:-1]))


def find_gathers(graph: Graph, starts: list[fx.Node]) -> Gathers:
    positions = graph.positions()
    ends = sorted(positions[dialect.wait_of(start)] for start in starts)
    found = {gather.start or gather.buffer: gather for gather in graph.gathers}

    def last(gather: Gather) -> int:
        node = graph.output if gather.escapes else [gather.buffer, *gather.reads][-1]
        return bisect.bisect_right(ends, positions[node])

    started = [found[start] for start in starts]
    units, nbytes = [gather.unit or "root" for gather in started], [gather.nbytes for gather in started]
    received = [(gather.nbytes, last(gather)) for gather in found.values() if gather.start is None]
    return Gathers(graph.phase, units, nbytes, list(map(last, started)), received)


def at_distance(count: int, distance: int) -> After:
    """Start each gather when the bucket ``distance`` before it has arrived."""
    return [max(-1, k - distance) for k in range(count)]


def units_ahead(gathers: Gathers, count: int = 1) -> After:
    """Start the buckets of a unit when the first bucket of the unit ``count`` before it has arrived."""
    after: After = []
    begins: list[int] = []  # the first buckets of the units' runs
    for k, unit in enumerate(gathers.units):
        if k == 0 or unit != gathers.units[k - 1]:
            begins.append(k)
        after.append(begins[-1 - count] if len(begins) > count else -1)
    return after


def fit(gathers: Gathers, after: After, budget: int) -> After:
    """Delay gathers until they fit the budget.

    Raises:
        BudgetError: a gather does not fit even right before its own wait.
    """
    if max(gathers.live(after), default=0) <= budget:
        return after
    live = gathers.live()
    placed: After = []
    for k, nbytes in enumerate(gathers.nbytes):
        earliest = max([after[k], *placed[-1:]])  # gathers keep their order
        last = gathers.last[k]
        exceeding = [t for t in range(earliest + 1, last + 1) if live[t] + nbytes > budget]
        first = max(exceeding, default=earliest) + 1
        if first > k + 1:
            needed = max(live[k + 1 : last + 1]) + nbytes
            raise BudgetError(
                f"budget of {budget:,} bytes is too small for unit {gathers.units[k]!r} in the {gathers.phase} graph: "
                f"it and what must be gathered at the same time are {needed:,} bytes"
            )
        placed.append(first - 1)
        for t in range(first, last + 1):
            live[t] += nbytes
    return placed


def latest_starts(arrivals: list[float], durations: list[float], scale: float = 1.0) -> After:
    """Start gathers as late as still hides them; ``arrivals[k]``: seconds of compute before ``w_k``."""
    after = [0] * len(arrivals)
    start = float("inf")
    for k in reversed(range(len(arrivals))):
        start = min(arrivals[k], start) - durations[k] * scale
        after[k] = min(bisect.bisect_right(arrivals, start), k) - 1
    return after


@dataclass(frozen=True)
class Segments:
    """A serial graph as the clock sees it has ``tasks`` in order: what is computed, reductions that start, and waits
    for ``gathers``, which a schedule puts between them. ``arrivals``: seconds of compute before each of these waits."""

    tasks: list[Task]
    gathers: list[Task]
    arrivals: list[float]

    @classmethod
    def of(
        cls, nodes: Sequence[fx.Node], starts: list[fx.Node], cost: CostModel, seconds: Mapping[fx.Node, float]
    ) -> Segments:
        """Describe a graph that has its nodes in this order, which take these ``seconds`` of compute. ``starts``: of
        its gathers, in the plan's order."""
        found = (node for node in nodes if node.target in dialect.STARTS)
        started = {s: Task(cost.collective_seconds(s), dialect.group_of(s), copies=seconds[s]) for s in found}
        gathers = [started[start] for start in starts]
        awaited, arrivals = {dialect.wait_of(start): started[start] for start in starts}, dict[Task, float]()
        tasks: list[Task] = []
        compute = total = 0.0
        for node in nodes:
            if node in awaited:
                arrivals[awaited[node]] = total + compute
                task = Task(waits_for=awaited[node], copies=seconds[node])
            elif node in started and node.target is not dialect.all_gather_start:
                task = started[node]
            else:
                compute += 0.0 if node in started else float(seconds[node])
                continue
            total += compute
            tasks += [Task(compute), task]
            compute = 0.0
        # Where the plan's order is not this graph's, a gather arrives no earlier than those before it.
        ordered = itertools.accumulate((arrivals[gather] for gather in gathers), max)
        return cls([*tasks, Task(compute)], gathers, list(ordered))

    def seconds(self, after: After) -> float:
        """Return the duration of the graph under a schedule, by the clock of ``simulate``."""
        due: dict[Task | None, list[Task]] = {None: []}  # gather → those that start behind its wait; None: at the top
        for gather, anchor in zip(self.gathers, after, strict=True):
            due.setdefault(self.gathers[anchor] if anchor >= 0 else None, []).append(gather)
        tasks = due.pop(None)
        for task in self.tasks:
            awaited = task.waits_for
            behind = due.get(awaited, [])
            if awaited is not None and awaited in behind:  # right before its own wait
                behind.remove(awaited)
                tasks.append(awaited)
            tasks += [task, *behind]
        return Simulation(tasks, Conditions()).run()


def choose(gathers: Gathers, segments: Segments, budget: int | None, room: Room = NO_ROOM) -> After:
    """Choose the fastest schedule within the budget; without one, within what one unit ahead holds, or what two hold if
    ``room`` has that, or all that it has, where more memory saves a hundredth of the time."""
    if not len(gathers):
        return []
    limit = max(gathers.live(units_ahead(gathers))) if budget is None else budget
    seconds, chosen = _fastest(gathers, segments, limit)
    for more in (min(room.most, max(gathers.live(units_ahead(gathers, 2)))), room.most) if budget is None else ():
        faster, with_more = _fastest(gathers, segments, more) if more > limit else (seconds, chosen)
        if faster * WORTH < seconds and room.has(max(gathers.live(with_more))):
            seconds, chosen = faster, with_more
    return _no_further(gathers, segments, seconds, chosen)


def _no_further(gathers: Gathers, segments: Segments, seconds: float, after: After) -> After:
    """Let as few of the first gathers as it takes start further than one unit ahead, where that is as fast: ``after``
    takes ``seconds``.

    Where the link is late from some gather on, it is so however early the gathers behind it start: they would only
    take memory, and compute would not begin when a gather ends but when a reduction does.
    """
    near = list(map(max, after, units_ahead(gathers)))
    for count in (0, *(2**i for i in range(len(after).bit_length()))):
        nearer = [*after[:count], *near[count:]]
        if segments.seconds(nearer) <= seconds * _EQUAL:
            return nearer
    return after


def _fastest(gathers: Gathers, segments: Segments, limit: int) -> tuple[float, After]:
    durations = [gather.seconds for gather in segments.gathers]
    candidates = [latest_starts(segments.arrivals, durations, scale) for scale in _SCALES]
    candidates += [units_ahead(gathers), *(at_distance(len(gathers), distance) for distance in _DISTANCES)]
    fitted = [fit(gathers, candidate, limit) for candidate in candidates]
    timed = [(segments.seconds(after), sum(gathers.live(after)), after) for after in fitted]
    fastest = min(seconds for seconds, _, _ in timed)
    seconds, _, after = min((t for t in timed if t[0] <= fastest * _EQUAL), key=lambda t: t[1])
    return seconds, after
