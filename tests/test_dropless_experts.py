"""Experts that drop no token: sizes of all-to-alls that depend on values, and products in groups (``_grouped_mm``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dropless import Experts, MoE
from facts import Facts
from reference import check_close, gradients_of, parameters_of
from test_parameter_meshes import WIDTH, meshes, ours, rank, tokens, train

import graph_fsdp
from graph_fsdp.passes.analysis.kernels import node_flops, packet

COUNT = 4
FACTS = Facts(__name__)


def model_of(layers: int = 2, *, grouped: bool = False) -> MoE:
    torch.manual_seed(0)
    return MoE(COUNT, WIDTH, layers, grouped=grouped)


def collectives(model: MoE) -> list[str]:
    """All collectives of forward and backward in order, ours and the model's own."""
    report = graph_fsdp.inspect(model)
    nodes = [node for view in (report.forward, report.backward) for node in view.graph.fx_graph.nodes]
    found = [node for node in nodes if "c10d" in str(node.target) or node.meta.get("fsdp") is not None]
    return [f"{node.target} {getattr(node.meta.get('fsdp'), 'bucket', '')}" for node in found]


# Products in groups


@pytest.fixture(scope="module")
def grouped() -> Any:
    return train(model_of(grouped=True), 3)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_products_in_groups_are_those_of_the_model(grouped: Any, backend: str) -> None:
    model = graph_fsdp.compile(model_of(grouped=True), backend=backend)
    found = train(model, 3)
    for kind, values in grouped.items():
        for name, value in values.items():  # Inductor may sum in another order what is then rounded to bfloat16
            tolerance = 0.0 if backend == "eager" else 1e-2
            torch.testing.assert_close(found[kind][name], value, rtol=0.0, atol=tolerance, msg=f"{kind} of {name}")
    report = graph_fsdp.inspect(model)
    products = {
        view.phase: [n for n in view.graph.fx_graph.nodes if packet(n) is torch.ops.aten._grouped_mm]
        for view in (report.forward, report.backward)
    }
    each = 2 * tokens(0).shape[0] * WIDTH * 2 * WIDTH
    assert {phase: [node_flops(n) for n in nodes] for phase, nodes in products.items()} == {
        "forward": [each] * 4,
        "backward": [each] * 8,
    }


# Numbers of tokens that depend on values


def check_trained(sizes: tuple[int, int], layers: int = 2, steps: int = 5, **options: Any) -> MoE:
    """Compare with one process, and see that all steps and ranks ran the same collectives in the same order."""
    mesh, own = meshes(*sizes)
    model = ours(model_of(layers).distribute(own["ep"]), mesh, {Experts: own["efsdp"]}, **options)
    found, expected = train(model, steps, rank=rank(), ranks=4), train(model_of(layers), steps)
    for kind, value in found.items():
        check_close(value, expected[kind], 1e-6, kind)
    last = found["gradients"]["layers.0.experts.w1"][-1]
    assert last.shape == (WIDTH, 2 * WIDTH) and not last.any(), "an expert without tokens has zero gradients"
    assert len(graph_fsdp.inspect(model).graphs) == 1, "one graph, however many tokens experts get"
    orders: list[Any] = [None] * 4
    dist.all_gather_object(orders, collectives(model))
    assert orders.count(orders[0]) == 4 and sum("all_to_all" in line for line in orders[0]) == layers * (3 + 2)
    return model


@FACTS
def pairs_of_ranks_exchange_as_many_tokens_as_there_are() -> None:
    check_trained((2, 2))


@FACTS
def a_rank_whose_expert_gets_no_token_takes_part() -> None:
    model = check_trained((1, 4), layers=1)
    print(graph_fsdp.inspect(model))  # sizes are predicted without values


@FACTS.long
def sizes_of_exchanges_go_with_inductor() -> None:
    check_trained((2, 2), layers=1, backend="inductor")


@FACTS.long
def checkpointed_experts_compute_again_and_exchange_once() -> None:
    mesh, own = meshes(2, 2)
    options = {"activation_checkpointing": "unit"}
    model = ours(model_of().distribute(own["ep"]), mesh, {Experts: own["efsdp"]}, **options)
    found, expected = train(model, 3, rank=rank(), ranks=4), train(model_of(), 3)
    for kind, value in found.items():
        check_close(value, expected[kind], 1e-6, kind)
    backward = [n.target for n in graph_fsdp.inspect(model).backward.graph.fx_graph.nodes]
    assert backward.count(torch.ops._c10d_functional.all_to_all_single.default) == 2 * 2
    assert backward.count(torch.ops.aten.relu.default) == 2 * (COUNT // 2)


@FACTS.long
def kept_gradients_go_with_sizes_of_exchanges() -> None:
    mesh, own = meshes(2, 2)
    model = ours(model_of(1).distribute(own["ep"]), mesh, {Experts: own["efsdp"]})
    one = model_of(1)
    with model.no_sync():
        model(tokens(0, rank(), 4)).square().mean().backward()
    model(tokens(1, rank(), 4)).square().mean().backward()
    for step in range(2):
        one(tokens(step)).square().mean().backward()
    check_close(gradients_of(model), gradients_of(one), 1e-6, "gradients")
    assert parameters_of(model).keys() == parameters_of(one).keys()


test_on_four_ranks = FACTS.on(4)
