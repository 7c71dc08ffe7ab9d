"""The cost model's clock: a scheduled graph on compute and communication streams, of one rank or of two that differ.

A discrete-event simulation. Compute runs in graph order. A collective starts when the last rank has reached it and its
group's lane is free, lanes run in order (a process group has one stream), and a wait holds a rank until its collective
has ended. Copies between a rank and its host are its own, and have a lane for each direction. What else a step may
meet are :class:`Conditions`:

- ``straggler``: one rank computes so many times slower. One is enough: ranks that are not the slowest wait alike.
- ``contention``: collectives of k groups that use the same level of the network (``intra``, ``inter``) get 1/k of their
  speed each, for as long as they overlap; and while any collective runs, compute has what the hardware's
  ``interference`` leaves of the processors.

Speeds are constant between two events, so all ends are known until one of them changes what runs. Linear in the graph,
times the number of streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.analysis.memory import MemoryProfile
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Graph


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


@dataclass(frozen=True)
class Event:
    """One collective on its group's lane, or one copy ("fetch", "offload"). Seconds from the start of the graph;
    ``exposed``: compute waited so long."""

    node: fx.Node
    group: str
    begin: float
    end: float
    exposed: float


@dataclass(frozen=True)
class Timeline:
    """All in seconds, of a rank that is no straggler. ``seconds``: until the last rank is through. ``communication`` is
    the load of the busiest lane, ``exposed`` the time in which nothing is computed. ``starts``: when compute reaches
    each node of the graph."""

    seconds: float
    compute: float
    communication: float
    exposed: float
    events: list[Event]
    starts: dict[fx.Node, float]

    @property
    def bound(self) -> float:
        """What no schedule of the same collectives and compute can undercut."""
        return max(self.compute, self.communication)


def simulate(graph: Graph, cost: CostModel, conditions: Conditions | None = None) -> Timeline:
    """When a step's graph does what, with the seconds of a cost model."""
    return _Simulation(graph, cost, conditions or Conditions()).run()


def memory_over_time(timeline: Timeline, memory: MemoryProfile) -> list[tuple[float, int]]:
    """Seconds from the start of the graph → live bytes, where they change."""
    curve: list[tuple[float, int]] = []
    for seconds, nbytes in zip(timeline.starts.values(), memory.total, strict=True):
        if not curve or curve[-1][1] != nbytes:
            curve.append((seconds, nbytes))
    return curve


@dataclass(eq=False, slots=True)
class _Work:
    """Something that takes time: ``seconds`` of it at full speed."""

    seconds: float
    begin: float = 0.0
    end: float = 0.0
    speed: float = 1.0
    disturbed: bool = False  # its speed has changed, or is not full

    def start(self, now: float) -> None:
        self.begin, self.end = now, now + self.seconds

    def set_speed(self, now: float, speed: float) -> None:
        """``now``: while it runs."""
        if speed != self.speed:
            self.end = now + (self.end - now) * self.speed / speed
            self.speed, self.disturbed = speed, True

    @property
    def taken(self) -> float:
        return self.end - self.begin if self.disturbed else self.seconds


@dataclass(eq=False, slots=True)
class _Transfer(_Work):
    """A collective, or one rank's copy. ``levels``: of the network, where they are shared; ``rank``: whose copy it is,
    None for all ranks'."""

    lane: str = ""
    levels: frozenset[str] = frozenset()
    rank: int | None = None
    arrived: int = 0
    done: bool = False


@dataclass(eq=False, slots=True)
class _Rank:
    slowness: float
    index: int = 0  # of the node that it is at
    work: _Work | None = None
    busy: float = 0.0  # seconds in which it has computed
    starts: dict[fx.Node, float] = field(default_factory=dict)
    waited: dict[fx.Node, float] = field(default_factory=dict)


class _Simulation:
    """One run. ``ranks``: one that keeps up and, with a straggler, one that does not."""

    def __init__(self, graph: Graph, cost: CostModel, conditions: Conditions) -> None:
        self.nodes = list(graph.fx_graph.nodes)
        self.cost, self.contention = cost, conditions.contention
        self.seconds = cost.graph_seconds(graph)
        slowness = [1.0, float(conditions.straggler)] if conditions.straggler > 1 else [1.0]
        self.ranks = [_Rank(s) for s in slowness]
        self.now = 0.0
        self._lanes: dict[tuple[str, int | None], deque[_Transfer]] = {}  # the first of each runs
        self._transfers: dict[tuple[fx.Node, int | None], _Transfer] = {}

    def run(self) -> Timeline:
        while True:
            for number, rank in enumerate(self.ranks):
                self._proceed(rank, number)
            if not self._advance():
                break
        first = self.ranks[0]
        load: dict[str, float] = {}
        events = []
        for (node, owner), transfer in self._transfers.items():
            if owner in (None, 0):
                events.append(Event(node, transfer.lane, transfer.begin, transfer.end, first.waited.get(node, 0.0)))
                load[transfer.lane] = load.get(transfer.lane, 0.0) + transfer.taken
        busiest = max(load.values(), default=0.0)
        return Timeline(self.now, first.busy, busiest, self.now - first.busy, events, first.starts)

    def _proceed(self, rank: _Rank, number: int) -> None:
        """Through all that takes the rank no time."""
        while rank.work is None and rank.index < len(self.nodes):
            node = self.nodes[rank.index]
            if node.target in dialect.WAITS or node.target in dialect.COPY_WAITS:
                started = node.args[0]
                assert isinstance(started, fx.Node)
                since = rank.starts.setdefault(node, self.now)
                if not self._transfers[started, self._owner(started, number)].done:
                    return
                rank.waited[started] = self.now - since
            else:
                rank.starts[node] = self.now
                if node.target in dialect.STARTS or node.target in dialect.COPY_STARTS:
                    self._reach(node, number)
                elif seconds := self.seconds[node] * rank.slowness:
                    rank.work = _Work(seconds)
                    rank.work.start(self.now)
                    return
            rank.index += 1

    @staticmethod
    def _owner(start: fx.Node, number: int) -> int | None:
        return number if start.target in dialect.COPY_STARTS else None

    def _reach(self, node: fx.Node, number: int) -> None:
        """A rank is at a node that starts a collective or a copy."""
        owner = self._owner(node, number)
        if (node, owner) not in self._transfers:
            self._transfers[node, owner] = self._transfer(node, owner)
        transfer = self._transfers[node, owner]
        transfer.arrived += 1
        if owner is not None or transfer.arrived == len(self.ranks):
            lane = self._lanes.setdefault((transfer.lane, owner), deque())
            lane.append(transfer)
            if len(lane) == 1:
                transfer.start(self.now)

    def _transfer(self, start: fx.Node, owner: int | None) -> _Transfer:
        if owner is not None:
            lane = "fetch" if start.target is dialect.fetch_start else "offload"
            return _Transfer(self.cost.transfer_seconds(start.meta["fsdp"].nbytes), lane=lane, rank=owner)
        group = dialect.group_of(start)
        levels = self.cost.levels(group) if self.contention else frozenset()
        return _Transfer(self.cost.collective_seconds(start), lane=group, levels=levels)

    def _advance(self) -> bool:
        """To the next event. False when all is done."""
        running = [lane[0] for lane in self._lanes.values() if lane]
        computing = [rank for rank in self.ranks if rank.work is not None]
        works: list[_Work] = [*running, *(rank.work for rank in computing if rank.work is not None)]
        if not works:
            return False
        if self.contention:
            self._share(running, works[len(running) :])
        self.now = min(work.end for work in works)
        for rank in computing:
            if rank.work is not None and rank.work.end <= self.now:
                rank.busy += rank.work.taken
                rank.work = None
                rank.index += 1
        for transfer in running:
            if transfer.end <= self.now:
                transfer.done = True
                lane = self._lanes[transfer.lane, transfer.rank]
                lane.popleft()
                if lane:
                    lane[0].start(self.now)
        return True

    def _share(self, running: Sequence[_Transfer], computing: Sequence[_Work]) -> None:
        """Each transfer gets its part of the level that most others use too, compute what collectives leave it."""
        used: dict[str, int] = {}
        for transfer in running:
            for level in transfer.levels:
                used[level] = used.get(level, 0) + 1
        for transfer in running:
            transfer.set_speed(self.now, 1.0 / max((used[level] for level in transfer.levels), default=1))
        collectives = any(transfer.rank is None for transfer in running)
        for work in computing:
            work.set_speed(self.now, 1.0 - self.cost.hardware.interference if collectives else 1.0)
