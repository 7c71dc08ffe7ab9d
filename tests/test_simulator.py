"""The clock of several ranks: without conditions that of one rank; stragglers and shared links as they are worked out
by hand."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from models import MLP

from graph_fsdp.passes import HARDWARE, CostModel, Graph, Timeline, default_pipeline, simulate
from graph_fsdp.passes.analysis.cost import GroupShape
from graph_fsdp.passes.ir import dialect
from graph_fsdp.planning import Conditions, Traced, run, trace

SLOW_LINK = dataclasses.replace(
    HARDWARE["h100"], name="slow", intra=dataclasses.replace(HARDWARE["h100"].intra, bandwidth=1e9)
)
MESHES = [(8,), (4, 2)]


@functools.cache
def traced(mesh_shape: tuple[int, ...] = (8,)) -> Traced:
    passes = default_pipeline(hardware=SLOW_LINK)
    return trace(
        lambda: MLP(depth=3),
        (torch.empty(4, 16),),
        mesh_shape=mesh_shape,
        loss=torch.sum,
        passes=passes,
        backend="eager",
    )


def cost_of(found: Traced, **changes: object) -> CostModel:
    """The cost model that the graphs were scheduled with, on other hardware."""
    assert found.context.cost is not None
    hardware = dataclasses.replace(found.context.cost.hardware, **changes)  # type: ignore[arg-type]
    return CostModel(hardware, found.context.cost.groups, fused=False)


def events(timeline: Timeline) -> list[tuple[str, float, float, float]]:
    return [(e.group, e.begin, e.end, e.exposed) for e in timeline.events]


def one_rank(graph: Graph, cost: CostModel) -> tuple[float, list[tuple[float, float, float]]]:
    """The clock of a rank that meets nothing, node by node: seconds, and begin, end and exposed time of collectives."""
    seconds = cost.graph_seconds(graph)
    now, free, found = 0.0, {}, {}
    for node in graph.nodes:
        if node.target in dialect.STARTS:
            lane, now = dialect.group_of(node), now + seconds[node]
            begin = max(now, free.get(lane, 0.0))
            free[lane] = begin + cost.collective_seconds(node)
            found[node] = (begin, free[lane], 0.0)
        elif node.target in dialect.WAITS:
            begin, end, _ = found[node.args[0]]
            found[node.args[0]] = (begin, end, max(0.0, end - now))
            now = max(now, end) + seconds[node]
        else:
            now += seconds[node]
    return max([now, *free.values()]), list(found.values())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_without_conditions_it_is_the_clock_of_one_rank(mesh: tuple[int, ...]) -> None:
    found = traced(mesh)
    cost = cost_of(found)
    for graph in (found.forward, found.backward):
        timeline = simulate(graph, cost)
        seconds, collectives = one_rank(graph, cost)
        assert timeline.seconds == seconds and timeline.exposed > 0
        assert [event[1:] for event in events(timeline)] == collectives


def test_conditions_that_disturb_nothing_change_nothing() -> None:
    """One group has its link for itself, and no processors are taken."""
    found = traced()
    cost = cost_of(found, interference=0.0)
    for graph in (found.forward, found.backward):
        assert simulate(graph, cost, Conditions(contention=True)) == simulate(graph, cost)


def test_all_ranks_take_the_time_of_a_straggler_where_compute_decides() -> None:
    found = traced()
    fast = dataclasses.replace(SLOW_LINK.intra, bandwidth=1e15, latency=0.0)
    cost = cost_of(found, intra=fast, collective_launch=0.0)
    for graph in (found.forward, found.backward):
        alone, slowed = run(graph, cost), run(graph, cost, Conditions(straggler=1.5))
        assert slowed.seconds == pytest.approx(1.5 * alone.compute, rel=0.02)
        assert slowed.compute == pytest.approx(alone.compute)  # the rank that keeps up computes as long, and waits
        assert slowed.exposed > 0.45 * alone.compute


def test_a_straggler_costs_nothing_where_communication_decides() -> None:
    found = traced()
    link = dataclasses.replace(SLOW_LINK.intra, bandwidth=1e5)
    cost = cost_of(found, intra=link)
    alone, slowed = (run(found.forward, cost, Conditions(straggler=s)) for s in (1.0, 1.2))
    assert alone.seconds < slowed.seconds < 1.01 * alone.seconds


def two_reductions(seconds: tuple[float, float]) -> tuple[Graph, CostModel]:
    """A graph that starts a collective in each of two groups at once, and waits for both; a cost model in which they
    take so long alone."""
    found = traced((4, 2))
    groups = {found.context.model.mesh.group: GroupShape(2), found.context.model.mesh.replicate_group: GroupShape(4, 2)}
    graph = torch.fx.Graph()
    starts = [n for n in found.backward.fx_graph.nodes if n.target is dialect.reduce_scatter_start][:1]
    starts += [n for n in found.backward.fx_graph.nodes if n.target is dialect.all_reduce_shard_start][:1]
    copies = []
    for start in starts:
        values = {source: graph.placeholder(source.name) for source in start.all_input_nodes}
        for source, copy in values.items():
            copy.meta = dict(source.meta)
        node = graph.node_copy(start, values.__getitem__)
        copies.append(node)
    for node in copies:
        graph.call_function(dialect.reduce_wait, (node,)).meta["val"] = node.meta["val"]
    graph.output(())

    class Fixed(CostModel):
        def collective_seconds(self, node: torch.fx.Node) -> float:
            return seconds[copies.index(node)]

    module = torch.fx.GraphModule({}, graph)
    packs_in_no_time = dataclasses.replace(HARDWARE["h100"], memory_bandwidth=math.inf, launch=0.0)
    return Graph(module, "backward"), Fixed(packs_in_no_time, groups)


def test_groups_that_share_a_link_get_half_of_it_each_while_they_overlap() -> None:
    """3 and 1 seconds alone: each has half until the short one ends at 2; of the long one 2 seconds are left."""
    graph, cost = two_reductions((3.0, 1.0))
    assert [e[1:3] for e in events(simulate(graph, cost))] == [(0.0, 3.0), (0.0, 1.0)]
    shared = run(graph, cost, Conditions(contention=True))
    assert {e[1:3] for e in events(shared)} == {(0.0, 4.0), (0.0, 2.0)}
    assert shared.seconds == 4.0


def test_a_running_collective_takes_processors_from_compute() -> None:
    found = traced()
    slow = dataclasses.replace(SLOW_LINK.intra, bandwidth=1e6)
    with_, without = (cost_of(found, intra=slow, interference=i) for i in (0.25, 0.0))
    timelines = [run(found.backward, cost, Conditions(contention=True)) for cost in (with_, without)]
    assert timelines[0].compute > timelines[1].compute
    assert timelines[0].compute <= timelines[1].compute / 0.75 + 1e-12


@pytest.mark.parametrize("straggler", [0.9, float("nan"), "2", True])
def test_a_straggler_that_cannot_be(straggler: float) -> None:
    with pytest.raises(ValueError, match="straggler: says how many times slower the slowest rank computes"):
        Conditions(straggler=straggler)
