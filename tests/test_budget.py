"""A budget of gathered bytes: gathers start later to keep to it, and what cannot fit is an error before it runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP

import graph_fsdp
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import GraphReport, GraphView

pytestmark = pytest.mark.usefixtures("fake_group")

BLOCK, ROOT = 5120, 1024  # bytes of the gathered buckets of the MLP on 8 ranks


def report_of(budget: int | None, prefetch: int = 2) -> GraphReport:
    passes = default_pipeline(prefetch=prefetch, budget=budget)
    model = graph_fsdp.compile(MLP(depth=3), backend="eager", passes=passes, reshard_after_forward=True)
    model(torch.randn(4, 16)).sum().backward()
    return graph_fsdp.inspect(model)


def schedule(view: GraphView) -> str:
    lines = [line.strip() for line in str(view.program).splitlines()]
    return "\n".join(re.sub(r"\(plan.*", "", line) for line in lines if "gather_start" in line or "frame.free" in line)


def test_without_a_budget_two_buckets_are_gathered_ahead() -> None:
    report = report_of(None)
    assert report.peak_gathered_bytes == 3 * BLOCK
    assert_expected_inline(
        schedule(report.forward),
        """\
gather_blocks_0 = frame.gather_start
gather_blocks_1 = frame.gather_start
gather_blocks_2 = frame.gather_start
frame.free(full_blocks_0)
gather_root = frame.gather_start
frame.free(full_blocks_1)
frame.free(full_blocks_2)
frame.free(full_root)""",
    )


def test_a_budget_of_two_blocks_delays_the_third_gather() -> None:
    report = report_of(2 * BLOCK)
    assert report.peak_gathered_bytes == 2 * BLOCK
    assert_expected_inline(
        schedule(report.forward),
        """\
gather_blocks_0 = frame.gather_start
gather_blocks_1 = frame.gather_start
frame.free(full_blocks_0)
gather_blocks_2 = frame.gather_start
frame.free(full_blocks_1)
gather_root = frame.gather_start
frame.free(full_blocks_2)
frame.free(full_root)""",
    )


def test_a_budget_of_one_block_makes_the_schedule_serial() -> None:
    report = report_of(BLOCK)
    assert report.peak_gathered_bytes == BLOCK
    assert schedule(report.forward) == schedule(report_of(None, prefetch=0).forward)


def test_a_budget_too_small_for_a_unit_names_it_and_the_bytes_it_needs() -> None:
    with pytest.raises(graph_fsdp.BudgetError, match=r"too small for unit 'blocks.0' .*5,120 bytes"):
        report_of(BLOCK - 1)


def test_what_forward_keeps_counts_in_backward() -> None:
    passes = default_pipeline(prefetch=1, budget=BLOCK + ROOT)
    model = graph_fsdp.compile(MLP(depth=3), backend="eager", passes=passes)
    model(torch.randn(4, 16)).sum().backward()
    assert graph_fsdp.inspect(model).peak_gathered_bytes == BLOCK + ROOT


def test_a_pass_that_exceeds_the_budget_is_rejected() -> None:
    class TooEarly(graph_fsdp.passes.GraphPass):
        name = "too_early"
        requires = ("scheduled",)

        def run(self, graph: graph_fsdp.passes.Graph, context: graph_fsdp.passes.PassContext) -> None:
            for start in reversed(graph.with_role(graph_fsdp.passes.Role.GATHER_START)):
                graph.placeholders[-1].append(start)

    passes = default_pipeline(budget=2 * BLOCK).insert_after("prefetch", TooEarly())
    model = graph_fsdp.compile(MLP(depth=3), backend="eager", passes=passes)
    with pytest.raises(graph_fsdp.VerificationError, match=r"'too_early' .*15,360 bytes are gathered at once"):
        model(torch.randn(4, 16))


def test_a_users_schedule_is_held_to_the_budget_of_the_pipeline() -> None:
    class AllAtOnce(graph_fsdp.passes.GraphPass):
        name, requires, provides = "all_at_once", {"bucketed"}, {"scheduled"}

        def run(self, graph: graph_fsdp.passes.Graph, context: graph_fsdp.passes.PassContext) -> None:
            assert context.budget == 2 * BLOCK
            for gather in reversed(graph.gathers):
                graph.placeholders[-1].append(gather.start)

    passes = default_pipeline(budget=2 * BLOCK).replace("prefetch", AllAtOnce())
    model = graph_fsdp.compile(MLP(depth=3), backend="eager", passes=passes)
    with pytest.raises(graph_fsdp.VerificationError, match=r"'all_at_once' .*15,360 bytes are gathered at once"):
        model(torch.randn(4, 16))


@pytest.mark.parametrize("budget", [0, -1, 1.5, float("nan"), True, "1GB"])
def test_a_budget_that_is_no_positive_number_of_bytes_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match=f"budget must be a positive number of bytes or None, got {budget!r}"):
        default_pipeline(budget=budget)


@pytest.mark.parametrize("number", [0, 1.5, True, "2"])
def test_a_number_of_reductions_in_flight_that_is_no_count_is_refused(number: Any) -> None:
    with pytest.raises(ValueError, match=f"reductions_in_flight must be 1 or more, got {number!r}"):
        default_pipeline(reductions_in_flight=number)


class Scale(torch.nn.Module):
    """One pointwise operator, and the last use of its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_a_wait_does_not_move_up_over_the_last_use_that_the_budget_waits_for() -> None:
    unit = 128 * 4
    for budget in (unit, 2 * unit, 3 * unit):
        model = torch.nn.Sequential(*(Scale() for _ in range(5)))
        passes = default_pipeline(prefetch=2, budget=budget)
        graph_fsdp.compile(model, backend="eager", passes=passes, auto_wrap_policy={Scale})
        with torch.no_grad():
            model(torch.randn(4, 128))
        assert graph_fsdp.inspect(model).peak_gathered_bytes == budget
