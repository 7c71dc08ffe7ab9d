"""The minimum cut that torch's partitioner asks networkx for, found on the part of the graph that it may divide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import networkx

ENOUGH = 500  # nodes

_Adjacency = Mapping[Any, Mapping[Any, Mapping[str, Any]]]


def minimum_cut(graph: Any, source: Any, sink: Any) -> tuple[Any, tuple[set[Any], set[Any]]]:
    """Return what ``networkx.minimum_cut(graph, source, sink)`` returns, in a part of the time and memory.

    No finite cut divides an edge of infinite capacity: what the source reaches over such edges is its own, and what
    reaches the sink over them is the sink's. In a joint graph that is most of it. The rest falls into pieces of a few
    nodes. Some of these are cut at a time, so that many layers take as long for each as few, by Boykov and Kolmogorov's
    algorithm (PAMI 26, 2004) instead of preflow-push. The cut is the same one: networkx returns the nodes from which
    the sink can be reached in what is left of the capacities, which are the same for every maximum flow, and the sink
    can be reached from none that the source reaches.
    """
    of_source, of_sink = _reached(graph.succ, source), _reached(graph.pred, sink)
    if not of_source.isdisjoint(of_sink):
        raise networkx.NetworkXUnbounded("Infinite capacity path, flow unbounded above.")
    rest = networkx.DiGraph()  # of nodes that are neither's
    given: dict[Any, Any] = {}  # capacity from the source
    taken: dict[Any, Any] = {}  # to the sink
    value = 0
    for node, following in graph.adj.items():
        if node in of_sink:  # nothing of a flow comes back from the sink
            continue
        for other, edge in following.items():
            if other in of_source:
                continue
            if node in of_source and other in of_sink:
                value += edge["capacity"]
            elif node in of_source:
                given[other] = given.get(other, 0) + edge["capacity"]
            elif other in of_sink:
                taken[node] = taken.get(node, 0) + edge["capacity"]
            else:
                rest.add_edge(node, other, capacity=edge["capacity"])
    rest.add_nodes_from((*given, *taken))
    non_reachable = set(of_sink)
    flow = networkx.algorithms.flow.boykov_kolmogorov
    for piece in _pieces(rest):
        part = networkx.DiGraph()
        part.add_nodes_from((source, sink))
        part.add_edges_from(edge for node in piece for edge in rest.edges(node, data=True))
        part.add_edges_from((source, node, {"capacity": given[node]}) for node in piece if node in given)
        part.add_edges_from((node, sink, {"capacity": taken[node]}) for node in piece if node in taken)
        divided, (_, reaching) = networkx.algorithms.flow.minimum_cut(part, source, sink, flow_func=flow)
        value += divided
        non_reachable |= reaching
    return value, (set(graph) - non_reachable, non_reachable)


def _pieces(graph: Any) -> Iterator[list[Any]]:
    """Divide a graph into sets of nodes that nothing connects, small ones together, as a cut takes time to begin."""
    piece: list[Any] = []
    for connected in networkx.weakly_connected_components(graph):
        piece += connected
        if len(piece) >= ENOUGH:
            yield piece
            piece = []
    if piece:
        yield piece


def _reached(adjacency: _Adjacency, start: Any) -> set[Any]:
    """Return what is reached over edges of infinite capacity."""
    found, stack = {start}, [start]
    while stack:
        edges: Iterable[tuple[Any, Mapping[str, Any]]] = adjacency[stack.pop()].items()
        new = [node for node, edge in edges if edge["capacity"] == math.inf and node not in found]
        found.update(new)
        stack += new
    return found
