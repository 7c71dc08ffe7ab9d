"""The partitioner saves what it would by networkx's own algorithm."""

from __future__ import annotations

import math
import random
from typing import Any

import networkx
import pytest
import torch
from models import GPT
from torch._functorch import partitioners

import graph_fsdp
from graph_fsdp.compat.traces import minimum_cut


@pytest.mark.skipif(hasattr(partitioners, "minimum_cut"), reason="this torch has a minimum cut of its own")
@pytest.mark.usefixtures("fake_group")
def test_the_minimum_cut_of_a_joint_graph_is_that_of_preflow_push(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    whole, quick = networkx.minimum_cut, minimum_cut.minimum_cut

    def cut(graph: Any, source: Any, sink: Any) -> Any:
        nonlocal compared
        found = quick(graph, source, sink)
        assert found == whole(graph, source, sink)
        compared += 1
        return found

    monkeypatch.setattr(minimum_cut, "minimum_cut", cut)
    model = graph_fsdp.compile(GPT(depth=3), backend="eager")
    model(torch.ones(2, 8, dtype=torch.int64)).sum().backward()
    assert compared == 1
    assert networkx.minimum_cut is whole


@pytest.mark.parametrize("seed", range(200))
def test_the_minimum_cut_of_a_random_graph_is_that_of_preflow_push(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(minimum_cut, "ENOUGH", draw.choice((1, 4, 500)))
    layers = draw.choice((1, 3))
    nodes = ["source", *range(draw.randint(1, 12)), "sink"]
    graph = networkx.DiGraph()
    graph.add_nodes_from(_of_layer(node, layer) for layer in range(layers) for node in nodes)
    endless = draw.choice((0.0, 0.1, 0.4))
    for _ in range(draw.randint(0, 4 * len(nodes))):
        begin, end = draw.sample(nodes, 2)  # also out of the sink, and into the source
        capacity = math.inf if draw.random() < endless else draw.randint(0, 5)
        for layer in range(layers):
            graph.add_edge(_of_layer(begin, layer), _of_layer(end, layer), capacity=capacity)
    if layers > 1 and draw.random() < 0.5:  # two are connected, and so are no longer what the third is
        graph.add_edge(_of_layer(0, 0), _of_layer(0, 1), capacity=draw.randint(0, 5))
    try:
        expected = networkx.minimum_cut(graph, "source", "sink")
    except networkx.NetworkXUnbounded:
        with pytest.raises(networkx.NetworkXUnbounded):
            minimum_cut.minimum_cut(graph, "source", "sink")
    else:
        assert minimum_cut.minimum_cut(graph, "source", "sink") == expected


def test_a_network_is_what_networkx_makes_of_its_edges() -> None:
    made, expected = minimum_cut.Network(), networkx.DiGraph()
    for graph in (made, expected):
        for begin, end, capacity in ((0, 1, 1), (1, 2, 2), (0, 1, 3), (2, 2, 4)):
            graph.add_edge(begin, end, capacity=capacity)
        graph.add_edge(0, 1, reason="of both")
    assert dict(made.adjacency()) == dict(expected.adjacency()) == {n: dict(made[n]) for n in expected}
    assert dict(made.reverse(copy=False).adjacency()) == dict(expected.reverse(copy=False).adjacency())
    assert list(made.nodes(data=True)) == list(expected.nodes(data=True))


def _of_layer(node: Any, layer: int) -> Any:
    return node if isinstance(node, str) else (node, layer)


def test_one_of_equal_pieces_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = networkx.DiGraph()
    for layer in range(50):
        for begin, end in (("source", 0), (0, 1), (0, 2), (2, 1), (1, "sink")):
            capacity = 1 + (end == "sink" and layer == 49)
            graph.add_edge(_of_layer(begin, layer), _of_layer(end, layer), capacity=capacity)
    nodes = []
    quick = networkx.algorithms.flow.minimum_cut
    monkeypatch.setattr(
        networkx.algorithms.flow,
        "minimum_cut",
        lambda part, *given, **how: nodes.append(len(part)) or quick(part, *given, **how),
    )
    assert minimum_cut.minimum_cut(graph, "source", "sink") == networkx.minimum_cut(graph, "source", "sink")
    assert nodes == [2 * 3 + 2]
