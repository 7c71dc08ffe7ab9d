"""Newer methods of FSDP2 on reductions: the bound on those under way, a process group of their own, and those that are
refused with a reason."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from models import MLP
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp import UnsupportedError, compat
from graph_fsdp.passes import GraphPass, Link, default_pipeline, find_hardware
from graph_fsdp.passes.analysis.simulate import Conditions, simulate
from graph_fsdp.passes.ir import dialect
from graph_fsdp.report.report import GraphView

pytestmark = pytest.mark.usefixtures("fake_group")


def compiled(**options: Any) -> Any:
    return graph_fsdp.compile(MLP(depth=3), backend="eager", reshard_after_forward=False, **options)


def backward_of(model: nn.Module) -> Any:
    model(torch.randn(4, 16)).sum().backward()
    return graph_fsdp.inspect(model).backward


def most_under_way(model: nn.Module) -> int:
    """Reductions started and not waited for, at most."""
    now = most = 0
    for line in backward_of(model).stages["free"].body.splitlines():
        now += ("reduce_scatter_start" in line) - ("reduce_wait" in line)
        most = max(most, now)
    return most


def test_the_bound_on_reductions_is_that_of_the_graphs_captured_from_then_on() -> None:
    model = compiled()
    assert most_under_way(model) == 2, "the pipeline's"
    for bound in (1, 3):
        model.set_reduce_scatter_max_input_buffers(bound)
        assert most_under_way(model) == bound
    rows = [row for row in backward_of(model).table().splitlines() if "kept" not in row]
    assert_expected_inline(
        "\n".join(rows),
        """\
  bucket    kind    params  bytes  start  wait  first use  free
  root      reduce       2     68     34   106        107     -
  blocks.2  reduce       4    536     60   111        112     -
  blocks.1  reduce       4    536     86   118        119     -
  blocks.0  reduce       4    536    110   125        126     -""",
    )


def test_it_goes_before_what_the_pipeline_says() -> None:
    model = compiled(passes=default_pipeline(reductions_in_flight=3))
    assert most_under_way(model) == 3
    model.set_reduce_scatter_max_input_buffers(1)
    assert most_under_way(model) == 1


class Late(GraphPass):
    name, requires, provides = "late", {"bucketed"}, {"scheduled"}

    def run(self, graph: Any, context: Any) -> None:
        context.plan.keep(graph)


@pytest.mark.parametrize("bound", [0, -1, True, 1.5, "2"])
def test_a_bound_is_a_positive_number(bound: Any) -> None:
    kind = ValueError if type(bound) is int else TypeError
    with pytest.raises(kind, match="max_input_buffers must be a whole number, 1 or more"):
        compiled().set_reduce_scatter_max_input_buffers(bound)


def test_the_bound_is_of_the_model_and_of_the_pass_that_schedules() -> None:
    model = compiled()
    for call in (
        lambda: model.blocks[0].set_reduce_scatter_max_input_buffers(1),
        lambda: model.set_reduce_scatter_max_input_buffers(1, recurse=False),
    ):
        with pytest.raises(UnsupportedError, match="call it on the model"):
            call()
    model = compiled(passes=default_pipeline().replace("prefetch", Late()))
    with pytest.raises(UnsupportedError, match="this model's pipeline schedules with another"):
        model.set_reduce_scatter_max_input_buffers(1)


def groups_of(report: GraphView, operator: str) -> set[str]:
    nodes = report.stages["free"].graph.nodes
    return {dialect.group_of(node) for node in nodes if node.op == "call_function" and operator in str(node.target)}


def test_reductions_have_a_process_group_of_their_own() -> None:
    model = graph_fsdp.compile(MLP(depth=3), backend="eager", reshard_after_forward=True)
    both = backward_of(model)
    assert groups_of(both, "reduce_scatter_start") == groups_of(both, "all_gather_start") == {"0"}
    text = both.stages["free"].body
    model.set_separate_reduce_scatter_group()
    apart = backward_of(model)
    (group,) = groups_of(apart, "reduce_scatter_start")
    assert group != "0" and groups_of(apart, "all_gather_start") == {"0"}
    assert dist.get_process_group_ranks(compat.resolve_group(group)) == list(range(8))
    assert apart.stages["free"].body.replace(f"'{group}'", "'0'") == text, "nothing else is different"
    model.set_separate_reduce_scatter_group(False)
    backward_of(model)
    assert len(graph_fsdp.inspect(model).graphs) == 2, "the first graphs run again"


def test_gathers_do_not_wait_for_reductions_of_another_group() -> None:
    """On a link so slow that communication is all there is."""
    slow = dataclasses.replace(find_hardware("h100"), intra=Link(1e6, 1e-6))
    passes = default_pipeline(hardware=slow)
    seconds, shared = [], []
    for own in (False, True):
        model = graph_fsdp.compile(MLP(depth=3), backend="eager", reshard_after_forward=True, passes=passes)
        model.set_separate_reduce_scatter_group(own)
        backward = backward_of(model)
        seconds.append(backward.timeline.seconds)
        shared.append(simulate(backward.graph, backward.graph.cost, Conditions(contention=True)).seconds)
        lanes = {event.group for event in backward.timeline.events}
        assert len(lanes) == 1 + own
    assert seconds[1] < 0.8 * seconds[0]
    assert shared[1] == pytest.approx(shared[0], rel=0.05), "they share what there is of the link"


def test_all_reductions_of_the_model_are_in_one_group() -> None:
    model = compiled()
    for call in (
        lambda: model.blocks[0].set_separate_reduce_scatter_group(True),
        lambda: model.set_separate_reduce_scatter_group(True, recurse=False),
    ):
        with pytest.raises(UnsupportedError, match="call it on the model"):
            call()
    with pytest.raises(ValueError, match="must be True or False"):
        model.set_separate_reduce_scatter_group(1)
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("replicate",))
    replicated: Any = graph_fsdp.compile(MLP(), mesh, backend="eager")
    with pytest.raises(UnsupportedError, match="every rank holds all parameters whole"):
        replicated.set_separate_reduce_scatter_group(True)


def test_ranks_that_use_other_parameters_are_refused_and_turning_it_off_is_no_error() -> None:
    model = compiled()
    with pytest.raises(UnsupportedError, match="on every rank"):
        model.set_reduce_scatter_unused_params(True)
    model.set_reduce_scatter_unused_params(False)
    with pytest.raises(ValueError, match="must be True or False"):
        model.set_reduce_scatter_unused_params(1)


def test_a_backward_that_is_not_the_last_waits_for_its_reductions_too() -> None:
    model = compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_is_last_backward(True)
    before = backward_of(model).stages["free"].body
    with pytest.warns(UserWarning, match="every backward waits for its reductions"):
        model.set_is_last_backward(False)
    assert backward_of(model).stages["free"].body == before
    assert before.count("reduce_scatter_start") == before.count("reduce_wait")
