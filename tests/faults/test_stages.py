"""A stage of a pipeline raises and its process goes on: the ranks of all stages learn of it in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch import run_ranks
from struck import FAULTS, caught, rank, rounds, struck
from test_exceptions import Broken, fail
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import graph_fsdp
from graph_fsdp import RankFailure
from graph_fsdp.integrations.pipelining import PipelineStage

SECONDS = 30.0  # a machine that is busy; the timeout of the process group is far longer


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return struck(self.layer(x), "forward").tanh()


class Stage(PipelineStage):
    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []  # torch 2.9 sends an int64 here and receives a float32, which gloo refuses


def pipeline(schedule: Any) -> Callable[[], None]:
    """A step of a pipeline of two stages, each on two ranks: 0 and 1, 2 and 3. Its loss is told as docs say."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    model, place = graph_fsdp.compile(Part(), mesh["dp"], backend="eager"), mesh["pp"].get_local_rank()
    stage = Stage(model, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        with stage.telling("the loss"):
            return struck(nn.functional.mse_loss(output, target), "loss")

    running = schedule(stage, 4, loss_fn=loss_fn)
    data = torch.randn(8, 16)
    return lambda: running.step(data) if place == 0 else running.step(target=data)


def is_told(step: Callable[[], None], culprit: int, where: str) -> None:
    begin = time.monotonic()
    error = caught(step)
    assert time.monotonic() - begin < SECONDS
    if rank() == culprit:
        while not isinstance(error, Broken):  # torch's stage wraps it
            assert error.__cause__ is not None, repr(error)
            error = error.__cause__
    else:
        assert type(error) is RankFailure, repr(error)
        assert f"rank {culprit} raised Broken: no such sample in {where}" in str(error)
    again = caught(step)
    assert type(again) is RankFailure and "start all ranks again" in str(again), repr(again)


def a_stage_raises_in_forward() -> None:
    step = pipeline(Schedule1F1B)
    step()
    step()
    if rank() == 2:
        FAULTS["forward"] = fail
    is_told(step, 2, "forward of stage 1")


def a_stage_raises_in_backward() -> None:
    step = pipeline(ScheduleGPipe)
    step()
    if rank() == 1:
        FAULTS["backward"] = fail
    is_told(step, 1, "backward of stage 0")


def a_loss_raises() -> None:
    step = pipeline(Schedule1F1B)
    step()
    if rank() == 3:
        FAULTS["loss"] = fail
    is_told(step, 3, "the loss of stage 1")


def a_stage_raises_while_shapes_are_found() -> None:
    step = pipeline(Schedule1F1B)
    if rank() == 2:
        FAULTS["forward"] = fail
    is_told(step, 2, "the search for shapes of stage 1")


ALONE = (
    *(a_stage_raises_in_forward, a_stage_raises_in_backward, a_loss_raises),
    a_stage_raises_while_shapes_are_found,
)


def raise_in_stages() -> None:
    """On a rank."""
    torch.set_num_threads(1)
    for function in rounds(*ALONE):
        function()


@pytest.mark.skipif(not hasattr(TorchStage, "perform_reduce_grad"), reason="gloo and torch 2.9's stages")
def test_stages_that_raise() -> None:
    run_ranks(raise_in_stages, 4, timeout=240)
