"""What was measured takes the place of what the cost model computes."""

from __future__ import annotations

import json

import pytest
from test_cost import aten, calls, model, seconds, starts, tensor, trace

from graph_fsdp.passes import (
    Measurements,
)
from graph_fsdp.passes.analysis.cost import collective_key, op_key


def test_what_was_measured_counts_and_scales_the_rest() -> None:
    graph = trace(lambda x, w: (x @ w).relu(), tensor(64, 64), tensor(64, 64))
    (matmul,), (relu,) = calls(graph, aten.mm.default), calls(graph, aten.relu.default)
    key = op_key(matmul)
    assert key == "aten.mm.default(bfloat16[64, 64], bfloat16[64, 64]) -> bfloat16[64, 64]"
    modelled = model().graph_seconds(graph)
    measured = model(measured=Measurements({key: 0.25}, scale=3.0)).graph_seconds(graph)
    assert measured[matmul] == 0.25 and measured[relu] == pytest.approx(3 * modelled[relu])


def test_pointwise_measurements_count_only_where_nothing_fuses() -> None:
    graph = trace(lambda x: x.relu().exp(), tensor(64))
    measured = Measurements({op_key(node): 0.25 for node in graph.nodes if node.op == "call_function"})
    assert seconds(graph, measured=measured, fused=False) == 0.5
    assert seconds(graph, measured=measured) == seconds(graph) < 0.1


def test_measured_collectives_count() -> None:
    gather, scatter, _ = starts()
    cost = model(measured=Measurements(collectives={collective_key(gather): 0.5}))
    assert cost.collective_seconds(gather) == 0.5
    assert cost.collective_seconds(scatter) == model().collective_seconds(scatter)


def test_measurements_survive_json_and_nothing_else_is_taken_for_them() -> None:
    measured = Measurements({"op": 0.1}, {"gather": 0.2}, 1.5)
    assert Measurements.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    with pytest.raises(
        ValueError, match=r"measurements: must be a dict of compute, collectives and scale, got \['ops'"
    ):
        Measurements.from_json({"ops": {}})
    with pytest.raises(ValueError, match="scale must be above 0, got 0"):
        Measurements(scale=0)
