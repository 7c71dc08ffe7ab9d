"""What each pass does to the graphs of a two-block MLP on 8 ranks, as text: first graphs whole, then diffs."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP

import graph_fsdp
from graph_fsdp.report import GraphReport


@pytest.fixture(scope="module")
def report(fake_group_of_module: None) -> GraphReport:
    model = graph_fsdp.compile(MLP(), backend="eager")
    model(torch.randn(4, 16)).sum().backward()
    return graph_fsdp.inspect(model)


def test_insert_gathers(report: GraphReport) -> None:
    assert_expected_inline(
        report.capture.stages["insert_gathers"].body,
        """\
def forward(L_self_modules_blocks_modules_0_modules_up_parameters_weight_, L_self_modules_blocks_modules_0_modules_up_parameters_bias_, L_args_0_, L_self_modules_blocks_modules_0_modules_down_parameters_weight_, L_self_modules_blocks_modules_0_modules_down_parameters_bias_, L_self_modules_blocks_modules_1_modules_up_parameters_weight_, L_self_modules_blocks_modules_1_modules_up_parameters_bias_, L_self_modules_blocks_modules_1_modules_down_parameters_weight_, L_self_modules_blocks_modules_1_modules_down_parameters_bias_, L_self_modules_head_parameters_weight_, L_self_modules_head_parameters_bias_):
    l_self_modules_blocks_modules_0_modules_up_parameters_weight_ = L_self_modules_blocks_modules_0_modules_up_parameters_weight_
    l_self_modules_blocks_modules_0_modules_up_parameters_bias_ = L_self_modules_blocks_modules_0_modules_up_parameters_bias_
    l_args_0_ = L_args_0_
    l_self_modules_blocks_modules_0_modules_down_parameters_weight_ = L_self_modules_blocks_modules_0_modules_down_parameters_weight_
    l_self_modules_blocks_modules_0_modules_down_parameters_bias_ = L_self_modules_blocks_modules_0_modules_down_parameters_bias_
    l_self_modules_blocks_modules_1_modules_up_parameters_weight_ = L_self_modules_blocks_modules_1_modules_up_parameters_weight_
    l_self_modules_blocks_modules_1_modules_up_parameters_bias_ = L_self_modules_blocks_modules_1_modules_up_parameters_bias_
    l_self_modules_blocks_modules_1_modules_down_parameters_weight_ = L_self_modules_blocks_modules_1_modules_down_parameters_weight_
    l_self_modules_blocks_modules_1_modules_down_parameters_bias_ = L_self_modules_blocks_modules_1_modules_down_parameters_bias_
    l_self_modules_head_parameters_weight_ = L_self_modules_head_parameters_weight_
    l_self_modules_head_parameters_bias_ = L_self_modules_head_parameters_bias_
    gather_param_default = torch.ops.graph_fsdp.gather_param.default(l_self_modules_blocks_modules_0_modules_up_parameters_weight_, [32, 16], torch.float32, torch.float32, 'blocks.0.up.weight', '0')
    gather_param_default_1 = torch.ops.graph_fsdp.gather_param.default(l_self_modules_blocks_modules_0_modules_up_parameters_bias_, [32], torch.float32, torch.float32, 'blocks.0.up.bias', '0')
    gather_param_default_2 = torch.ops.graph_fsdp.gather_param.default(l_self_modules_blocks_modules_0_modules_down_parameters_weight_, [16, 32], torch.float32, torch.float32, 'blocks.0.down.weight', '0')
    gather_param_default_3 = torch.ops.graph_fsdp.gather_param.default(l_self_modules_blocks_modules_0_modules_down_parameters_bias_, [16], torch.float32, torch.float32, 'blocks.0.down.bias', '0')
    gather_param_default_4 = torch.ops.graph_fsdp.gather_param.default(l_self_modules_blocks_modules_1_modules_up_parameters_weight_, [32, 16], torch.float32, torch.float32, 'blocks.1.up.weight', '0')
    gather_param_default_5 = torch.ops.graph_fsdp.gather_param.default(l_self_modules_blocks_modules_1_modules_up_parameters_bias_, [32], torch.float32, torch.float32, 'blocks.1.up.bias', '0')
    gather_param_default_6 = torch.ops.graph_fsdp.gather_param.default(l_self_modules_blocks_modules_1_modules_down_parameters_weight_, [16, 32], torch.float32, torch.float32, 'blocks.1.down.weight', '0')
    gather_param_default_7 = torch.ops.graph_fsdp.gather_param.default(l_self_modules_blocks_modules_1_modules_down_parameters_bias_, [16], torch.float32, torch.float32, 'blocks.1.down.bias', '0')
    gather_param_default_8 = torch.ops.graph_fsdp.gather_param.default(l_self_modules_head_parameters_weight_, [5, 16], torch.float32, torch.float32, 'head.weight', '0')
    gather_param_default_9 = torch.ops.graph_fsdp.gather_param.default(l_self_modules_head_parameters_bias_, [5], torch.float32, torch.float32, 'head.bias', '0')
    linear = torch._C._nn.linear(l_args_0_, gather_param_default, gather_param_default_1)
    gelu = torch._C._nn.gelu(linear)
    linear_1 = torch._C._nn.linear(gelu, gather_param_default_2, gather_param_default_3)
    x = l_args_0_ + linear_1
    linear_2 = torch._C._nn.linear(x, gather_param_default_4, gather_param_default_5)
    gelu_1 = torch._C._nn.gelu(linear_2)
    linear_3 = torch._C._nn.linear(gelu_1, gather_param_default_6, gather_param_default_7)
    x_1 = x + linear_3
    linear_4 = torch._C._nn.linear(x_1, gather_param_default_8, gather_param_default_9)
    return (linear_4,)
""",
    )


def test_annotate(report: GraphReport) -> None:
    assert_expected_inline(
        report.joint.stages["annotate"].body,
        """\
def forward(primals_1, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, primals_8, primals_9, primals_10, primals_11, tangents_1):
    gather_param = torch.ops.graph_fsdp.gather_param.default(primals_1, [32, 16], torch.float32, torch.float32, 'blocks.0.up.weight', '0')
    gather_param_1 = torch.ops.graph_fsdp.gather_param.default(primals_2, [32], torch.float32, torch.float32, 'blocks.0.up.bias', '0')
    gather_param_2 = torch.ops.graph_fsdp.gather_param.default(primals_4, [16, 32], torch.float32, torch.float32, 'blocks.0.down.weight', '0')
    gather_param_3 = torch.ops.graph_fsdp.gather_param.default(primals_5, [16], torch.float32, torch.float32, 'blocks.0.down.bias', '0')
    gather_param_4 = torch.ops.graph_fsdp.gather_param.default(primals_6, [32, 16], torch.float32, torch.float32, 'blocks.1.up.weight', '0')
    gather_param_5 = torch.ops.graph_fsdp.gather_param.default(primals_7, [32], torch.float32, torch.float32, 'blocks.1.up.bias', '0')
    gather_param_6 = torch.ops.graph_fsdp.gather_param.default(primals_8, [16, 32], torch.float32, torch.float32, 'blocks.1.down.weight', '0')
    gather_param_7 = torch.ops.graph_fsdp.gather_param.default(primals_9, [16], torch.float32, torch.float32, 'blocks.1.down.bias', '0')
    gather_param_8 = torch.ops.graph_fsdp.gather_param.default(primals_10, [5, 16], torch.float32, torch.float32, 'head.weight', '0')
    gather_param_9 = torch.ops.graph_fsdp.gather_param.default(primals_11, [5], torch.float32, torch.float32, 'head.bias', '0')
    t = torch.ops.aten.t.default(gather_param)
    addmm = torch.ops.aten.addmm.default(gather_param_1, primals_3, t)
    gelu = torch.ops.aten.gelu.default(addmm)
    t_1 = torch.ops.aten.t.default(gather_param_2)
    addmm_1 = torch.ops.aten.addmm.default(gather_param_3, gelu, t_1)
    add = torch.ops.aten.add.Tensor(primals_3, addmm_1)
    t_2 = torch.ops.aten.t.default(gather_param_4)
    addmm_2 = torch.ops.aten.addmm.default(gather_param_5, add, t_2)
    gelu_1 = torch.ops.aten.gelu.default(addmm_2)
    t_3 = torch.ops.aten.t.default(gather_param_6)
    addmm_3 = torch.ops.aten.addmm.default(gather_param_7, gelu_1, t_3)
    add_1 = torch.ops.aten.add.Tensor(add, addmm_3)
    t_4 = torch.ops.aten.t.default(gather_param_8)
    addmm_4 = torch.ops.aten.addmm.default(gather_param_9, add_1, t_4)
    t_5 = torch.ops.aten.t.default(t_4)
    mm = torch.ops.aten.mm.default(tangents_1, t_5)
    t_6 = torch.ops.aten.t.default(tangents_1)
    mm_1 = torch.ops.aten.mm.default(t_6, add_1)
    t_7 = torch.ops.aten.t.default(mm_1)
    sum_1 = torch.ops.aten.sum.dim_IntList(tangents_1, [0], True)
    view = torch.ops.aten.view.default(sum_1, [5])
    t_8 = torch.ops.aten.t.default(t_7)
    t_9 = torch.ops.aten.t.default(t_3)
    mm_2 = torch.ops.aten.mm.default(mm, t_9)
    t_10 = torch.ops.aten.t.default(mm)
    mm_3 = torch.ops.aten.mm.default(t_10, gelu_1)
    t_11 = torch.ops.aten.t.default(mm_3)
    sum_2 = torch.ops.aten.sum.dim_IntList(mm, [0], True)
    view_1 = torch.ops.aten.view.default(sum_2, [16])
    t_12 = torch.ops.aten.t.default(t_11)
    gelu_backward = torch.ops.aten.gelu_backward.default(mm_2, addmm_2)
    t_13 = torch.ops.aten.t.default(t_2)
    mm_4 = torch.ops.aten.mm.default(gelu_backward, t_13)
    t_14 = torch.ops.aten.t.default(gelu_backward)
    mm_5 = torch.ops.aten.mm.default(t_14, add)
    t_15 = torch.ops.aten.t.default(mm_5)
    sum_3 = torch.ops.aten.sum.dim_IntList(gelu_backward, [0], True)
    view_2 = torch.ops.aten.view.default(sum_3, [32])
    add_2 = torch.ops.aten.add.Tensor(mm, mm_4)
    t_16 = torch.ops.aten.t.default(t_15)
    t_17 = torch.ops.aten.t.default(t_1)
    mm_6 = torch.ops.aten.mm.default(add_2, t_17)
    t_18 = torch.ops.aten.t.default(add_2)
    mm_7 = torch.ops.aten.mm.default(t_18, gelu)
    t_19 = torch.ops.aten.t.default(mm_7)
    sum_4 = torch.ops.aten.sum.dim_IntList(add_2, [0], True)
    view_3 = torch.ops.aten.view.default(sum_4, [16])
    t_20 = torch.ops.aten.t.default(t_19)
    gelu_backward_1 = torch.ops.aten.gelu_backward.default(mm_6, addmm)
    t_21 = torch.ops.aten.t.default(gelu_backward_1)
    mm_8 = torch.ops.aten.mm.default(t_21, primals_3)
    t_22 = torch.ops.aten.t.default(mm_8)
    sum_5 = torch.ops.aten.sum.dim_IntList(gelu_backward_1, [0], True)
    view_4 = torch.ops.aten.view.default(sum_5, [32])
    t_23 = torch.ops.aten.t.default(t_22)
    reduce_grad = torch.ops.graph_fsdp.reduce_grad.default(view, [1], torch.float32, torch.float32, 'head.bias', '0')
    reduce_grad_1 = torch.ops.graph_fsdp.reduce_grad.default(t_8, [1, 16], torch.float32, torch.float32, 'head.weight', '0')
    reduce_grad_2 = torch.ops.graph_fsdp.reduce_grad.default(view_1, [2], torch.float32, torch.float32, 'blocks.1.down.bias', '0')
    reduce_grad_3 = torch.ops.graph_fsdp.reduce_grad.default(t_12, [2, 32], torch.float32, torch.float32, 'blocks.1.down.weight', '0')
    reduce_grad_4 = torch.ops.graph_fsdp.reduce_grad.default(view_2, [4], torch.float32, torch.float32, 'blocks.1.up.bias', '0')
    reduce_grad_5 = torch.ops.graph_fsdp.reduce_grad.default(t_16, [4, 16], torch.float32, torch.float32, 'blocks.1.up.weight', '0')
    reduce_grad_6 = torch.ops.graph_fsdp.reduce_grad.default(view_3, [2], torch.float32, torch.float32, 'blocks.0.down.bias', '0')
    reduce_grad_7 = torch.ops.graph_fsdp.reduce_grad.default(t_20, [2, 32], torch.float32, torch.float32, 'blocks.0.down.weight', '0')
    reduce_grad_8 = torch.ops.graph_fsdp.reduce_grad.default(view_4, [4], torch.float32, torch.float32, 'blocks.0.up.bias', '0')
    reduce_grad_9 = torch.ops.graph_fsdp.reduce_grad.default(t_23, [4, 16], torch.float32, torch.float32, 'blocks.0.up.weight', '0')
    return [addmm_4, reduce_grad_9, reduce_grad_8, None, reduce_grad_7, reduce_grad_6, reduce_grad_5, reduce_grad_4, reduce_grad_3, reduce_grad_2, reduce_grad_1, reduce_grad]
""",
    )


def test_recompute_tags(report: GraphReport) -> None:
    # Tags are not part of the text: the pass must leave the text as it is, and tag gathers and views of them.
    assert_expected_inline(report.joint.diff("recompute"), """""")
    tagged = [n.name for n in report.joint.stages["recompute"].graph.nodes if "recompute" in n.meta]
    assert_expected_inline(
        " ".join(tagged),
        """gather_param gather_param_1 gather_param_2 gather_param_3 gather_param_4 gather_param_5 gather_param_6 gather_param_7 gather_param_8 gather_param_9 t t_1 t_2 t_3 t_4 t_5 t_9 t_13 t_17""",
    )


def test_partition_forward(report: GraphReport) -> None:
    assert_expected_inline(
        report.forward.stages["partition"].body,
        """\
def forward(primals_1, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, primals_8, primals_9, primals_10, primals_11):
    gather_param = torch.ops.graph_fsdp.gather_param.default(primals_1, [32, 16], torch.float32, torch.float32, 'blocks.0.up.weight', '0')
    gather_param_1 = torch.ops.graph_fsdp.gather_param.default(primals_2, [32], torch.float32, torch.float32, 'blocks.0.up.bias', '0')
    gather_param_2 = torch.ops.graph_fsdp.gather_param.default(primals_4, [16, 32], torch.float32, torch.float32, 'blocks.0.down.weight', '0')
    gather_param_3 = torch.ops.graph_fsdp.gather_param.default(primals_5, [16], torch.float32, torch.float32, 'blocks.0.down.bias', '0')
    gather_param_4 = torch.ops.graph_fsdp.gather_param.default(primals_6, [32, 16], torch.float32, torch.float32, 'blocks.1.up.weight', '0')
    gather_param_5 = torch.ops.graph_fsdp.gather_param.default(primals_7, [32], torch.float32, torch.float32, 'blocks.1.up.bias', '0')
    gather_param_6 = torch.ops.graph_fsdp.gather_param.default(primals_8, [16, 32], torch.float32, torch.float32, 'blocks.1.down.weight', '0')
    gather_param_7 = torch.ops.graph_fsdp.gather_param.default(primals_9, [16], torch.float32, torch.float32, 'blocks.1.down.bias', '0')
    gather_param_8 = torch.ops.graph_fsdp.gather_param.default(primals_10, [5, 16], torch.float32, torch.float32, 'head.weight', '0')
    gather_param_9 = torch.ops.graph_fsdp.gather_param.default(primals_11, [5], torch.float32, torch.float32, 'head.bias', '0')
    t = torch.ops.aten.t.default(gather_param)
    addmm = torch.ops.aten.addmm.default(gather_param_1, primals_3, t)
    gelu = torch.ops.aten.gelu.default(addmm)
    t_1 = torch.ops.aten.t.default(gather_param_2)
    addmm_1 = torch.ops.aten.addmm.default(gather_param_3, gelu, t_1)
    add = torch.ops.aten.add.Tensor(primals_3, addmm_1)
    t_2 = torch.ops.aten.t.default(gather_param_4)
    addmm_2 = torch.ops.aten.addmm.default(gather_param_5, add, t_2)
    gelu_1 = torch.ops.aten.gelu.default(addmm_2)
    t_3 = torch.ops.aten.t.default(gather_param_6)
    addmm_3 = torch.ops.aten.addmm.default(gather_param_7, gelu_1, t_3)
    add_1 = torch.ops.aten.add.Tensor(add, addmm_3)
    t_4 = torch.ops.aten.t.default(gather_param_8)
    addmm_4 = torch.ops.aten.addmm.default(gather_param_9, add_1, t_4)
    return (addmm_4, primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1)
""",
    )


def test_bucket_forward(report: GraphReport) -> None:
    assert_expected_inline(
        report.forward.diff("bucket"),
        """\
--- just_in_time
+++ bucket
@@ -1,26 +1,39 @@
 def forward(primals_1, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, primals_8, primals_9, primals_10, primals_11):
-    gather_param = torch.ops.graph_fsdp.gather_param.default(primals_1, [32, 16], torch.float32, torch.float32, 'blocks.0.up.weight', '0')
-    gather_param_1 = torch.ops.graph_fsdp.gather_param.default(primals_2, [32], torch.float32, torch.float32, 'blocks.0.up.bias', '0')
-    gather_param_2 = torch.ops.graph_fsdp.gather_param.default(primals_4, [16, 32], torch.float32, torch.float32, 'blocks.0.down.weight', '0')
-    gather_param_3 = torch.ops.graph_fsdp.gather_param.default(primals_5, [16], torch.float32, torch.float32, 'blocks.0.down.bias', '0')
-    gather_param_4 = torch.ops.graph_fsdp.gather_param.default(primals_6, [32, 16], torch.float32, torch.float32, 'blocks.1.up.weight', '0')
-    gather_param_5 = torch.ops.graph_fsdp.gather_param.default(primals_7, [32], torch.float32, torch.float32, 'blocks.1.up.bias', '0')
-    gather_param_6 = torch.ops.graph_fsdp.gather_param.default(primals_8, [16, 32], torch.float32, torch.float32, 'blocks.1.down.weight', '0')
-    gather_param_7 = torch.ops.graph_fsdp.gather_param.default(primals_9, [16], torch.float32, torch.float32, 'blocks.1.down.bias', '0')
-    gather_param_8 = torch.ops.graph_fsdp.gather_param.default(primals_10, [5, 16], torch.float32, torch.float32, 'head.weight', '0')
-    gather_param_9 = torch.ops.graph_fsdp.gather_param.default(primals_11, [5], torch.float32, torch.float32, 'head.bias', '0')
-    t = torch.ops.aten.t.default(gather_param)
-    addmm = torch.ops.aten.addmm.default(gather_param_1, primals_3, t)
+    gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default([primals_1, primals_2, primals_4, primals_5], [0, 64, 80, 144], 160, torch.float32, 8, '0')
+    full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_0)
+    blocks_0_up_weight = torch.ops.aten.slice.Tensor(full_blocks_0, 0, 0, 512)
+    blocks_0_up_weight_1 = torch.ops.aten.view.default(blocks_0_up_weight, [32, 16])
+    t = torch.ops.aten.t.default(blocks_0_up_weight_1)
+    blocks_0_up_bias = torch.ops.aten.slice.Tensor(full_blocks_0, 0, 512, 544)
+    addmm = torch.ops.aten.addmm.default(blocks_0_up_bias, primals_3, t)
     gelu = torch.ops.aten.gelu.default(addmm)
-    t_1 = torch.ops.aten.t.default(gather_param_2)
-    addmm_1 = torch.ops.aten.addmm.default(gather_param_3, gelu, t_1)
+    blocks_0_down_weight = torch.ops.aten.slice.Tensor(full_blocks_0, 0, 640, 1152)
+    blocks_0_down_weight_1 = torch.ops.aten.view.default(blocks_0_down_weight, [16, 32])
+    t_1 = torch.ops.aten.t.default(blocks_0_down_weight_1)
+    blocks_0_down_bias = torch.ops.aten.slice.Tensor(full_blocks_0, 0, 1152, 1168)
+    addmm_1 = torch.ops.aten.addmm.default(blocks_0_down_bias, gelu, t_1)
     add = torch.ops.aten.add.Tensor(primals_3, addmm_1)
-    t_2 = torch.ops.aten.t.default(gather_param_4)
-    addmm_2 = torch.ops.aten.addmm.default(gather_param_5, add, t_2)
+    gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_7, primals_8, primals_9], [0, 64, 80, 144], 160, torch.float32, 8, '0')
+    full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_1)
+    blocks_1_up_weight = torch.ops.aten.slice.Tensor(full_blocks_1, 0, 0, 512)
+    blocks_1_up_weight_1 = torch.ops.aten.view.default(blocks_1_up_weight, [32, 16])
+    t_2 = torch.ops.aten.t.default(blocks_1_up_weight_1)
+    blocks_1_up_bias = torch.ops.aten.slice.Tensor(full_blocks_1, 0, 512, 544)
+    addmm_2 = torch.ops.aten.addmm.default(blocks_1_up_bias, add, t_2)
     gelu_1 = torch.ops.aten.gelu.default(addmm_2)
-    t_3 = torch.ops.aten.t.default(gather_param_6)
-    addmm_3 = torch.ops.aten.addmm.default(gather_param_7, gelu_1, t_3)
+    blocks_1_down_weight = torch.ops.aten.slice.Tensor(full_blocks_1, 0, 640, 1152)
+    blocks_1_down_weight_1 = torch.ops.aten.view.default(blocks_1_down_weight, [16, 32])
+    t_3 = torch.ops.aten.t.default(blocks_1_down_weight_1)
+    blocks_1_down_bias = torch.ops.aten.slice.Tensor(full_blocks_1, 0, 1152, 1168)
+    addmm_3 = torch.ops.aten.addmm.default(blocks_1_down_bias, gelu_1, t_3)
     add_1 = torch.ops.aten.add.Tensor(add, addmm_3)
-    t_4 = torch.ops.aten.t.default(gather_param_8)
-    addmm_4 = torch.ops.aten.addmm.default(gather_param_9, add_1, t_4)
+    gather_root = torch.ops.graph_fsdp.all_gather_start.default([primals_10, primals_11], [0, 16], 32, torch.float32, 8, '0')
+    full_root = torch.ops.graph_fsdp.all_gather_wait.default(gather_root)
+    head_weight = torch.ops.aten.slice.Tensor(full_root, 0, 0, 128)
+    head_weight_1 = torch.ops.aten.view.default(head_weight, [8, 16])
+    head_weight_2 = torch.ops.aten.slice.Tensor(head_weight_1, 0, 0, 5)
+    t_4 = torch.ops.aten.t.default(head_weight_2)
+    head_bias = torch.ops.aten.slice.Tensor(full_root, 0, 128, 136)
+    head_bias_1 = torch.ops.aten.slice.Tensor(head_bias, 0, 0, 5)
+    addmm_4 = torch.ops.aten.addmm.default(head_bias_1, add_1, t_4)
     return (addmm_4, primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1)""",
    )


def test_reshard_forward(report: GraphReport) -> None:
    assert_expected_inline(
        report.forward.diff("reshard"),
        """\
--- bucket
+++ reshard
@@ -38,2 +38,2 @@
     addmm_4 = torch.ops.aten.addmm.default(head_bias_1, add_1, t_4)
-    return (addmm_4, primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1)
+    return (addmm_4, full_root, primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1)""",
    )


def test_prefetch_forward(report: GraphReport) -> None:
    assert_expected_inline(
        report.forward.diff("prefetch"),
        """\
--- reshard
+++ prefetch
@@ -3,2 +3,3 @@
     full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_0)
+    gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_7, primals_8, primals_9], [0, 64, 80, 144], 160, torch.float32, 8, '0')
     blocks_0_up_weight = torch.ops.aten.slice.Tensor(full_blocks_0, 0, 0, 512)
@@ -15,4 +16,4 @@
     add = torch.ops.aten.add.Tensor(primals_3, addmm_1)
-    gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_7, primals_8, primals_9], [0, 64, 80, 144], 160, torch.float32, 8, '0')
     full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_1)
+    gather_root = torch.ops.graph_fsdp.all_gather_start.default([primals_10, primals_11], [0, 16], 32, torch.float32, 8, '0')
     blocks_1_up_weight = torch.ops.aten.slice.Tensor(full_blocks_1, 0, 0, 512)
@@ -29,3 +30,2 @@
     add_1 = torch.ops.aten.add.Tensor(add, addmm_3)
-    gather_root = torch.ops.graph_fsdp.all_gather_start.default([primals_10, primals_11], [0, 16], 32, torch.float32, 8, '0')
     full_root = torch.ops.graph_fsdp.all_gather_wait.default(gather_root)""",
    )


def test_free_forward(report: GraphReport) -> None:
    assert_expected_inline(
        report.forward.diff("free"),
        """\
--- prefetch
+++ free
@@ -16,2 +16,3 @@
     add = torch.ops.aten.add.Tensor(primals_3, addmm_1)
+    free_blocks_0 = torch.ops.graph_fsdp.free.default(full_blocks_0)
     full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_1)
@@ -30,2 +31,3 @@
     add_1 = torch.ops.aten.add.Tensor(add, addmm_3)
+    free_blocks_1 = torch.ops.graph_fsdp.free.default(full_blocks_1)
     full_root = torch.ops.graph_fsdp.all_gather_wait.default(gather_root)""",
    )


def test_program_forward(report: GraphReport) -> None:
    assert_expected_inline(
        str(report.forward.program),
        """\
def run(frame, args):  # forward
    primals_1, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, primals_8, primals_9, primals_10, primals_11, = args
    args.clear()
    gather_blocks_0 = frame.gather_start(plan_0, [primals_1, primals_2, primals_4, primals_5])  # blocks.0
    del primals_1, primals_2, primals_5
    full_blocks_0 = frame.wait(gather_blocks_0)
    del gather_blocks_0
    gather_blocks_1 = frame.gather_start(plan_2, [primals_6, primals_7, primals_8, primals_9])  # blocks.1
    del primals_7, primals_9
    inputs = [full_blocks_0, primals_3]
    addmm, gelu, add, = region_3(inputs)
    frame.free(full_blocks_0)
    del full_blocks_0
    full_blocks_1 = frame.wait(gather_blocks_1)
    del gather_blocks_1
    gather_root = frame.gather_start(plan_6, [primals_10, primals_11])  # root
    del primals_11
    inputs = [full_blocks_1, add]
    addmm_2, gelu_1, add_1, = region_7(inputs)
    frame.free(full_blocks_1)
    del full_blocks_1
    full_root = frame.wait(gather_root)
    del gather_root
    inputs = [full_root, add_1]
    addmm_4, = region_10(inputs)
    return [addmm_4, full_root, primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1]
""",
    )
