"""``finalize_backward`` reduces once for many backwards, and pipelines of torch train compiled models by it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from models import MLP
from printed import calls
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import graph_fsdp
from graph_fsdp import UnsupportedError
from graph_fsdp.integrations.pipelining import PipelineStage

ROWS, MICROBATCHES = 2, 4


def trained(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return graph_fsdp.compile(MLP(), backend="eager")


def batch(seed: int) -> Tensor:
    return torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(seed))


# Finalization by hand


def test_a_graph_of_reductions_alone(fake_group: None) -> None:
    model = trained()
    model.set_manual_backward_finalization(True)
    losses = [model(batch(i)).sum() for i in range(2)]
    for loss in losses:
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert graph_fsdp.inspect(model).kept_nbytes > 0
    assert calls(graph_fsdp.inspect(model).backward, "reduce_scatter_start") == ""
    model.finalize_backward(async_op=True).wait()
    report = graph_fsdp.inspect(model)
    assert report.kept_nbytes == 0 and all(p.grad is not None for p in model.parameters())
    captured = vars(model)["_graph_fsdp"].graphs[-1]
    assert captured.cause.kind == "finalized" and "finalize_backward() reduces" in str(report)
    assert calls(captured.views["backward"], "all_gather_start") == ""
    ordinary = trained()
    ordinary(batch(0)).sum().backward()
    reductions = calls(captured.views["backward"], "reduce_scatter_start")
    assert reductions.count("reduce_scatter_start") == calls(
        graph_fsdp.inspect(ordinary).backward, "reduce_scatter_start"
    ).count("reduce_scatter_start")


def test_what_finalization_cannot_be(fake_group: None) -> None:
    model = trained()
    with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization\(True\) before the forward"):
        model.finalize_backward()
    with pytest.raises(ValueError, match="enabled must be True or False"):
        model.set_manual_backward_finalization(1)
    with pytest.raises(UnsupportedError, match="call it on the model"):
        graph_fsdp.compile(MLP(), backend="eager").blocks[0].set_manual_backward_finalization(True)
    model.set_manual_backward_finalization(True)
    model.finalize_backward()  # before the first forward there is nothing
    model.set_manual_backward_finalization(False)
    model(batch(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters()), "each backward reduces again"


def finalized_gradients() -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    one = MLP()
    model: Any = graph_fsdp.compile(copy.deepcopy(one), mesh, backend="eager")
    for step in range(2):
        model.set_manual_backward_finalization(True)
        losses = [model(batch(step + 10 * rank + i)).square().sum() for i in range(3)]
        for loss in losses:  # as torch's stages do
            model.set_is_last_backward(False)
            model.set_reshard_after_backward(False)
            model.set_requires_gradient_sync(False)
            loss.backward()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        model.blocks[0].set_requires_gradient_sync(False)
        model.finalize_backward()
        assert all((p.grad is None) == name.startswith("blocks.0") for name, p in model.named_parameters())
        model.set_requires_gradient_sync(True)
        for p in model.parameters():
            p.grad = None
        model.finalize_backward()  # what is left
        assert all((p.grad is None) != name.startswith("blocks.0") for name, p in model.named_parameters())
        model.set_manual_backward_finalization(False)
        for other in range(2):
            for i in range(3):
                (one(batch(step + 10 * other + i)).square().sum() / 2).backward()
        for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
        for p in [*model.parameters(), *one.parameters()]:
            p.grad = None


def test_gradients_are_those_of_one_process() -> None:
    run_ranks(finalized_gradients, 2)


# Pipelines


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Stage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []  # torch 2.9 sends an int64 here and receives a float32, which gloo refuses


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def pipelines() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    for schedule_class, count in ((ScheduleGPipe, 2), (Schedule1F1B, 2), (ScheduleInterleaved1F1B, 4)):
        torch.manual_seed(0)
        parts = [Part() for _ in range(count)]
        one = nn.Sequential(*copy.deepcopy(parts))
        models = {i: graph_fsdp.compile(parts[i], mesh["dp"], backend="eager") for i in range(place, count, 2)}
        stages = [
            Stage(model, i, count, torch.device("cpu"), group=mesh.get_group("pp")) for i, model in models.items()
        ]
        several = schedule_class is ScheduleInterleaved1F1B
        schedule: Any = schedule_class(stages if several else stages[0], MICROBATCHES, loss_fn=loss_fn)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models.values()]
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(3):
            data = [torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + i)) for i in range(4)]
            inputs, target = data[replica], data[2 + replica]
            losses: list[Tensor] = []
            if place == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=target, losses=losses)
            expected = [loss_fn(one(data[i]), data[2 + i]) for i in range(2)]
            (sum(expected) / 2).backward()
            if losses:
                torch.testing.assert_close(torch.stack(losses).mean(), expected[replica])
            for i, model in models.items():
                for (name, p), q in zip(model.named_parameters(), one[i].parameters(), strict=True):
                    torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"{schedule_class}: {name}")
            for each in [*optimizers, optimizer]:
                each.step()
                each.zero_grad()
    stage = PipelineStage(models[place], place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    with pytest.raises(UnsupportedError, match="ScheduleInterleaved1F1B"):
        stage.backward_maybe_with_nosync("input", {})


def test_schedules_train_as_one_process() -> None:
    run_ranks(pipelines, 4)


def test_what_a_stage_is_not_made_of(fake_group: None) -> None:
    with pytest.raises(TypeError, match="submodule must be a model compiled by graph_fsdp, got Part"):
        PipelineStage(Part(), 0, 2, torch.device("cpu"))
