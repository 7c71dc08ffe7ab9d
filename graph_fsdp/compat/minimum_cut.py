"""The minimum cut that torch's partitioner asks networkx for, found on the part of the graph that it may divide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import networkx

_Adjacency = Mapping[Any, Mapping[Any, Mapping[str, Any]]]


def minimum_cut(graph: Any, source: Any, sink: Any) -> tuple[Any, tuple[set[Any], set[Any]]]:
    """Return what ``networkx.minimum_cut(graph, source, sink)`` returns, in a part of the time and memory.

    No finite cut divides an edge of infinite capacity: what the source reaches over such edges is its own, and what
    reaches the sink over them is the sink's. In a joint graph that is most of it. On the rest the algorithm is Boykov
    and Kolmogorov's (PAMI 26, 2004) instead of preflow-push. The cut is the same one: networkx returns the nodes from
    which the sink can be reached in what is left of the capacities, which are the same for every maximum flow, and the
    sink can be reached from none that the source reaches.
    """
    of_source, of_sink = _reached(graph.succ, source), _reached(graph.pred, sink)
    if not of_source.isdisjoint(of_sink):
        raise networkx.NetworkXUnbounded("Infinite capacity path, flow unbounded above.")
    rest = networkx.DiGraph()
    rest.add_nodes_from((source, sink))
    value = 0
    for node, following in graph.adj.items():
        if node in of_sink:  # nothing of a flow comes back from the sink
            continue
        begin = source if node in of_source else node
        for other, edge in following.items():
            if other in of_source:
                continue
            end, capacity = sink if other in of_sink else other, edge["capacity"]
            if begin is source and end is sink:
                value += capacity
            elif rest.has_edge(begin, end):
                rest.succ[begin][end]["capacity"] += capacity
            else:
                rest.add_edge(begin, end, capacity=capacity)
    flow = networkx.algorithms.flow.boykov_kolmogorov
    divided, (_, reaching) = networkx.algorithms.flow.minimum_cut(rest, source, sink, flow_func=flow)
    non_reachable = of_sink | reaching
    return value + divided, (set(graph) - non_reachable, non_reachable)


def _reached(adjacency: _Adjacency, start: Any) -> set[Any]:
    """Return what is reached over edges of infinite capacity."""
    found, stack = {start}, [start]
    while stack:
        edges: Iterable[tuple[Any, Mapping[str, Any]]] = adjacency[stack.pop()].items()
        new = [node for node, edge in edges if edge["capacity"] == math.inf and node not in found]
        found.update(new)
        stack += new
    return found
