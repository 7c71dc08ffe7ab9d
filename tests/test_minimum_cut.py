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
from graph_fsdp.compat import minimum_cut


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
    nodes = ["source", *range(draw.randint(1, 12)), "sink"]
    graph = networkx.DiGraph()
    graph.add_nodes_from(nodes)
    endless = draw.choice((0.0, 0.1, 0.4))
    for _ in range(draw.randint(0, 4 * len(nodes))):
        begin, end = draw.sample(nodes, 2)  # also out of the sink, and into the source
        graph.add_edge(begin, end, capacity=math.inf if draw.random() < endless else draw.randint(0, 5))
    try:
        expected = networkx.minimum_cut(graph, "source", "sink")
    except networkx.NetworkXUnbounded:
        with pytest.raises(networkx.NetworkXUnbounded):
            minimum_cut.minimum_cut(graph, "source", "sink")
    else:
        assert minimum_cut.minimum_cut(graph, "source", "sink") == expected
