"""Find the minimum cut that torch's partitioner asks networkx for, on the part of the graph that it may divide."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx

ENOUGH = 500  # nodes

_Adjacency = Mapping[Any, Mapping[Any, Mapping[str, Any]]]


def minimum_cut(graph: Any, source: Any, sink: Any) -> tuple[Any, tuple[set[Any], set[Any]]]:
    """Return what ``networkx.minimum_cut(graph, source, sink)`` returns, in a part of the time and memory.

    No finite cut divides an edge of infinite capacity: what the source reaches over such edges is its own, and what
    reaches the sink over them is the sink's. In a joint graph that is most of it. The rest falls into pieces of a few
    nodes, which are equal from layer to layer: one of equal pieces is cut, some pieces at a time, by Boykov and
    Kolmogorov's algorithm (PAMI 26, 2004) instead of preflow-push. The cut is the same one: networkx returns the nodes
    from which the sink can be reached in what is left of the capacities, which are the same for every maximum flow, and
    the sink can be reached from none that the source reaches.
    """
    following_of = dict(graph.adjacency())  # plain dicts, where ``adj`` is a view with a view for each node
    of_source = _reached(following_of, source)
    of_sink = _reached(dict(graph.reverse(copy=False).adjacency()), sink)
    if not of_source.isdisjoint(of_sink):
        raise networkx.NetworkXUnbounded("Infinite capacity path, flow unbounded above.")
    rest: dict[Any, _Free] = {}
    value = 0
    for node, following in following_of.items():
        if node in of_sink:  # nothing of a flow comes back from the sink
            continue
        for other, edge in following.items():
            if other in of_source:
                continue
            if node in of_source and other in of_sink:
                value += edge["capacity"]
            elif node in of_source:
                rest.setdefault(other, _Free()).given += edge["capacity"]
            elif other in of_sink:
                rest.setdefault(node, _Free()).taken += edge["capacity"]
            else:
                rest.setdefault(node, _Free()).edges[other] = edge["capacity"]
                rest.setdefault(other, _Free()).before.append(node)
    pieces: dict[Hashable, list[list[Any]]] = {}  # equal ones together
    for piece in _pieces(rest):
        place = {node: index for index, node in enumerate(piece)}
        edges = (tuple((place[other], capacity) for other, capacity in rest[node].edges.items()) for node in piece)
        form = tuple((rest[node].given, rest[node].taken, of_node) for node, of_node in zip(piece, edges, strict=True))
        pieces.setdefault(form, []).append(piece)
    reaching = _cut(rest, [equal[0] for equal in pieces.values()])
    non_reachable = set(of_sink)
    for first, *others in pieces.values():
        places = [index for index, node in enumerate(first) if node in reaching]
        reaching.update(other[index] for other in others for index in places)
    for node, free in rest.items():
        if node in reaching:
            value += free.given
        else:
            value += free.taken + sum(capacity for other, capacity in free.edges.items() if other in reaching)
    non_reachable |= reaching
    return value, (set(graph) - non_reachable, non_reachable)


class Network(networkx.DiGraph):  # type: ignore[misc]
    """Adds edges to networkx's graph, and reads them, without its caches and views."""

    def add_edge(self, begin: Any, end: Any, **about: Any) -> None:
        for node in (begin, end):
            if node not in self._node:
                self._node[node], self._succ[node], self._pred[node] = {}, {}, {}
        following = self._succ[begin]
        if end in following:
            following[end].update(about)
        else:
            following[end] = self._pred[end][begin] = about

    def __getitem__(self, node: Any) -> Any:
        return self._succ[node]


@dataclass(slots=True)
class _Free:
    """Describes a node that is neither the source's nor the sink's: the capacity from the source, to the sink, and to
    each other such node; and which of these have an edge to it."""

    given: Any = 0
    taken: Any = 0
    edges: dict[Any, Any] = field(default_factory=dict)
    before: list[Any] = field(default_factory=list)


def _pieces(rest: Mapping[Any, _Free]) -> Iterator[list[Any]]:
    """Divide nodes into lists that nothing connects; those of equal pieces in the same order."""
    seen: set[Any] = set()
    for start in rest:
        if start in seen:
            continue
        seen.add(start)
        piece = [start]
        for node in piece:  # which grows
            new = [other for other in (*rest[node].edges, *rest[node].before) if other not in seen]
            seen.update(new)
            piece += dict.fromkeys(new)
        yield piece


def _cut(rest: Mapping[Any, _Free], pieces: Iterable[list[Any]]) -> set[Any]:
    """Return the nodes of pieces that are on the sink's side of the minimum cut. Many pieces are cut at once, since a
    cut takes time to begin, and few enough that many take as long for each."""
    found: set[Any] = set()
    together: list[Any] = []
    flow = networkx.algorithms.flow.boykov_kolmogorov
    for piece in (*pieces, None):
        together += piece or ()
        if not together or (piece is not None and len(together) < ENOUGH):
            continue
        part, source, sink = networkx.DiGraph(), object(), object()
        part.add_nodes_from((source, sink))
        part.add_edges_from((n, other, {"capacity": c}) for n in together for other, c in rest[n].edges.items())
        part.add_edges_from((source, n, {"capacity": rest[n].given}) for n in together)
        part.add_edges_from((n, sink, {"capacity": rest[n].taken}) for n in together)
        _, (_, reaching) = networkx.algorithms.flow.minimum_cut(part, source, sink, flow_func=flow)
        found |= reaching - {sink}
        together = []
    return found


def _reached(adjacency: _Adjacency, start: Any) -> set[Any]:
    """Return what is reached over edges of infinite capacity."""
    found, stack = {start}, [start]
    while stack:
        edges: Iterable[tuple[Any, Mapping[str, Any]]] = adjacency[stack.pop()].items()
        new = [node for node, edge in edges if edge["capacity"] == math.inf and node not in found]
        found.update(new)
        stack += new
    return found
