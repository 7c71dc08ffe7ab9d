"""The cost model's clock runs a scheduled graph on compute and communication streams, of one or two ranks.

It is a discrete-event simulation. Compute runs in graph order. A collective starts when the last rank has reached it
and its group's lane is free (a process group has one stream), and a wait holds a rank until its collective has ended.
Copies between a rank and its host have a lane for each direction, those of activations one for both, as they have one
stream. A step may meet :class:`Conditions`:

- ``straggler``: one rank computes so many times slower. One is enough: ranks that are not the slowest wait alike.
- ``contention``: collectives of k groups on one level of the network (``intra``, ``inter``) get 1/k of their speed
  each, while they overlap; and while any collective runs, compute has what the hardware's ``interference`` leaves.

Linear in the graph, times the number of streams.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import argument, operand
from graph_fsdp.passes.ir.settings import check_flags, is_positive


@dataclass(frozen=True)
class Conditions:
    """Says what a step may meet. ``straggler``: how many times slower the slowest rank computes, 1 or more.
    ``contention``: whether collectives share links and processors. Raises ValueError or TypeError on what cannot be."""

    straggler: float = 1.0
    contention: bool = False

    def __post_init__(self) -> None:
        if not is_positive(self.straggler) or not 1 <= self.straggler < math.inf:
            raise ValueError(
                f"straggler: says how many times slower the slowest rank computes, 1 or more, got {self.straggler!r}"
            )
        check_flags(contention=self.contention)

    def __str__(self) -> str:
        told = [f"a straggler of {self.straggler:g}"] if self.straggler > 1 else []
        return " and ".join([*told, *(["contention"] if self.contention else [])])


@dataclass(frozen=True)
class TimedTransfer:
    """Times a collective or a copy ("fetch", "offload", "activations") on its lane, in seconds; compute waits
    ``exposed`` of them."""

    node: fx.Node
    group: str
    begin: float
    end: float
    exposed: float


@dataclass(frozen=True)
class Timeline:
    """Times a rank that is no straggler, in seconds. ``seconds``: until the last rank is through; ``communication``:
    the load of the busiest lane; ``exposed``: the time in which nothing is computed; ``starts``: when compute reaches
    each node."""

    seconds: float
    compute: float
    communication: float
    exposed: float
    events: list[TimedTransfer]
    starts: dict[fx.Node, float]

    @property
    def bound(self) -> float:
        """Return the seconds that no schedule of the same collectives and compute can undercut."""
        return max(self.compute, self.communication)


def seconds_beside(events: Sequence[TimedTransfer], others: Sequence[TimedTransfer]) -> float:
    """Return the seconds of ``events`` in which at least one of ``others`` runs too."""
    found = 0.0
    for event in events:
        until = event.begin
        for other in sorted(others, key=lambda other: other.begin):
            begin, end = max(other.begin, until), min(other.end, event.end)
            if begin < end:
                found, until = found + end - begin, end
    return found


@dataclass(frozen=True, eq=False, slots=True)
class Task:
    """A rank computes for ``seconds``; with a ``lane`` it starts a transfer of as long there; with ``waits_for`` it
    waits for that task's transfer. ``copies``: what it computes before it starts one, and when it has waited for one.
    ``levels``: shared levels of the network. ``own``: each rank has its own transfer.
    """

    seconds: float = 0.0
    lane: str = ""
    waits_for: Task | None = None
    levels: frozenset[str] = frozenset()
    own: bool = False
    copies: float = 0.0


def simulate(graph: Graph, cost: CostModel, conditions: Conditions | None = None) -> Timeline:
    """Simulate when a step's graph does what, with the seconds of a cost model."""
    conditions = conditions or Conditions()
    seconds = cost.graph_seconds(graph)
    tasks: dict[fx.Node, Task] = {}
    for node in graph.fx_graph.nodes:
        if node.target in dialect.COPY_STARTS:
            lane = "fetch" if node.target is dialect.fetch_start else "offload"
            tasks[node] = Task(cost.transfer_seconds(node.meta["fsdp"].nbytes), lane, own=True)
        elif node.target in dialect.ACTIVATION_STARTS:
            tasks[node] = Task(cost.transfer_seconds(node.meta["fsdp"].nbytes), "activations", own=True)
        elif node.target in dialect.STARTS:
            group = dialect.group_of(node)
            levels = cost.levels(group) if conditions.contention else frozenset()
            tasks[node] = Task(cost.collective_seconds(node), group, levels=levels, copies=seconds[node])
        elif cost.model_collective_seconds(node) is not None:
            group = argument(node, "group_name")
            levels = cost.levels(group) if conditions.contention else frozenset()
            tasks[node] = Task(seconds[node], group, levels=levels)
        elif node.target is dialect.MODEL_WAIT and cost.model_collective_seconds(operand(node)) is not None:
            tasks[node] = Task(waits_for=tasks[operand(node)])
        elif node.target in dialect.TRANSFER_WAITS or node.target in dialect.ACTIVATION_WAITS:
            tasks[node] = Task(waits_for=tasks[operand(node)], copies=seconds[node])
        else:
            tasks[node] = Task(seconds[node])
    simulation = Simulation(list(tasks.values()), conditions, cost.hardware.interference)
    end = simulation.run()
    first, events = simulation.ranks[0], []
    load: dict[str, float] = {}
    node_of = {task: node for node, task in tasks.items()}
    for (task, owner), transfer in simulation.transfers.items():
        if not owner:  # the first rank's, or of all
            waited = first.waited.get(task, 0.0)
            events.append(TimedTransfer(node_of[task], task.lane, transfer.begin, transfer.end, waited))
            load[task.lane] = load.get(task.lane, 0.0) + transfer.taken
    busiest = max(load.values(), default=0.0)
    return Timeline(end, first.busy, busiest, end - first.busy, events, dict(zip(tasks, first.starts, strict=True)))


@dataclass(eq=False, slots=True)
class _Work:
    """Takes ``seconds`` at full speed."""

    seconds: float
    begin: float = 0.0
    end: float = 0.0
    speed: float = 1.0
    disturbed: bool = False  # its speed has changed, or is not full

    def start(self, now: float) -> None:
        self.begin, self.end = now, now + self.seconds

    def set_speed(self, now: float, speed: float) -> None:
        """Change the speed while it runs."""
        if speed != self.speed:
            self.end = now + (self.end - now) * self.speed / speed
            self.speed, self.disturbed = speed, True

    @property
    def taken(self) -> float:
        return self.end - self.begin if self.disturbed else self.seconds


@dataclass(eq=False, slots=True)
class _Transfer(_Work):
    """A transfer is a collective, or the copy of one rank, its ``owner``; None for all ranks."""

    task: Task = field(default_factory=Task)
    owner: int | None = None
    arrived: int = 0
    done: bool = False


@dataclass(eq=False, slots=True)
class _Rank:
    slowness: float
    work: _Work | None = None
    busy: float = 0.0  # seconds in which it has computed
    starts: list[float] = field(default_factory=list)  # when it came to each task
    waited: dict[Task, float] = field(default_factory=dict)


class Simulation:
    """Runs the same tasks on one rank that keeps up and, with a straggler, on one that does not. ``beside``: the tasks
    of each further stream of a rank, which may wait for what another stream starts."""

    def __init__(
        self, tasks: list[Task], conditions: Conditions, interference: float = 0.0, beside: Sequence[list[Task]] = ()
    ) -> None:
        self.contention, self.interference = conditions.contention, interference
        slowness = [1.0, float(conditions.straggler)] if conditions.straggler > 1 else [1.0]
        self._streams = [(n, _Rank(s), each) for each in (tasks, *beside) for n, s in enumerate(slowness)]
        self.ranks = [rank for _, rank, _ in self._streams[: len(slowness)]]
        self.now = 0.0
        self.transfers: dict[tuple[Task, int | None], _Transfer] = {}
        self._lanes: dict[tuple[str, int | None], deque[_Transfer]] = {}  # the first of each runs

    def run(self) -> float:
        """Return the seconds until the last rank is through and nothing is under way."""
        courses = [self._course(*stream) for stream in self._streams]
        while True:
            for course in courses:
                next(course, None)
            if not self._advance():
                return self.now

    def _course(self, number: int, rank: _Rank, tasks: Sequence[Task]) -> Iterator[None]:
        """Go through a stream's tasks, and yield as long as it computes or waits."""
        for task in tasks:
            rank.starts.append(self.now)
            if task.waits_for is not None:
                awaited = task.waits_for, number if task.waits_for.own else None
                while awaited not in self.transfers or not self.transfers[awaited].done:
                    yield
                rank.waited[task.waits_for] = self.now - rank.starts[-1]
            computed = task.copies if task.lane or task.waits_for is not None else task.seconds
            if seconds := computed * rank.slowness:
                rank.work = _Work(seconds, self.now, self.now + seconds)
                while rank.work is not None:
                    yield
            if task.lane:
                self._reach(task, number if task.own else None)

    def _reach(self, task: Task, owner: int | None) -> None:
        """Let a rank arrive at a task that starts a transfer."""
        if (task, owner) not in self.transfers:
            self.transfers[task, owner] = _Transfer(task.seconds, task=task, owner=owner)
        transfer = self.transfers[task, owner]
        transfer.arrived += 1
        if owner is not None or transfer.arrived == len(self.ranks):
            lane = self._lanes.setdefault((task.lane, owner), deque())
            lane.append(transfer)
            if len(lane) == 1:
                transfer.start(self.now)

    def _advance(self) -> bool:
        """Go to the next event; False when all is done."""
        running = [lane[0] for lane in self._lanes.values() if lane]
        computing = {rank: rank.work for _, rank, _ in self._streams if rank.work is not None}
        if not running and not computing:
            return False
        if self.contention:
            self._share(running, computing.values())
        self.now = min(work.end for work in (*running, *computing.values()))
        for rank, work in computing.items():
            if work.end <= self.now:
                rank.busy += work.taken
                rank.work = None
        for transfer in running:
            if transfer.end <= self.now:
                transfer.done = True
                lane = self._lanes[transfer.task.lane, transfer.owner]
                lane.popleft()
                if lane:
                    lane[0].start(self.now)
        return True

    def _share(self, running: Sequence[_Transfer], computing: Iterable[_Work]) -> None:
        """Give each transfer its part of the level that most others use too, and compute what collectives leave it."""
        used = Counter(level for transfer in running for level in transfer.task.levels)
        for transfer in running:
            transfer.set_speed(self.now, 1.0 / max((used[level] for level in transfer.task.levels), default=1))
        collectives = any(transfer.owner is None for transfer in running)
        for work in computing:
            work.set_speed(self.now, 1.0 - self.interference if collectives else 1.0)
