"""The least time of a step, whatever the schedule, by what its kernels and collectives depend on.

Each graph of a step has one stream that computes and one link, and forward ends before backward begins. Kernels and
collectives are those of the graphs: a schedule that gathers other buckets has another floor.

- **Forward**: a gather, and behind it all that reads what it gives, for each gather; and all gathers in a row, behind
  the last of which something is computed: at least what the gather needs that has least behind it.
- **Backward**: a reduction starts when its gradients are there, which need kernels of their own and kernels that others
  need too. Where those that others need are left to the reduction that has most of them before it, kernels and
  reductions are jobs of two machines, which Johnson's order (1954) does soonest; gathers are jobs that compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch import fx

from graph_fsdp.passes import Graph
from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.ir import dialect

Job = tuple[float, float]  # seconds of compute, then of the link


def forward_floor(graph: Graph, cost: CostModel) -> float:
    """Return the least seconds of a forward graph."""
    seconds = cost.graph_seconds(graph)
    gathers = {start: cost.collective_seconds(start) for start in graph.starts}
    behind = {start: sum(map(seconds.__getitem__, _reached(start, graph.nodes))) for start in gathers}
    alone = max((gathers[start] + behind[start] for start in gathers), default=0.0)
    return max(alone, sum(gathers.values()) + min(behind.values(), default=0.0), sum(seconds.values()))


def backward_floor(graph: Graph, cost: CostModel) -> float:
    """Return the least seconds of a backward graph."""
    seconds, backwards = cost.graph_seconds(graph), graph.nodes[::-1]
    link = {start: cost.collective_seconds(start) for start in graph.starts}
    reductions = [start for start in link if start.target is not dialect.all_gather_start]
    needed = {start: {start, *_needed(start, backwards)} for start in reductions}
    total = {start: sum(map(seconds.__getitem__, nodes)) for start, nodes in needed.items()}
    last = max(total, key=total.__getitem__, default=None)
    jobs = [(0.0, link[start]) for start in link if start not in needed]
    for start, nodes in needed.items():
        others = set().union(*(needed[other] for other in reductions if other is not start))
        own = sum(seconds[node] for node in nodes if start is last or node not in others)
        jobs.append((own, link[start]))
    jobs.append((max(0.0, sum(seconds.values()) - sum(compute for compute, _ in jobs)), 0.0))
    return johnson(jobs)


def johnson(jobs: Iterable[Job]) -> float:
    """Return the least seconds in which all jobs compute, one after the other, and then use the link likewise."""
    given = list(jobs)
    first = sorted((job for job in given if job[0] < job[1]), key=lambda job: job[0])
    then = sorted((job for job in given if job[0] >= job[1]), key=lambda job: -job[1])
    end = 0.0
    ordered = [*first, *then]
    for computed, (_, link) in zip(accumulate(compute for compute, _ in ordered), ordered, strict=True):
        end = max(end, computed) + link
    return end


def _reached(start: fx.Node, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return all that reads what a node gives, at any distance."""
    found = {start}
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found - {start}


def _needed(start: fx.Node, backwards: Sequence[fx.Node]) -> set[fx.Node]:
    """Return all that a node needs, at any distance."""
    found = set(start.all_input_nodes)
    for node in backwards:
        if node in found:
            found.update(node.all_input_nodes)
    return found
