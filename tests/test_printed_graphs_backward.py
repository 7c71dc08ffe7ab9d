"""What each pass does to the backward graph of a two-block MLP on 8 ranks, as text."""

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


def test_partition(report: GraphReport) -> None:
    assert_expected_inline(
        report.backward.stages["partition"].body,
        """\
def forward(primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1, tangents_1):
    gather_param_8 = torch.ops.graph_fsdp.gather_param.default(primals_10, [5, 16], torch.float32, torch.float32, 'head.weight', '0')
    t_4 = torch.ops.aten.t.default(gather_param_8)
    t_5 = torch.ops.aten.t.default(t_4)
    mm = torch.ops.aten.mm.default(tangents_1, t_5)
    t_6 = torch.ops.aten.t.default(tangents_1)
    mm_1 = torch.ops.aten.mm.default(t_6, add_1)
    t_7 = torch.ops.aten.t.default(mm_1)
    sum_1 = torch.ops.aten.sum.dim_IntList(tangents_1, [0], True)
    view = torch.ops.aten.view.default(sum_1, [5])
    t_8 = torch.ops.aten.t.default(t_7)
    gather_param_6 = torch.ops.graph_fsdp.gather_param.default(primals_8, [16, 32], torch.float32, torch.float32, 'blocks.1.down.weight', '0')
    t_3 = torch.ops.aten.t.default(gather_param_6)
    t_9 = torch.ops.aten.t.default(t_3)
    mm_2 = torch.ops.aten.mm.default(mm, t_9)
    t_10 = torch.ops.aten.t.default(mm)
    mm_3 = torch.ops.aten.mm.default(t_10, gelu_1)
    t_11 = torch.ops.aten.t.default(mm_3)
    sum_2 = torch.ops.aten.sum.dim_IntList(mm, [0], True)
    view_1 = torch.ops.aten.view.default(sum_2, [16])
    t_12 = torch.ops.aten.t.default(t_11)
    gelu_backward = torch.ops.aten.gelu_backward.default(mm_2, addmm_2)
    gather_param_4 = torch.ops.graph_fsdp.gather_param.default(primals_6, [32, 16], torch.float32, torch.float32, 'blocks.1.up.weight', '0')
    t_2 = torch.ops.aten.t.default(gather_param_4)
    t_13 = torch.ops.aten.t.default(t_2)
    mm_4 = torch.ops.aten.mm.default(gelu_backward, t_13)
    t_14 = torch.ops.aten.t.default(gelu_backward)
    mm_5 = torch.ops.aten.mm.default(t_14, add)
    t_15 = torch.ops.aten.t.default(mm_5)
    sum_3 = torch.ops.aten.sum.dim_IntList(gelu_backward, [0], True)
    view_2 = torch.ops.aten.view.default(sum_3, [32])
    add_2 = torch.ops.aten.add.Tensor(mm, mm_4)
    t_16 = torch.ops.aten.t.default(t_15)
    gather_param_2 = torch.ops.graph_fsdp.gather_param.default(primals_4, [16, 32], torch.float32, torch.float32, 'blocks.0.down.weight', '0')
    t_1 = torch.ops.aten.t.default(gather_param_2)
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
    return (reduce_grad_9, reduce_grad_8, None, reduce_grad_7, reduce_grad_6, reduce_grad_5, reduce_grad_4, reduce_grad_3, reduce_grad_2, reduce_grad_1, reduce_grad)
""",
    )


def test_just_in_time(report: GraphReport) -> None:
    assert_expected_inline(report.backward.diff("just_in_time"), """""")


def test_bucket(report: GraphReport) -> None:
    assert_expected_inline(
        report.backward.diff("bucket"),
        """\
--- just_in_time
+++ bucket
@@ -1,4 +1,8 @@
 def forward(primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1, tangents_1):
-    gather_param_8 = torch.ops.graph_fsdp.gather_param.default(primals_10, [5, 16], torch.float32, torch.float32, 'head.weight', '0')
-    t_4 = torch.ops.aten.t.default(gather_param_8)
+    gather_root = torch.ops.graph_fsdp.all_gather_start.default([primals_10], [0], 32, torch.float32, 8, '0')
+    full_root = torch.ops.graph_fsdp.all_gather_wait.default(gather_root)
+    head_weight = torch.ops.aten.slice.Tensor(full_root, 0, 0, 128)
+    head_weight_1 = torch.ops.aten.view.default(head_weight, [8, 16])
+    head_weight_2 = torch.ops.aten.slice.Tensor(head_weight_1, 0, 0, 5)
+    t_4 = torch.ops.aten.t.default(head_weight_2)
     t_5 = torch.ops.aten.t.default(t_4)
@@ -11,4 +15,12 @@
     t_8 = torch.ops.aten.t.default(t_7)
-    gather_param_6 = torch.ops.graph_fsdp.gather_param.default(primals_8, [16, 32], torch.float32, torch.float32, 'blocks.1.down.weight', '0')
-    t_3 = torch.ops.aten.t.default(gather_param_6)
+    reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default([t_8, view], torch.float32, 8, '0')
+    reduced_root = torch.ops.graph_fsdp.reduce_wait.default(reduce_root)
+    head_weight_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 0, 16)
+    head_weight_grad_1 = torch.ops.aten.view.default(head_weight_grad, [1, 16])
+    head_bias_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 16, 17)
+    gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_8], [0, 80], 160, torch.float32, 8, '0')
+    full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_1)
+    blocks_1_down_weight = torch.ops.aten.slice.Tensor(full_blocks_1, 0, 640, 1152)
+    blocks_1_down_weight_1 = torch.ops.aten.view.default(blocks_1_down_weight, [16, 32])
+    t_3 = torch.ops.aten.t.default(blocks_1_down_weight_1)
     t_9 = torch.ops.aten.t.default(t_3)
@@ -22,4 +34,5 @@
     gelu_backward = torch.ops.aten.gelu_backward.default(mm_2, addmm_2)
-    gather_param_4 = torch.ops.graph_fsdp.gather_param.default(primals_6, [32, 16], torch.float32, torch.float32, 'blocks.1.up.weight', '0')
-    t_2 = torch.ops.aten.t.default(gather_param_4)
+    blocks_1_up_weight = torch.ops.aten.slice.Tensor(full_blocks_1, 0, 0, 512)
+    blocks_1_up_weight_1 = torch.ops.aten.view.default(blocks_1_up_weight, [32, 16])
+    t_2 = torch.ops.aten.t.default(blocks_1_up_weight_1)
     t_13 = torch.ops.aten.t.default(t_2)
@@ -33,4 +46,15 @@
     t_16 = torch.ops.aten.t.default(t_15)
-    gather_param_2 = torch.ops.graph_fsdp.gather_param.default(primals_4, [16, 32], torch.float32, torch.float32, 'blocks.0.down.weight', '0')
-    t_1 = torch.ops.aten.t.default(gather_param_2)
+    reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_16, view_2, t_12, view_1], torch.float32, 8, '0')
+    reduced_blocks_1 = torch.ops.graph_fsdp.reduce_wait.default(reduce_blocks_1)
+    blocks_1_up_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 0, 64)
+    blocks_1_up_weight_grad_1 = torch.ops.aten.view.default(blocks_1_up_weight_grad, [4, 16])
+    blocks_1_up_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 64, 68)
+    blocks_1_down_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 68, 132)
+    blocks_1_down_weight_grad_1 = torch.ops.aten.view.default(blocks_1_down_weight_grad, [2, 32])
+    blocks_1_down_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 132, 134)
+    gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default([primals_4], [80], 160, torch.float32, 8, '0')
+    full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_0)
+    blocks_0_down_weight = torch.ops.aten.slice.Tensor(full_blocks_0, 0, 640, 1152)
+    blocks_0_down_weight_1 = torch.ops.aten.view.default(blocks_0_down_weight, [16, 32])
+    t_1 = torch.ops.aten.t.default(blocks_0_down_weight_1)
     t_17 = torch.ops.aten.t.default(t_1)
@@ -50,12 +74,10 @@
     t_23 = torch.ops.aten.t.default(t_22)
-    reduce_grad = torch.ops.graph_fsdp.reduce_grad.default(view, [1], torch.float32, torch.float32, 'head.bias', '0')
-    reduce_grad_1 = torch.ops.graph_fsdp.reduce_grad.default(t_8, [1, 16], torch.float32, torch.float32, 'head.weight', '0')
-    reduce_grad_2 = torch.ops.graph_fsdp.reduce_grad.default(view_1, [2], torch.float32, torch.float32, 'blocks.1.down.bias', '0')
-    reduce_grad_3 = torch.ops.graph_fsdp.reduce_grad.default(t_12, [2, 32], torch.float32, torch.float32, 'blocks.1.down.weight', '0')
-    reduce_grad_4 = torch.ops.graph_fsdp.reduce_grad.default(view_2, [4], torch.float32, torch.float32, 'blocks.1.up.bias', '0')
-    reduce_grad_5 = torch.ops.graph_fsdp.reduce_grad.default(t_16, [4, 16], torch.float32, torch.float32, 'blocks.1.up.weight', '0')
-    reduce_grad_6 = torch.ops.graph_fsdp.reduce_grad.default(view_3, [2], torch.float32, torch.float32, 'blocks.0.down.bias', '0')
-    reduce_grad_7 = torch.ops.graph_fsdp.reduce_grad.default(t_20, [2, 32], torch.float32, torch.float32, 'blocks.0.down.weight', '0')
-    reduce_grad_8 = torch.ops.graph_fsdp.reduce_grad.default(view_4, [4], torch.float32, torch.float32, 'blocks.0.up.bias', '0')
-    reduce_grad_9 = torch.ops.graph_fsdp.reduce_grad.default(t_23, [4, 16], torch.float32, torch.float32, 'blocks.0.up.weight', '0')
-    return (reduce_grad_9, reduce_grad_8, None, reduce_grad_7, reduce_grad_6, reduce_grad_5, reduce_grad_4, reduce_grad_3, reduce_grad_2, reduce_grad_1, reduce_grad)
+    reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_23, view_4, t_20, view_3], torch.float32, 8, '0')
+    reduced_blocks_0 = torch.ops.graph_fsdp.reduce_wait.default(reduce_blocks_0)
+    blocks_0_up_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0, 0, 0, 64)
+    blocks_0_up_weight_grad_1 = torch.ops.aten.view.default(blocks_0_up_weight_grad, [4, 16])
+    blocks_0_up_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0, 0, 64, 68)
+    blocks_0_down_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0, 0, 68, 132)
+    blocks_0_down_weight_grad_1 = torch.ops.aten.view.default(blocks_0_down_weight_grad, [2, 32])
+    blocks_0_down_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0, 0, 132, 134)
+    return (blocks_0_up_weight_grad_1, blocks_0_up_bias_grad, None, blocks_0_down_weight_grad_1, blocks_0_down_bias_grad, blocks_1_up_weight_grad_1, blocks_1_up_bias_grad, blocks_1_down_weight_grad_1, blocks_1_down_bias_grad, head_weight_grad_1, head_bias_grad)""",
    )


def test_reshard(report: GraphReport) -> None:
    assert_expected_inline(
        report.backward.diff("reshard"),
        """\
--- bucket
+++ reshard
@@ -1,5 +1,3 @@
-def forward(primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1, tangents_1):
-    gather_root = torch.ops.graph_fsdp.all_gather_start.default([primals_10], [0], 32, torch.float32, 8, '0')
-    full_root = torch.ops.graph_fsdp.all_gather_wait.default(gather_root)
-    head_weight = torch.ops.aten.slice.Tensor(full_root, 0, 0, 128)
+def forward(kept_0, primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1, tangents_1):
+    head_weight = torch.ops.aten.slice.Tensor(kept_0, 0, 0, 128)
     head_weight_1 = torch.ops.aten.view.default(head_weight, [8, 16])""",
    )


def test_prefetch(report: GraphReport) -> None:
    assert_expected_inline(
        report.backward.diff("prefetch"),
        """\
--- reshard
+++ prefetch
@@ -1,2 +1,3 @@
 def forward(kept_0, primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1, tangents_1):
+    gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_8], [0, 80], 160, torch.float32, 8, '0')
     head_weight = torch.ops.aten.slice.Tensor(kept_0, 0, 0, 128)
@@ -14,8 +15,4 @@
     reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default([t_8, view], torch.float32, 8, '0')
-    reduced_root = torch.ops.graph_fsdp.reduce_wait.default(reduce_root)
-    head_weight_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 0, 16)
-    head_weight_grad_1 = torch.ops.aten.view.default(head_weight_grad, [1, 16])
-    head_bias_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 16, 17)
-    gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_8], [0, 80], 160, torch.float32, 8, '0')
     full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_1)
+    gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default([primals_4], [80], 160, torch.float32, 8, '0')
     blocks_1_down_weight = torch.ops.aten.slice.Tensor(full_blocks_1, 0, 640, 1152)
@@ -45,10 +42,2 @@
     reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_16, view_2, t_12, view_1], torch.float32, 8, '0')
-    reduced_blocks_1 = torch.ops.graph_fsdp.reduce_wait.default(reduce_blocks_1)
-    blocks_1_up_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 0, 64)
-    blocks_1_up_weight_grad_1 = torch.ops.aten.view.default(blocks_1_up_weight_grad, [4, 16])
-    blocks_1_up_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 64, 68)
-    blocks_1_down_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 68, 132)
-    blocks_1_down_weight_grad_1 = torch.ops.aten.view.default(blocks_1_down_weight_grad, [2, 32])
-    blocks_1_down_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 132, 134)
-    gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default([primals_4], [80], 160, torch.float32, 8, '0')
     full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_0)
@@ -72,10 +61,21 @@
     t_23 = torch.ops.aten.t.default(t_22)
+    reduced_root = torch.ops.graph_fsdp.reduce_wait.default(reduce_root)
+    head_weight_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 0, 16)
+    head_bias_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 16, 17)
+    head_weight_grad_1 = torch.ops.aten.view.default(head_weight_grad, [1, 16])
     reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_23, view_4, t_20, view_3], torch.float32, 8, '0')
+    reduced_blocks_1 = torch.ops.graph_fsdp.reduce_wait.default(reduce_blocks_1)
+    blocks_1_up_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 0, 64)
+    blocks_1_up_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 64, 68)
+    blocks_1_down_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 68, 132)
+    blocks_1_down_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_1, 0, 132, 134)
+    blocks_1_up_weight_grad_1 = torch.ops.aten.view.default(blocks_1_up_weight_grad, [4, 16])
+    blocks_1_down_weight_grad_1 = torch.ops.aten.view.default(blocks_1_down_weight_grad, [2, 32])
     reduced_blocks_0 = torch.ops.graph_fsdp.reduce_wait.default(reduce_blocks_0)
     blocks_0_up_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0, 0, 0, 64)
-    blocks_0_up_weight_grad_1 = torch.ops.aten.view.default(blocks_0_up_weight_grad, [4, 16])
     blocks_0_up_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0, 0, 64, 68)
     blocks_0_down_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0, 0, 68, 132)
+    blocks_0_down_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0, 0, 132, 134)
+    blocks_0_up_weight_grad_1 = torch.ops.aten.view.default(blocks_0_up_weight_grad, [4, 16])
     blocks_0_down_weight_grad_1 = torch.ops.aten.view.default(blocks_0_down_weight_grad, [2, 32])
-    blocks_0_down_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0, 0, 132, 134)
     return (blocks_0_up_weight_grad_1, blocks_0_up_bias_grad, None, blocks_0_down_weight_grad_1, blocks_0_down_bias_grad, blocks_1_up_weight_grad_1, blocks_1_up_bias_grad, blocks_1_down_weight_grad_1, blocks_1_down_bias_grad, head_weight_grad_1, head_bias_grad)""",
    )


def test_free(report: GraphReport) -> None:
    assert_expected_inline(
        report.backward.diff("free"),
        """\
--- prefetch
+++ free
@@ -14,2 +14,3 @@
     t_8 = torch.ops.aten.t.default(t_7)
+    free_root = torch.ops.graph_fsdp.free.default(kept_0)
     reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default([t_8, view], torch.float32, 8, '0')
@@ -41,2 +42,3 @@
     t_16 = torch.ops.aten.t.default(t_15)
+    free_blocks_1 = torch.ops.graph_fsdp.free.default(full_blocks_1)
     reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_16, view_2, t_12, view_1], torch.float32, 8, '0')
@@ -61,2 +63,3 @@
     t_23 = torch.ops.aten.t.default(t_22)
+    free_blocks_0 = torch.ops.graph_fsdp.free.default(full_blocks_0)
     reduced_root = torch.ops.graph_fsdp.reduce_wait.default(reduce_root)""",
    )


def test_program(report: GraphReport) -> None:
    assert_expected_inline(
        str(report.backward.program),
        """\
def run(frame, args):  # backward
    kept_0, primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1, tangents_1, = args
    args.clear()
    del primals_10
    gather_blocks_1 = frame.gather_start(plan_0, [primals_6, primals_8])  # blocks.1
    del primals_6, primals_8
    inputs = [kept_0, tangents_1, add_1]
    del tangents_1, add_1
    mm, view, t_8, = region_1(inputs)
    del kept_0
    reduce_root = frame.reduce_start(plan_3, [t_8, view])  # root
    del t_8, view
    full_blocks_1 = frame.wait(gather_blocks_1)
    del gather_blocks_1
    gather_blocks_0 = frame.gather_start(plan_5, [primals_4])  # blocks.0
    del primals_4
    inputs = [full_blocks_1, mm, gelu_1, addmm_2, add]
    del mm, gelu_1, addmm_2, add
    view_1, t_12, view_2, add_2, t_16, = region_6(inputs)
    frame.free(full_blocks_1)
    del full_blocks_1
    reduce_blocks_1 = frame.reduce_start(plan_8, [t_16, view_2, t_12, view_1])  # blocks.1
    del t_16, view_2, t_12, view_1
    full_blocks_0 = frame.wait(gather_blocks_0)
    del gather_blocks_0
    inputs = [full_blocks_0, add_2, gelu, addmm, primals_3]
    del add_2, gelu, addmm, primals_3
    view_3, t_20, view_4, t_23, = region_10(inputs)
    frame.free(full_blocks_0)
    del full_blocks_0
    reduced_root = frame.wait(reduce_root)
    del reduce_root
    inputs = [reduced_root]
    del reduced_root
    head_bias_grad, head_weight_grad_1, = region_13(inputs)
    reduce_blocks_0 = frame.reduce_start(plan_14, [t_23, view_4, t_20, view_3])  # blocks.0
    del t_23, view_4, t_20, view_3
    reduced_blocks_1 = frame.wait(reduce_blocks_1)
    del reduce_blocks_1
    inputs = [reduced_blocks_1]
    del reduced_blocks_1
    blocks_1_up_bias_grad, blocks_1_down_bias_grad, blocks_1_up_weight_grad_1, blocks_1_down_weight_grad_1, = region_16(inputs)
    reduced_blocks_0 = frame.wait(reduce_blocks_0)
    del reduce_blocks_0
    inputs = [reduced_blocks_0]
    del reduced_blocks_0
    blocks_0_up_bias_grad, blocks_0_down_bias_grad, blocks_0_up_weight_grad_1, blocks_0_down_weight_grad_1, = region_18(inputs)
    return [blocks_0_up_weight_grad_1, blocks_0_up_bias_grad, None, blocks_0_down_weight_grad_1, blocks_0_down_bias_grad, blocks_1_up_weight_grad_1, blocks_1_up_bias_grad, blocks_1_down_weight_grad_1, blocks_1_down_bias_grad, head_weight_grad_1, head_bias_grad]
""",
    )
