"""What is predicted of gradients that are quantized on their way: bytes, seconds and memory."""

from __future__ import annotations

import pytest
import torch
from allocations import measure
from models import MLP
from test_quantized_reduction import INT8, backward, batch_of, policy, report_of

import graph_fsdp
from graph_fsdp.passes import HARDWARE
from graph_fsdp.passes.analysis.cost import CostModel, GroupShape, collective_key
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.layout import quantized_nbytes, quantized_sends


def test_half_the_bytes_of_bfloat16_and_scales() -> None:
    build = lambda: MLP(depth=1, width=256)  # noqa: E731
    graphs = {name: report_of(mp, build, 256).backward for name, mp in POLICIES.items()}
    of_bfloat16 = 8 * sum(n.meta["fsdp"].nbytes for n in graphs["bfloat16"].graph.with_role(Role.REDUCE_START))
    sent, plain = quantized_sends(graphs["int8"].graph)
    assert plain == 2 * of_bfloat16
    assert 0.5078 <= sent / of_bfloat16 < 0.5085, "1 byte, and 4 for 256, of 2"
    assert f"gradients sent quantized: {sent:,} bytes instead of {plain:,}" in str(graphs["int8"])
    assert "quantized" not in str(graphs["bfloat16"])


POLICIES = {"int8": policy(INT8), "bfloat16": policy(torch.bfloat16)}


def test_the_cost_model_has_an_all_to_all_of_what_is_sent() -> None:
    graph = report_of(policy(INT8)).backward.graph
    start = graph.with_role(Role.REDUCE_START)[-1]
    numel = start.meta["val"].numel()
    group = start.args[3]
    cost = CostModel(HARDWARE["h100"], {group: GroupShape(8)})
    assert cost.collective_seconds(start) == cost.all_to_all_seconds(8 * quantized_nbytes(numel), group)
    assert collective_key(start).endswith(f"{8 * 4 * numel} bytes float32 sent as int8 of 8 ranks")


@pytest.mark.parametrize(("ranks", "stride", "of_bfloat16"), [(8, 1, 0.51), (8, 8, 0.51), (64, 1, 3.0)])
def test_it_takes_less_time_on_one_island_and_more_between_islands_of_several(
    ranks: int, stride: int, of_bfloat16: float
) -> None:
    numel = 200_000_000
    cost = CostModel(HARDWARE["h100"], {"group": GroupShape(ranks, stride)})
    quantized = cost.all_to_all_seconds(ranks * quantized_nbytes(numel // ranks), "group")
    assert quantized / cost.all_gather_seconds(2 * numel, "group") == pytest.approx(of_bfloat16, rel=0.02)


@pytest.mark.usefixtures("fake_group")
def test_the_memory_of_a_backward_is_predicted() -> None:
    """But for scales and what else a few kernels need, and with the sum, which is allocated when gradients are sent."""
    model = graph_fsdp.compile(MLP(depth=3, width=256), backend="eager", mp_policy=policy(INT8))
    x = batch_of(0, width=256)
    backward(model, model(x).sum())
    predicted = graph_fsdp.inspect(model).backward.memory
    _, measured = measure(lambda: model(x).sum().backward())
    assert predicted is not None and predicted.timeline["reducing"]
    assert measured.peak == pytest.approx(predicted.peak - predicted.total[0], rel=0.05)
