"""Products for gradients of weights that wait for the last reduction: ``delay_wgrad``."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP
from printed import calls, sequence
from test_schedule_options import report_of

import graph_fsdp
from graph_fsdp.passes import Graph, GraphPass, Hardware, Link, PassContext, default_pipeline, find_hardware
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.report.report import GraphView

pytestmark = pytest.mark.usefixtures("fake_group_of_module")


def test_delay_wgrad_computes_products_behind_the_last_reduction() -> None:
    assert_expected_inline(
        calls(report_of(delay_wgrad=1).backward, "reduce_scatter_start", "mm"),
        """\
mm(tangent, head.weight)
mm(tangent, input)
reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8)
mm(mm, blocks.2.down.weight)
mm(mm, input)
mm(gelu_backward, blocks.2.up.weight)
mm(gelu_backward, input)
reduce_blocks_2 = reduce_scatter_start([blocks.2.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
mm(add, blocks.1.down.weight)
mm(gelu_backward, blocks.1.up.weight)
mm(add, blocks.0.down.weight)
mm(add, input)
mm(gelu_backward, input)
reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
mm(add, input)
mm(gelu_backward, input)
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)""",
    )


class Words(torch.nn.Module):
    """An embedding that is most of the model, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(1024, 16)
        self.blocks = MLP(depth=2).blocks

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(words)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("name", "bandwidth", "delayed"),
    [
        ("h100", 2e9, "2 products of blocks.0#2, blocks.0 follow the reduction of root"),
        ("h100", 2e12, ""),
        ("cpu", 2e9, ""),
    ],
)
def test_weight_gradients_are_delayed_where_that_hides_a_reduction(name: str, bandwidth: float, delayed: str) -> None:
    given = {**vars(find_hardware(name)), "name": "given", "intra": Link(bandwidth, 0.0), "collective_launch": 0.0}

    def backward(delayed: int | str) -> GraphView:
        passes = default_pipeline(hardware=Hardware(**given), delay_wgrad=delayed)  # type: ignore[arg-type]
        model = graph_fsdp.compile(Words(), backend="eager", passes=passes)
        model(torch.arange(512).view(32, 16)).sum().backward()
        return graph_fsdp.inspect(model).backward

    found, in_order = backward("auto"), backward(0)
    assert found.stages["delay_wgrad"].summary == (delayed or "none delayed")
    assert (sequence(found) != sequence(in_order)) == bool(delayed)
    assert (found.timeline.seconds < 0.99 * in_order.timeline.seconds) == bool(delayed)


class GivenPlan(GraphPass):
    """Has the ranks decided on ``order`` for the graphs of a phase."""

    name, requires = "given_plan", ("bucketed",)

    def __init__(self, order: list[tuple[str, str]], phase: Phase = "backward") -> None:
        self.order, self.phases = order, (phase,)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        context.plan.collectives[graph.phase] = self.order
        return None


def test_a_rank_that_is_given_a_plan_delays_what_the_plan_says() -> None:
    two = report_of(delay_wgrad=2).backward
    assert two.graph is not None and two.graph.delayed == ["blocks.2", "blocks.1"]
    order = two.graph.collectives
    pipeline = default_pipeline(delay_wgrad=1).insert_before("delay_wgrad", GivenPlan(order))
    model = graph_fsdp.compile(MLP(depth=3), backend="eager", passes=pipeline, reshard_after_forward=True)
    model(torch.randn(4, 16)).sum().backward()
    assert sequence(graph_fsdp.inspect(model).backward) == sequence(two)


def test_a_rank_that_is_given_another_order_of_gathers_starts_them_in_it() -> None:
    own = report_of().forward.graph
    assert own is not None
    order = [own.collectives[1], own.collectives[0], *own.collectives[2:]]
    pipeline = default_pipeline().insert_before("prefetch", GivenPlan(order, "forward"))
    model = graph_fsdp.compile(MLP(depth=3), backend="eager", passes=pipeline, reshard_after_forward=True)
    model(torch.randn(4, 16))
    found = graph_fsdp.inspect(model).forward.graph
    assert found is not None and found.collectives == order
