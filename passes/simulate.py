"""The cost model's clock: a scheduled graph on one compute lane and one communication lane per process group.

Compute runs in graph order. A collective starts when it is reached and its group's lane is free, lanes run in order
(a process group has one stream), and a wait holds compute up until its collective has ended. Copies between the CPU
and the device have a lane for each direction. Linear in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes import dialect
from graph_fsdp.passes.cost import CostModel
from graph_fsdp.passes.graph import Graph


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
    """All in seconds. ``communication`` is the load of the busiest lane, ``exposed`` the time in which nothing is
    computed. ``starts``: when compute reaches each node of the graph."""

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


def simulate(graph: Graph, cost: CostModel) -> Timeline:
    compute_seconds = cost.graph_seconds(graph)
    now = compute = 0.0
    free: dict[str, float] = {}  # when each lane is free
    load: dict[str, float] = {}
    ends: dict[fx.Node, tuple[str, float, float]] = {}
    waited: dict[fx.Node, float] = {}
    starts: dict[fx.Node, float] = {}
    for node in graph.fx_graph.nodes:
        starts[node] = now
        if node.target in dialect.STARTS or node.target in dialect.COPY_STARTS:
            group, seconds = _lane(node, cost)
            begin = max(now, free.get(group, 0.0))
            free[group] = begin + seconds
            load[group] = load.get(group, 0.0) + seconds
            ends[node] = (group, begin, begin + seconds)
        elif node.target in dialect.WAITS or node.target in dialect.COPY_WAITS:
            started = node.args[0]
            assert isinstance(started, fx.Node)
            waited[started] = max(0.0, ends[started][2] - now)
            now += waited[started]
        else:
            now += compute_seconds[node]
            compute += compute_seconds[node]
    total = max([now, *free.values()])
    events = [Event(n, group, begin, end, waited.get(n, 0.0)) for n, (group, begin, end) in ends.items()]
    return Timeline(total, compute, max(load.values(), default=0.0), total - compute, events, starts)


def _lane(start: fx.Node, cost: CostModel) -> tuple[str, float]:
    """The lane that a start runs on, and its seconds there."""
    if start.target in dialect.STARTS:
        return dialect.group_of(start), cost.collective_seconds(start)
    lane = "fetch" if start.target is dialect.fetch_start else "offload"
    return lane, cost.transfer_seconds(start.meta["fsdp"].nbytes)
