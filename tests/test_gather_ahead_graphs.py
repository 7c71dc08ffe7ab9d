"""``distribute_optimizer(gather_ahead=…)``: graphs, and what is refused, on a fake process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP
from test_gather_ahead import UNITS, adamw, compiled
from torch import optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import graph_fsdp
from graph_fsdp import UnsupportedError
from graph_fsdp.parameters.shards import Storage
from graph_fsdp.report.report import engine_of

pytestmark = pytest.mark.usefixtures("fake_group")


def test_the_forward_has_the_first_units_as_inputs() -> None:
    model, plain = compiled(), compiled()
    optimizer = graph_fsdp.distribute_optimizer(adamw(model), gather_ahead=1)
    for trained in (model, plain):
        trained(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    first, second = (graph_fsdp.inspect(m).forward.buckets for m in (model, plain))
    assert [row.name for row in first if row.kind == "gather"] == [r.name for r in second if r.kind == "gather"][1:]


def test_the_printed_graphs_take_the_whole_unit_and_gather_the_others() -> None:
    model = graph_fsdp.compile(MLP(1), backend="eager", auto_wrap_policy=UNITS)
    graph_fsdp.distribute_optimizer(adamw(model), gather_ahead=1)
    model(torch.ones(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    bodies = [view.stages["slots"].body for view in (report.forward, report.backward)]
    assert_expected_inline(
        "\n".join(bodies),
        """\
def forward(primals_1, primals_2, primals_3, primals_4, primals_5, primals_6, primals_7, whole_blocks_0_up_weight, whole_blocks_0_up_bias):
    gather_blocks_0_down = torch.ops.graph_fsdp.all_gather_start.default([primals_4, primals_5], [0, 64], 80, torch.float32, 8, '0')
    t = torch.ops.aten.t.default(whole_blocks_0_up_weight)
    addmm = torch.ops.aten.addmm.default(whole_blocks_0_up_bias, primals_3, t)
    gelu = torch.ops.aten.gelu.default(addmm)
    full_blocks_0_down = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_0_down)
    gather_head = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_7], [0, 16], 32, torch.float32, 8, '0')
    blocks_0_down_weight = torch.ops.aten.slice.Tensor(full_blocks_0_down, 0, 0, 512)
    blocks_0_down_weight_1 = torch.ops.aten.view.default(blocks_0_down_weight, [16, 32])
    t_1 = torch.ops.aten.t.default(blocks_0_down_weight_1)
    blocks_0_down_bias = torch.ops.aten.slice.Tensor(full_blocks_0_down, 0, 512, 528)
    addmm_1 = torch.ops.aten.addmm.default(blocks_0_down_bias, gelu, t_1)
    add = torch.ops.aten.add.Tensor(primals_3, addmm_1)
    free_blocks_0_down = torch.ops.graph_fsdp.free.default(full_blocks_0_down)
    full_head = torch.ops.graph_fsdp.all_gather_wait.default(gather_head)
    head_weight = torch.ops.aten.slice.Tensor(full_head, 0, 0, 128)
    head_weight_1 = torch.ops.aten.view.default(head_weight, [8, 16])
    head_weight_2 = torch.ops.aten.slice.Tensor(head_weight_1, 0, 0, 5)
    t_2 = torch.ops.aten.t.default(head_weight_2)
    head_bias = torch.ops.aten.slice.Tensor(full_head, 0, 128, 136)
    head_bias_1 = torch.ops.aten.slice.Tensor(head_bias, 0, 0, 5)
    addmm_2 = torch.ops.aten.addmm.default(head_bias_1, add, t_2)
    return (addmm_2, full_head, primals_3, primals_4, primals_6, addmm, gelu, add)

def forward(kept_0, primals_3, primals_4, primals_6, addmm, gelu, add, tangents_1):
    gather_blocks_0_down = torch.ops.graph_fsdp.all_gather_start.default([primals_4], [0], 80, torch.float32, 8, '0')
    head_weight = torch.ops.aten.slice.Tensor(kept_0, 0, 0, 128)
    head_weight_1 = torch.ops.aten.view.default(head_weight, [8, 16])
    head_weight_2 = torch.ops.aten.slice.Tensor(head_weight_1, 0, 0, 5)
    t_2 = torch.ops.aten.t.default(head_weight_2)
    t_3 = torch.ops.aten.t.default(t_2)
    mm = torch.ops.aten.mm.default(tangents_1, t_3)
    t_4 = torch.ops.aten.t.default(tangents_1)
    mm_1 = torch.ops.aten.mm.default(t_4, add)
    t_5 = torch.ops.aten.t.default(mm_1)
    sum_1 = torch.ops.aten.sum.dim_IntList(tangents_1, [0], True)
    view = torch.ops.aten.view.default(sum_1, [5])
    t_6 = torch.ops.aten.t.default(t_5)
    free_head = torch.ops.graph_fsdp.free.default(kept_0)
    reduce_head = torch.ops.graph_fsdp.reduce_scatter_start.default([t_6, view], torch.float32, 8, '0')
    full_blocks_0_down = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_0_down)
    blocks_0_down_weight = torch.ops.aten.slice.Tensor(full_blocks_0_down, 0, 0, 512)
    blocks_0_down_weight_1 = torch.ops.aten.view.default(blocks_0_down_weight, [16, 32])
    t_1 = torch.ops.aten.t.default(blocks_0_down_weight_1)
    t_7 = torch.ops.aten.t.default(t_1)
    mm_2 = torch.ops.aten.mm.default(mm, t_7)
    t_8 = torch.ops.aten.t.default(mm)
    mm_3 = torch.ops.aten.mm.default(t_8, gelu)
    t_9 = torch.ops.aten.t.default(mm_3)
    sum_2 = torch.ops.aten.sum.dim_IntList(mm, [0], True)
    view_1 = torch.ops.aten.view.default(sum_2, [16])
    t_10 = torch.ops.aten.t.default(t_9)
    gelu_backward = torch.ops.aten.gelu_backward.default(mm_2, addmm)
    free_blocks_0_down = torch.ops.graph_fsdp.free.default(full_blocks_0_down)
    reduce_blocks_0_down = torch.ops.graph_fsdp.reduce_scatter_start.default([t_10, view_1], torch.float32, 8, '0')
    t_11 = torch.ops.aten.t.default(gelu_backward)
    mm_4 = torch.ops.aten.mm.default(t_11, primals_3)
    t_12 = torch.ops.aten.t.default(mm_4)
    sum_3 = torch.ops.aten.sum.dim_IntList(gelu_backward, [0], True)
    view_2 = torch.ops.aten.view.default(sum_3, [32])
    t_13 = torch.ops.aten.t.default(t_12)
    reduced_head = torch.ops.graph_fsdp.reduce_wait.default(reduce_head)
    head_weight_grad = torch.ops.aten.slice.Tensor(reduced_head, 0, 0, 16)
    head_bias_grad = torch.ops.aten.slice.Tensor(reduced_head, 0, 16, 17)
    head_weight_grad_1 = torch.ops.aten.view.default(head_weight_grad, [1, 16])
    reduce_blocks_0_up = torch.ops.graph_fsdp.reduce_scatter_start.default([t_13, view_2], torch.float32, 8, '0')
    reduced_blocks_0_down = torch.ops.graph_fsdp.reduce_wait.default(reduce_blocks_0_down)
    blocks_0_down_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0_down, 0, 0, 64)
    blocks_0_down_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0_down, 0, 64, 66)
    blocks_0_down_weight_grad_1 = torch.ops.aten.view.default(blocks_0_down_weight_grad, [2, 32])
    reduced_blocks_0_up = torch.ops.graph_fsdp.reduce_wait.default(reduce_blocks_0_up)
    blocks_0_up_weight_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0_up, 0, 0, 64)
    blocks_0_up_bias_grad = torch.ops.aten.slice.Tensor(reduced_blocks_0_up, 0, 64, 68)
    blocks_0_up_weight_grad_1 = torch.ops.aten.view.default(blocks_0_up_weight_grad, [4, 16])
    return (blocks_0_up_weight_grad_1, blocks_0_up_bias_grad, None, blocks_0_down_weight_grad_1, blocks_0_down_bias_grad, head_weight_grad_1, head_bias_grad)
""",  # noqa: E501
    )


def test_what_cannot_be_gathered_ahead_is_said_before_anything_changes() -> None:
    mesh = init_device_mesh("cpu", (8,))
    model = compiled(mesh=mesh)
    give = graph_fsdp.distribute_optimizer
    for wrong in (True, -1, 1.5, "all"):
        with pytest.raises(ValueError, match="gather_ahead must be a number of units, 0 for none, got"):
            give(adamw(model), gather_ahead=wrong)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"gather_ahead=1 is for .*in_backward=True has nothing left to step"):
        give(adamw(model), gather_ahead=1, in_backward=True)
    with pytest.raises(UnsupportedError, match=r"gather_ahead=1 is for .*and Muon is none of torch's"):
        give(optim.Muon([p for p in model.parameters() if p.dim() == 2]), gather_ahead=1)
    placed = compiled(mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    optimizer = adamw(placed)
    with pytest.raises(UnsupportedError, match=r"gather_ahead=1 is not available .*another dimension.*; leave it out"):
        give(optimizer, gather_ahead=1)
    assert type(optimizer) is optim.AdamW
    assert type(give(optimizer)) is not optim.AdamW, "it was not distributed"


@pytest.mark.parametrize("reverse", [False, True])
def test_models_are_gathered_in_the_order_of_the_parameters(monkeypatch: pytest.MonkeyPatch, reverse: bool) -> None:
    """Whatever the order is in which a rank's set holds the models."""
    models = [compiled(), compiled()]
    storages = [engine_of(model).storage for model in models]
    monkeypatch.setattr(Storage, "installed", storages[::-1] if reverse else storages)
    parameters = [p for model in models for p in model.parameters()]
    optimizer = graph_fsdp.distribute_optimizer(optim.AdamW(parameters, foreach=True), gather_ahead=1)
    started: list[int] = []
    for place, storage in enumerate(storages):
        start = storage.updates.start_ahead

        def noted(units: Sequence[str], place: int = place, start: Callable[..., Any] = start) -> Any:
            started.append(place)
            return start(units)

        monkeypatch.setattr(storage.updates, "start_ahead", noted)
    for model in models:
        model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    assert started == [0, 1]
