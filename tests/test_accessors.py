"""What a pass reads of a graph's buckets: gathers and reductions with the nodes that belong to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import fake_process_group
from expecttest import assert_expected_inline
from models import MLP
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp.passes import Gather, Graph, GraphPass, PassContext, Reduction, default_pipeline


class Describe(GraphPass):
    """Notes what a function says of each graph."""

    def __init__(self, describe: Callable[[Graph], str], name: str = "describe") -> None:
        self.describe, self.name = describe, name
        self.found: dict[str, str] = {}

    def run(self, graph: Graph, context: PassContext) -> None:
        self.found[graph.phase] = self.describe(graph)


def described(describe: Callable[[Graph], str], model: nn.Module | None = None, **options: Any) -> dict[str, str]:
    """Phase → what ``describe`` says of its graph after buffers are freed."""
    look = Describe(describe)
    compiled = graph_fsdp.compile(
        model or MLP(), backend="eager", passes=default_pipeline().insert_after("free", look), **options
    )
    output = compiled(torch.ones(4, 16))
    (output[0] if isinstance(output, tuple) else output).sum().backward()
    return look.found


def names(*nodes: fx.Node | None) -> str:
    return ", ".join("-" if node is None else node.name for node in nodes) or "nothing"


def gather_line(g: Gather) -> str:
    return "\n".join(
        (
            f"{g.bucket} of {g.unit or 'root'}: {', '.join(g.params)}; {g.nbytes} bytes",
            f"  start, wait, buffer, free: {names(g.start, g.wait, g.buffer, g.free)}{'; escapes' * g.escapes}",
            f"  views: {names(*g.views)}",
            f"  uses: {names(*g.uses)}",
        )
    )


def reduction_line(r: Reduction) -> str:
    return "\n".join(
        (
            f"{r.bucket} of {r.unit or 'root'}: {', '.join(r.params)}; {r.nbytes} bytes",
            f"  gradients: {names(*r.gradients)}",
            f"  stages: {names(r.start, r.wait, r.replicate_start, r.replicate_wait)}",
            f"  results: {names(*r.results)}",
        )
    )


def gathers(graph: Graph) -> str:
    return "\n".join(map(gather_line, graph.gathers))


def reductions(graph: Graph) -> str:
    return "\n".join(map(reduction_line, graph.reductions))


@dataclass
class OfMLP:
    """What is said of an MLP's graphs: phase → text."""

    gathers: dict[str, str]
    reductions: dict[str, str]
    bucketed: dict[str, str]  # of gathers, before the free pass


@pytest.fixture(scope="module")
def of_mlp() -> OfMLP:
    looks = [
        Describe(gathers, "gathers"),
        Describe(reductions, "reductions"),
        Describe(lambda g: str([(x.free, len(x.reads), len(x.uses)) for x in g.gathers]), "bucketed"),
    ]
    pipeline = default_pipeline()
    for look, after in zip(looks, ("free", "free", "bucket"), strict=True):
        pipeline = pipeline.insert_after(after, look)
    with fake_process_group():
        model = graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)
        model(torch.ones(4, 16)).sum().backward()
    return OfMLP(*(look.found for look in looks))


def test_gathers_in_forward_are_started_and_freed_or_escape(of_mlp: OfMLP) -> None:
    assert_expected_inline(
        of_mlp.gathers["forward"],
        """\
blocks.0 of blocks.0: blocks.0.up.weight, blocks.0.up.bias, blocks.0.down.weight, blocks.0.down.bias; 5120 bytes
  start, wait, buffer, free: gather_blocks_0, full_blocks_0, full_blocks_0, free_blocks_0
  views: blocks_0_up_weight_1, blocks_0_up_bias, blocks_0_down_weight_1, blocks_0_down_bias
  uses: addmm, addmm_1
blocks.1 of blocks.1: blocks.1.up.weight, blocks.1.up.bias, blocks.1.down.weight, blocks.1.down.bias; 5120 bytes
  start, wait, buffer, free: gather_blocks_1, full_blocks_1, full_blocks_1, free_blocks_1
  views: blocks_1_up_weight_1, blocks_1_up_bias, blocks_1_down_weight_1, blocks_1_down_bias
  uses: addmm_2, addmm_3
root of root: head.weight, head.bias; 1024 bytes
  start, wait, buffer, free: gather_root, full_root, full_root, -; escapes
  views: head_weight_2, head_bias_1
  uses: addmm_4""",
    )


def test_gathers_in_backward_may_be_received_from_forward(of_mlp: OfMLP) -> None:
    assert_expected_inline(
        of_mlp.gathers["backward"],
        """\
root of root: head.weight, head.bias; 1024 bytes
  start, wait, buffer, free: -, -, kept_0, free_root
  views: head_weight_2
  uses: mm
blocks.1 of blocks.1: blocks.1.up.weight, blocks.1.up.bias, blocks.1.down.weight, blocks.1.down.bias; 5120 bytes
  start, wait, buffer, free: gather_blocks_1, full_blocks_1, full_blocks_1, free_blocks_1
  views: blocks_1_down_weight_1, blocks_1_up_weight_1
  uses: mm_2, mm_4
blocks.0 of blocks.0: blocks.0.up.weight, blocks.0.up.bias, blocks.0.down.weight, blocks.0.down.bias; 5120 bytes
  start, wait, buffer, free: gather_blocks_0, full_blocks_0, full_blocks_0, free_blocks_0
  views: blocks_0_down_weight_1
  uses: mm_6""",
    )


def test_before_the_free_pass_nothing_is_freed_and_reads_are_known(of_mlp: OfMLP) -> None:
    assert_expected_inline(of_mlp.bucketed["forward"], """[(None, 10, 2), (None, 10, 2), (None, 7, 1)]""")


def test_reductions_have_what_goes_in_and_what_comes_out(of_mlp: OfMLP) -> None:
    assert_expected_inline(
        of_mlp.reductions["backward"],
        """\
root of root: head.weight, head.bias; 68 bytes
  gradients: t_8, view
  stages: reduce_root, reduced_root, -, -
  results: head_weight_grad_1, head_bias_grad
blocks.1 of blocks.1: blocks.1.up.weight, blocks.1.up.bias, blocks.1.down.weight, blocks.1.down.bias; 536 bytes
  gradients: t_16, view_2, t_12, view_1
  stages: reduce_blocks_1, reduced_blocks_1, -, -
  results: blocks_1_up_weight_grad_1, blocks_1_up_bias_grad, blocks_1_down_weight_grad_1, blocks_1_down_bias_grad
blocks.0 of blocks.0: blocks.0.up.weight, blocks.0.up.bias, blocks.0.down.weight, blocks.0.down.bias; 536 bytes
  gradients: t_23, view_4, t_20, view_3
  stages: reduce_blocks_0, reduced_blocks_0, -, -
  results: blocks_0_up_weight_grad_1, blocks_0_up_bias_grad, blocks_0_down_weight_grad_1, blocks_0_down_bias_grad""",
    )


def test_on_a_mesh_that_also_replicates_a_reduction_has_two_stages(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    found = described(lambda g: "\n".join(names(*_stages(r)) for r in g.reductions), mesh=mesh)
    assert_expected_inline(
        found["backward"],
        """\
reduce_root, reduced_root, replicate_root, replicated_root
reduce_blocks_1, reduced_blocks_1, replicate_blocks_1, replicated_blocks_1
reduce_blocks_0, reduced_blocks_0, replicate_blocks_0, replicated_blocks_0""",
    )


def _stages(r: Reduction) -> tuple[fx.Node | None, ...]:
    return r.start, r.wait, r.replicate_start, r.replicate_wait


class WithScalar(nn.Module):
    """A scalar, which is used as it is, and a weight that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * self.linear(x), self.linear.weight.t()


def pairs(graph: Graph) -> str:
    return "\n".join(
        f"{name}: {pair.gather and names(pair.gather.buffer)}, {pair.reduction and names(pair.reduction.start)}"
        for name, pair in graph.buckets.items()
    )


def test_buckets_pair_the_gather_and_the_reduction_of_a_name(fake_group: None) -> None:
    found = described(pairs, WithScalar())
    assert_expected_inline(found["forward"], """root: full_root, None""")
    assert_expected_inline(
        found["backward"],
        """\
root: kept_0, reduce_root
root#scalars: None, reduce_root_scalars""",
    )


def test_what_returns_a_view_of_a_parameter_lets_its_buffer_escape(fake_group: None) -> None:
    again = {"reshard_after_forward": True}  # for no other reason
    found = described(lambda g: str([(x.bucket, x.escapes, x.free) for x in g.gathers]), WithScalar(), **again)
    assert_expected_inline(found["forward"], """[('root', True, None)]""")


def test_one_rank_gathers_and_reduces_nothing(fake_group: None) -> None:
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=1)
    found = described(lambda g: str((g.gathers, g.reductions, g.buckets)), MLP(depth=1))
    assert set(found.values()) == {"([], [], {})"}
