"""The partitioner saves what it would by networkx's own algorithm."""

from __future__ import annotations

from typing import Any

import networkx
import pytest
import torch
from models import GPT
from torch._functorch import partitioners

import graph_fsdp


@pytest.mark.skipif(hasattr(partitioners, "minimum_cut"), reason="this torch has a minimum cut of its own")
@pytest.mark.usefixtures("fake_group")
def test_the_minimum_cut_is_that_of_preflow_push(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    whole = networkx.minimum_cut

    def cut(graph: Any, source: Any, sink: Any, **options: Any) -> Any:
        nonlocal compared
        found = whole(graph, source, sink, **options)
        assert options["flow_func"] is networkx.algorithms.flow.boykov_kolmogorov
        assert found[1] == whole(graph, source, sink)[1]
        compared += 1
        return found

    monkeypatch.setattr(networkx, "minimum_cut", cut)
    model = graph_fsdp.compile(GPT(depth=3), backend="eager")
    model(torch.ones(2, 8, dtype=torch.int64)).sum().backward()
    assert compared == 1
    assert networkx.minimum_cut is cut
