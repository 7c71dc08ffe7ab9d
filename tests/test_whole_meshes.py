"""``regions="whole"`` on meshes that replicate, and resharded to smaller groups: the graphs as text."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from functional import FunctionalBackend
from test_whole import lines_with, report_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from graph_fsdp.runtime.backends import BACKENDS

pytestmark = pytest.mark.usefixtures("fake_group")


@pytest.fixture(autouse=True)
def functional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "functional", FunctionalBackend)


def test_hybrid_sharding_reduces_twice() -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    report = report_of(nn.Linear(16, 8, bias=False), mesh, mp_policy=policy)
    text = lines_with(report, "backward", "_c10d_functional", "div")
    for dim, name in enumerate(("replicas", "shards")):
        text = text.replace(f"'{mesh.get_group(dim).group_name}'", name)
    assert_expected_inline(
        text,
        """\
div_tensor = torch.ops.aten.div.Tensor(reshape_default_1, 4.0)
reduce_root = torch.ops._c10d_functional.reduce_scatter_tensor.default(div_tensor, 'sum', 4, shards)
reduced_root = torch.ops._c10d_functional.wait_tensor.default(reduce_root)
replicate_root = torch.ops._c10d_functional.all_reduce.default(reduced_root, 'sum', replicas)
replicated_root = torch.ops._c10d_functional.wait_tensor.default(replicate_root)
div_tensor_1 = torch.ops.aten.div.Tensor(replicated_root, 2.0)
convert_element_type_default_1 = torch.ops.prims.convert_element_type.default(div_tensor_1, torch.float32)""",
    )


def test_replicated_gradients_are_all_reduced() -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("replicate",))
    report = report_of(nn.Linear(16, 8), mesh)
    assert_expected_inline(
        str(report.backward.program),
        """\
def forward(primals_3, tangents_1):
    t_1 = torch.ops.aten.t.default(tangents_1)
    mm = torch.ops.aten.mm.default(t_1, primals_3)
    t_2 = torch.ops.aten.t.default(mm)
    sum_1 = torch.ops.aten.sum.dim_IntList(tangents_1, [0], True)
    view = torch.ops.aten.view.default(sum_1, [8])
    t_3 = torch.ops.aten.t.default(t_2)
    reshape_default = torch.ops.aten.reshape.default(t_3, [-1])
    reshape_default_1 = torch.ops.aten.reshape.default(view, [-1])
    cat_default = torch.ops.aten.cat.default([reshape_default, reshape_default_1], 0)
    reduce_root = torch.ops._c10d_functional.all_reduce.default(cat_default, 'avg', '0')
    reduced_root = torch.ops._c10d_functional.wait_tensor.default(reduce_root)
    weight_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 0, 128)
    bias_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 128, 136)
    weight_grad_1 = torch.ops.aten.view.default(weight_grad, [8, 16])
    return (weight_grad_1, bias_grad, None)
""",
    )


def test_a_smaller_group_keeps_its_ranks_chunks() -> None:
    report = report_of(nn.Linear(16, 8), reshard_after_forward=2)
    assert_expected_inline(
        str(report.forward.program),
        """\
def forward(primals_3, shards_gather_root):
    gather_root = torch.ops._c10d_functional.all_gather_into_tensor.default(shards_gather_root, 8, '0')
    full_root = torch.ops._c10d_functional.wait_tensor.default(gather_root)
    reshape_default = torch.ops.aten.reshape.default(full_root, [8, 32])
    slice_tensor = torch.ops.aten.slice.Tensor(reshape_default, 1, 0, 16)
    reshape_default_1 = torch.ops.aten.reshape.default(slice_tensor, [-1])
    weight_1 = torch.ops.aten.view.default(reshape_default_1, [8, 16])
    t = torch.ops.aten.t.default(weight_1)
    reshape_default_2 = torch.ops.aten.reshape.default(full_root, [8, 32])
    slice_tensor_1 = torch.ops.aten.slice.Tensor(reshape_default_2, 1, 16, 17)
    reshape_default_3 = torch.ops.aten.reshape.default(slice_tensor_1, [-1])
    addmm = torch.ops.aten.addmm.default(reshape_default_3, primals_3, t)
    reshape_default_4 = torch.ops.aten.reshape.default(full_root, [8, 32])
    slice_tensor_2 = torch.ops.aten.slice.Tensor(reshape_default_4, 1, 0, 16)
    reshape_default_5 = torch.ops.aten.reshape.default(slice_tensor_2, [-1])
    slice_tensor_3 = torch.ops.aten.slice.Tensor(reshape_default_5, 0, 0, 64)
    reshape_default_6 = torch.ops.aten.reshape.default(full_root, [8, 32])
    slice_tensor_4 = torch.ops.aten.slice.Tensor(reshape_default_6, 1, 16, 17)
    reshape_default_7 = torch.ops.aten.reshape.default(slice_tensor_4, [-1])
    slice_tensor_5 = torch.ops.aten.slice.Tensor(reshape_default_7, 0, 0, 4)
    constant_pad_nd_default = torch.ops.aten.constant_pad_nd.default(slice_tensor_5, [0, 60])
    cat_default = torch.ops.aten.cat.default([slice_tensor_3, constant_pad_nd_default])
    return (addmm, cat_default, primals_3)
""",
    )
    assert_expected_inline(
        lines_with(report, "backward", "def forward", "_c10d_functional"),
        """\
def forward(shard_0, primals_3, tangents_1):
reduce_root = torch.ops._c10d_functional.reduce_scatter_tensor.default(reshape_default_2, 'avg', 8, '0')
reduced_root = torch.ops._c10d_functional.wait_tensor.default(reduce_root)""",
    )
