"""What each pass does to the graphs of a two-block MLP on 8 ranks, as text: the dialect, then what a pass changed."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP
from printed import calls, label, stage_diff, stage_text
from torch import nn

import graph_fsdp
from graph_fsdp.report.report import GraphReport, GraphView


def report_of(model: nn.Module) -> GraphReport:
    graph_fsdp.compile(model, backend="eager")
    model(torch.randn(4, model.in_features if isinstance(model, nn.Linear) else 16)).sum().backward()
    return graph_fsdp.inspect(model)


@pytest.fixture(scope="module")
def report(fake_group_of_module: None) -> GraphReport:
    return report_of(MLP())


def without(text: str, operator: str) -> str:
    """The text without the calls of an operator, which another test pins."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(f"{operator}("))


def test_insert_gathers(report: GraphReport) -> None:
    assert_expected_inline(
        stage_text(report.capture, stage="insert_gathers"),
        """\
gather_param(blocks.0.up.weight, shape=[32, 16], float32, float32)
gather_param(blocks.0.up.bias, shape=[32], float32, float32)
gather_param(blocks.0.down.weight, shape=[16, 32], float32, float32)
gather_param(blocks.0.down.bias, shape=[16], float32, float32)
gather_param(blocks.1.up.weight, shape=[32, 16], float32, float32)
gather_param(blocks.1.up.bias, shape=[32], float32, float32)
gather_param(blocks.1.down.weight, shape=[16, 32], float32, float32)
gather_param(blocks.1.down.bias, shape=[16], float32, float32)
gather_param(head.weight, shape=[5, 16], float32, float32)
gather_param(head.bias, shape=[5], float32, float32)
    linear(blocks.0.up.{weight, bias}), ..., linear(blocks.0.down.{weight, bias}), ..., linear(blocks.1.up.{weight,
        bias}), ..., linear(blocks.1.down.{weight, bias}), ..., linear(head.{weight, bias})
return ...""",
    )


def test_annotate(report: GraphReport) -> None:
    text = stage_text(report.joint, stage="annotate")
    assert calls(report.joint, "gather_param", stage="annotate") == calls(
        report.capture, "gather_param", stage="insert_gathers"
    )
    assert_expected_inline(
        without(text, "gather_param"),
        """\
    addmm(blocks.0.up.{bias, weight}), ..., addmm(blocks.0.down.{bias, weight}), ..., addmm(blocks.1.up.{bias,
        weight}), ..., addmm(blocks.1.down.{bias, weight}), ..., addmm(head.{bias, weight}), mm(head.weight), ...,
        mm(blocks.1.down.weight), ..., mm(blocks.1.up.weight), ..., mm(blocks.0.down.weight), ...
reduce_grad(head.bias: sum, shard_shape=[1], float32, float32)
reduce_grad(head.weight: mm, shard_shape=[1, 16], float32, float32)
reduce_grad(blocks.1.down.bias: sum, shard_shape=[2], float32, float32)
reduce_grad(blocks.1.down.weight: mm, shard_shape=[2, 32], float32, float32)
reduce_grad(blocks.1.up.bias: sum, shard_shape=[4], float32, float32)
reduce_grad(blocks.1.up.weight: mm, shard_shape=[4, 16], float32, float32)
reduce_grad(blocks.0.down.bias: sum, shard_shape=[2], float32, float32)
reduce_grad(blocks.0.down.weight: mm, shard_shape=[2, 32], float32, float32)
reduce_grad(blocks.0.up.bias: sum, shard_shape=[4], float32, float32)
reduce_grad(blocks.0.up.weight: mm, shard_shape=[4, 16], float32, float32)
return ..., blocks.0.up.{weight.grad, bias.grad}, ..., blocks.0.down.{weight.grad, bias.grad},
    blocks.1.{up.weight.grad, up.bias.grad, down.weight.grad, down.bias.grad}, head.{weight.grad, bias.grad}""",
    )


def test_recompute_tags(report: GraphReport) -> None:
    """Tags are not part of the text: the pass leaves the text as it is, and tags gathers and views of them."""
    assert report.joint.diff("recompute") == ""
    nodes = report.joint.stages["recompute"].graph.nodes
    tagged = [node for node in nodes if "recompute" in node.meta]
    assert {label(node) for node in tagged} == set(report.spec.parameters)
    assert {node for node in nodes if str(node.target).startswith("graph_fsdp.gather_param")} < set(tagged)


def test_partition_forward(report: GraphReport) -> None:
    assert_expected_inline(
        without(stage_text(report.forward, stage="partition"), "gather_param"),
        """\
    addmm(blocks.0.up.{bias, weight}), ..., addmm(blocks.0.down.{bias, weight}), ..., addmm(blocks.1.up.{bias,
        weight}), ..., addmm(blocks.1.down.{bias, weight}), ..., addmm(head.{bias, weight})
return ..., blocks.0.down.weight, blocks.1.{up.weight, down.weight}, head.weight, ...""",
    )


def test_bucket_forward(report: GraphReport) -> None:
    assert_expected_inline(
        stage_text(report.forward, stage="bucket"),
        """\
gather_blocks_0 = all_gather_start([blocks.0.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
full_blocks_0 = all_gather_wait(gather_blocks_0)
    addmm(blocks.0.up.{bias, weight}), ..., addmm(blocks.0.down.{bias, weight}), ...
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
full_blocks_1 = all_gather_wait(gather_blocks_1)
    addmm(blocks.1.up.{bias, weight}), ..., addmm(blocks.1.down.{bias, weight}), ...
gather_root = all_gather_start([head.{weight, bias}], float32, world_size=8)
full_root = all_gather_wait(gather_root)
    addmm(head.{bias, weight})
return ..., blocks.0.down.weight, blocks.1.{up.weight, down.weight}, head.weight, ...""",
    )


def test_reshard_forward(report: GraphReport) -> None:
    assert_expected_inline(
        stage_diff(report.forward, "reshard"),
        """\
@@
     addmm(head.{bias, weight})
-return ..., blocks.0.down.weight, blocks.1.{up.weight, down.weight}, head.weight, ...
+return ..., full_root, ..., blocks.0.down.weight, blocks.1.{up.weight, down.weight}, head.weight, ...""",
    )


def test_prefetch_forward(report: GraphReport) -> None:
    assert_expected_inline(
        stage_diff(report.forward, "prefetch"),
        """\
@@
 full_blocks_0 = all_gather_wait(gather_blocks_0)
+gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
     addmm(blocks.0.up.{bias, weight}), ..., addmm(blocks.0.down.{bias, weight}), ...
-gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
 full_blocks_1 = all_gather_wait(gather_blocks_1)
+gather_root = all_gather_start([head.{weight, bias}], float32, world_size=8)
     addmm(blocks.1.up.{bias, weight}), ..., addmm(blocks.1.down.{bias, weight}), ...
-gather_root = all_gather_start([head.{weight, bias}], float32, world_size=8)
 full_root = all_gather_wait(gather_root)""",
    )


def test_free_forward(report: GraphReport) -> None:
    assert_expected_inline(
        stage_diff(report.forward, "free"),
        """\
@@
     addmm(blocks.0.up.{bias, weight}), ..., addmm(blocks.0.down.{bias, weight}), ...
+free(full_blocks_0)
 full_blocks_1 = all_gather_wait(gather_blocks_1)
@@
     addmm(blocks.1.up.{bias, weight}), ..., addmm(blocks.1.down.{bias, weight}), ...
+free(full_blocks_1)
 full_root = all_gather_wait(gather_root)""",
    )


def test_partition_backward(report: GraphReport) -> None:
    assert_expected_inline(
        without(stage_text(report.backward, stage="partition"), "reduce_grad"),
        """\
gather_param(head.weight, shape=[5, 16], float32, float32)
    mm(head.weight), ...
gather_param(blocks.1.down.weight, shape=[16, 32], float32, float32)
    mm(blocks.1.down.weight), ...
gather_param(blocks.1.up.weight, shape=[32, 16], float32, float32)
    mm(blocks.1.up.weight), ...
gather_param(blocks.0.down.weight, shape=[16, 32], float32, float32)
    mm(blocks.0.down.weight), ...
return blocks.0.up.{weight.grad, bias.grad}, ..., blocks.0.down.{weight.grad, bias.grad}, blocks.1.{up.weight.grad,
    up.bias.grad, down.weight.grad, down.bias.grad}, head.{weight.grad, bias.grad}""",
    )


def test_just_in_time_backward(report: GraphReport) -> None:
    assert report.backward.diff("just_in_time") == ""


def test_bucket_backward(report: GraphReport) -> None:
    assert_expected_inline(
        stage_text(report.backward, stage="bucket"),
        """\
gather_root = all_gather_start([head.weight], float32, world_size=8)
full_root = all_gather_wait(gather_root)
    mm(head.weight), ...
reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8)
reduced_root = reduce_wait(reduce_root)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, down.weight}], float32, world_size=8)
full_blocks_1 = all_gather_wait(gather_blocks_1)
    mm(blocks.1.down.weight), ..., mm(blocks.1.up.weight), ...
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
reduced_blocks_1 = reduce_wait(reduce_blocks_1)
gather_blocks_0 = all_gather_start([blocks.0.down.weight], float32, world_size=8)
full_blocks_0 = all_gather_wait(gather_blocks_0)
    mm(blocks.0.down.weight), ...
reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
reduced_blocks_0 = reduce_wait(reduce_blocks_0)
return blocks.0.up.{weight.grad, bias.grad}, ..., blocks.0.down.{weight.grad, bias.grad}, blocks.1.{up.weight.grad,
    up.bias.grad, down.weight.grad, down.bias.grad}, head.{weight.grad, bias.grad}""",
    )


def test_reshard_backward(report: GraphReport) -> None:
    assert_expected_inline(
        stage_diff(report.backward, "reshard"),
        """\
@@
-gather_root = all_gather_start([head.weight], float32, world_size=8)
-full_root = all_gather_wait(gather_root)
+takes kept(root)
     mm(head.weight), ...""",
    )


def test_prefetch_backward(report: GraphReport) -> None:
    assert_expected_inline(
        stage_diff(report.backward, "prefetch"),
        """\
@@
 takes kept(root)
+gather_blocks_1 = all_gather_start([blocks.1.{up.weight, down.weight}], float32, world_size=8)
     mm(head.weight), ...
 reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8)
-reduced_root = reduce_wait(reduce_root)
-gather_blocks_1 = all_gather_start([blocks.1.{up.weight, down.weight}], float32, world_size=8)
 full_blocks_1 = all_gather_wait(gather_blocks_1)
+gather_blocks_0 = all_gather_start([blocks.0.down.weight], float32, world_size=8)
     mm(blocks.1.down.weight), ..., mm(blocks.1.up.weight), ...
 reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
-reduced_blocks_1 = reduce_wait(reduce_blocks_1)
-gather_blocks_0 = all_gather_start([blocks.0.down.weight], float32, world_size=8)
 full_blocks_0 = all_gather_wait(gather_blocks_0)
     mm(blocks.0.down.weight), ...
+reduced_root = reduce_wait(reduce_root)
 reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
+reduced_blocks_1 = reduce_wait(reduce_blocks_1)
 reduced_blocks_0 = reduce_wait(reduce_blocks_0)""",
    )


def test_free_backward(report: GraphReport) -> None:
    assert_expected_inline(
        stage_diff(report.backward, "free"),
        """\
@@
     mm(head.weight), ...
+free(kept(root))
 reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8)
@@
     mm(blocks.1.down.weight), ..., mm(blocks.1.up.weight), ...
+free(full_blocks_1)
 reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
@@
     mm(blocks.0.down.weight), ...
+free(full_blocks_0)
 reduced_root = reduce_wait(reduce_root)""",
    )


# One layer, in full: a stage is Python that runs, and the program is what the runtime runs of it


@pytest.fixture(scope="module")
def layer(fake_group_of_module: None) -> GraphReport:
    return report_of(nn.Linear(8, 8))


def python(view: GraphView) -> str:
    """The names of the operators without torch's own prefix, to fit a line."""
    return view.stages["free"].body.replace("torch.ops.graph_fsdp.", "fsdp.")


def test_a_stage_as_python(layer: GraphReport) -> None:
    assert_expected_inline(
        python(layer.forward) + python(layer.backward),
        """\
def forward(primals_1, primals_2, primals_3):
    gather_root = fsdp.all_gather_start.default([primals_1, primals_2], [0, 16], 32, torch.float32, 8, '0')
    full_root = fsdp.all_gather_wait.default(gather_root)
    weight = torch.ops.aten.slice.Tensor(full_root, 0, 0, 64)
    weight_1 = torch.ops.aten.view.default(weight, [8, 8])
    t = torch.ops.aten.t.default(weight_1)
    bias = torch.ops.aten.slice.Tensor(full_root, 0, 128, 136)
    addmm = torch.ops.aten.addmm.default(bias, primals_3, t)
    return (addmm, full_root, primals_3)
def forward(kept_0, primals_3, tangents_1):
    t_1 = torch.ops.aten.t.default(tangents_1)
    mm = torch.ops.aten.mm.default(t_1, primals_3)
    t_2 = torch.ops.aten.t.default(mm)
    sum_1 = torch.ops.aten.sum.dim_IntList(tangents_1, [0], True)
    view = torch.ops.aten.view.default(sum_1, [8])
    t_3 = torch.ops.aten.t.default(t_2)
    free_root = fsdp.free.default(kept_0)
    reduce_root = fsdp.reduce_scatter_start.default([t_3, view], torch.float32, 8, '0')
    reduced_root = fsdp.reduce_wait.default(reduce_root)
    weight_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 0, 8)
    bias_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 8, 9)
    weight_grad_1 = torch.ops.aten.view.default(weight_grad, [1, 8])
    return (weight_grad_1, bias_grad, None)
""",
    )


def test_a_program(layer: GraphReport) -> None:
    assert_expected_inline(
        f"{layer.forward.program}\n{layer.backward.program}",
        """\
def run(frame, args):  # forward
    primals_1, primals_2, primals_3, = args
    args.clear()
    gather_root = frame.gather_start(plan_0, [primals_1, primals_2])  # root
    del primals_1, primals_2
    full_root = frame.wait(gather_root)
    del gather_root
    inputs = [full_root, primals_3]
    addmm, = region_2(inputs)
    return [addmm, full_root, primals_3]

def run(frame, args):  # backward
    kept_0, primals_3, tangents_1, = args
    args.clear()
    inputs = [tangents_1, primals_3]
    del tangents_1, primals_3
    view, t_3, = region_0(inputs)
    del kept_0
    reduce_root = frame.reduce_start(plan_2, [t_3, view])  # root
    del t_3, view
    reduced_root = frame.wait(reduce_root)
    del reduce_root
    inputs = [reduced_root]
    del reduced_root
    bias_grad, weight_grad_1, = region_4(inputs)
    return [weight_grad_1, bias_grad, None]
""",
    )
