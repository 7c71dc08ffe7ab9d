"""A step of several ranks on one clock: compute and communication streams, stragglers, and links that groups share.

``graph_fsdp.passes.simulate`` is the clock of one rank whose peers keep step and whose links are its own; the passes
schedule by it. Here a scheduled graph runs under :class:`Conditions`. Without any, the result is that clock's.

A discrete-event simulation with fluid rates. Every rank runs the same graph in the same order. A collective begins when
the last rank has reached it and its group's stream is free; a wait holds a rank until its collective has ended; copies
between a rank and its host are its own. Between two events all rates are constant:

- ``straggler``: one rank computes so many times slower. One is enough: ranks that are not the slowest wait alike.
- ``contention``: collectives of k groups that use the same level of the network (``intra``, ``inter``) get 1/k of their
  speed each, for as long as they overlap; and while any collective runs, compute has what the hardware's
  ``interference`` leaves of the processors.

Linear in the graph, times the number of streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from graph_fsdp.passes import CostModel, Graph, Timeline, dialect, simulate
from graph_fsdp.passes.memory import MemoryProfile
from graph_fsdp.passes.simulate import Event

_TINY = 1e-15  # seconds of work that rounding may leave


@dataclass(frozen=True)
class Conditions:
    """What a step may meet. ``straggler``: how many times slower the slowest rank computes, 1 or more. ``contention``:
    see above. Raises ValueError on a straggler that cannot be."""

    straggler: float = 1.0
    contention: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.straggler, bool) or not isinstance(self.straggler, (int, float)) or not self.straggler >= 1:
            raise ValueError(
                f"straggler: says how many times slower the slowest rank computes, 1 or more, got {self.straggler!r}"
            )

    @property
    def none(self) -> bool:
        return self.straggler == 1 and not self.contention


def run(graph: Graph, cost: CostModel, conditions: Conditions | None = None) -> Timeline:
    """The timeline of a rank that is no straggler; its ``seconds`` are those until the last rank is through.
    ``communication`` is the load of its busiest lane, with what sharing links adds."""
    conditions = conditions or Conditions()
    if conditions.none:
        return simulate(graph, cost)
    return Simulation(graph, cost, conditions).run()


def memory_over_time(timeline: Timeline, memory: MemoryProfile) -> list[tuple[float, int]]:
    """Seconds from the start of the graph → live bytes, where they change."""
    totals = [sum(values) for values in zip(*memory.timeline.values(), strict=True)]
    curve: list[tuple[float, int]] = []
    for seconds, nbytes in zip(timeline.starts.values(), totals, strict=True):
        if not curve or curve[-1][1] != nbytes:
            curve.append((seconds, nbytes))
    return curve


@dataclass
class _Rank:
    slowness: float
    index: int = 0  # of the node that it is at
    work: float = 0.0  # seconds of compute that are left of it, undisturbed
    busy: float = 0.0  # seconds in which it has computed
    waiting: fx.Node | None = None
    since: float = 0.0
    starts: dict[fx.Node, float] = field(default_factory=dict)
    waited: dict[fx.Node, float] = field(default_factory=dict)


@dataclass
class _Transfer:
    """A collective, or one rank's copy."""

    start: fx.Node
    lane: str
    work: float
    levels: frozenset[str]
    rank: int | None  # whose copy; None: all ranks'
    arrived: int = 0
    begin: float = 0.0


class Simulation:
    """One run. ``ranks``: one that keeps up and, with a straggler, one that does not."""

    def __init__(self, graph: Graph, cost: CostModel, conditions: Conditions) -> None:
        self.nodes = list(graph.fx_graph.nodes)
        self.cost, self.conditions = cost, conditions
        self.seconds = cost.graph_seconds(graph)
        slowness = [1.0, float(conditions.straggler)] if conditions.straggler > 1 else [1.0]
        self.ranks = [_Rank(s) for s in slowness]
        self.now = 0.0
        self._lanes: dict[tuple[str, int | None], deque[_Transfer]] = {}  # the first of each runs
        self._pending: dict[tuple[fx.Node, int | None], _Transfer] = {}
        self._ends: dict[tuple[fx.Node, int | None], float] = {}
        self._events: dict[fx.Node, tuple[str, float, float]] = {}  # of the first rank

    def run(self) -> Timeline:
        while True:
            for number, rank in enumerate(self.ranks):
                self._proceed(rank, number)
            if not self._advance():
                break
        first = self.ranks[0]
        events = [Event(n, lane, b, e, first.waited.get(n, 0.0)) for n, (lane, b, e) in self._events.items()]
        load: dict[str, float] = {}
        for event in events:
            load[event.group] = load.get(event.group, 0.0) + event.end - event.begin
        compute = first.busy
        return Timeline(self.now, compute, max(load.values(), default=0.0), self.now - compute, events, first.starts)

    def _proceed(self, rank: _Rank, number: int) -> None:
        """Through all that takes the rank no time."""
        while rank.index < len(self.nodes) and rank.work == 0.0:
            node = self.nodes[rank.index]
            if node.target in dialect.WAITS or node.target in dialect.COPY_WAITS:
                start = node.args[0]
                assert isinstance(start, fx.Node)
                owner = number if start.target in dialect.COPY_STARTS else None
                rank.starts.setdefault(node, self.now)
                if (start, owner) not in self._ends:
                    if rank.waiting is None:
                        rank.waiting, rank.since = start, self.now
                    return
                rank.waited[start] = self.now - rank.since if rank.waiting is start else 0.0
                rank.waiting = None
            else:
                rank.starts[node] = self.now
                if node.target in dialect.STARTS or node.target in dialect.COPY_STARTS:
                    self._reach(node, number)
                else:
                    rank.work = self.seconds[node] * rank.slowness
                    if rank.work > 0.0:
                        return
            rank.index += 1

    def _reach(self, node: fx.Node, number: int) -> None:
        """A rank is at a node that starts a collective or a copy."""
        is_copy = node.target in dialect.COPY_STARTS
        owner = number if is_copy else None
        key = (node, owner)
        if key not in self._pending:
            if is_copy:
                lane = "fetch" if node.target is dialect.fetch_start else "offload"
                made = _Transfer(node, lane, self.cost.transfer_seconds(node.meta["fsdp"].nbytes), frozenset(), owner)
            else:
                group = dialect.group_of(node)
                levels = self.cost.levels(group) if self.conditions.contention else frozenset()
                made = _Transfer(node, group, self.cost.collective_seconds(node), levels, None)
            self._pending[key] = made
        transfer = self._pending[key]
        transfer.arrived += 1
        if is_copy or transfer.arrived == len(self.ranks):
            lane_queue = self._lanes.setdefault((transfer.lane, owner), deque())
            transfer.begin = self.now
            lane_queue.append(transfer)

    def _advance(self) -> bool:
        """To the next event. False when all is done."""
        running = [queue[0] for queue in self._lanes.values() if queue]
        computing = [rank for rank in self.ranks if rank.work > 0.0]
        if not running and not computing:
            return False
        rates = self._rates(running)
        collectives = any(transfer.rank is None for transfer in running)
        speed = 1.0 - self.cost.hardware.interference if self.conditions.contention and collectives else 1.0
        step = min(
            [transfer.work / rate for transfer, rate in zip(running, rates, strict=True)]
            + [rank.work / speed for rank in computing]
        )
        self.now += step
        for rank in computing:
            rank.busy += step
            rank.work = _left(rank.work, step * speed)
            rank.index += rank.work == 0.0
        for transfer, rate in zip(running, rates, strict=True):
            transfer.work = _left(transfer.work, step * rate)
            if transfer.work == 0.0:
                self._end(transfer)
        return True

    def _rates(self, running: Sequence[_Transfer]) -> list[float]:
        """Each transfer's part of the level that most others use too."""
        used: dict[str, int] = {}
        for transfer in running:
            for level in transfer.levels:
                used[level] = used.get(level, 0) + 1
        return [1.0 / max((used[level] for level in transfer.levels), default=1) for transfer in running]

    def _end(self, transfer: _Transfer) -> None:
        queue = self._lanes[transfer.lane, transfer.rank]
        queue.popleft()
        if queue:
            queue[0].begin = self.now
        self._ends[transfer.start, transfer.rank] = self.now
        if transfer.rank in (None, 0):
            self._events[transfer.start] = (transfer.lane, transfer.begin, self.now)


def _left(work: float, done: float) -> float:
    rest = work - done
    return rest if rest > _TINY + 1e-12 * work else 0.0
