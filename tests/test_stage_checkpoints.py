"""Stages of a pipeline save to paths of their own, and do not disturb each other."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from facts import Facts, shared_folder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp import CheckpointError, checkpoint

FACTS = Facts(__name__)


def stage() -> nn.Module:
    """This rank's: one stage on each rank."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(dist.get_rank())
    return graph_fsdp.compile(nn.Linear(8, 8 + dist.get_rank()), mesh["dp"], backend="eager")


def save(path: Path, model: nn.Module, **options: object) -> str:
    """What it says; "" if it saves."""
    try:
        checkpoint.save(path, model, **options).result()
    except CheckpointError as error:
        return str(error)
    return ""


@FACTS
def two_stages_save_to_one_path() -> None:
    """The second to come is refused, and what the first saves stays."""
    folder, model = shared_folder(), stage()
    for options in ({}, {"overwrite": True}, {"asynchronous": True}):
        path = folder / f"path_{len(options)}" / "_".join(options)
        if dist.get_rank() == 1:
            dist.barrier()
        error = save(path, model, **options)
        if dist.get_rank() == 0:
            dist.barrier()
            assert not error
        else:
            assert f"{path} is what the model on rank 0 saves to, which is none of this model's ranks [1]" in error
            assert str(path / "stage0") in error
        if dist.get_rank() == 0:
            checkpoint.load(path, model)
        dist.barrier()
    assert not [p for p in folder.rglob("*") if "partial" in p.name]


@FACTS
def a_stage_leaves_what_another_is_saving() -> None:
    """Names that differ in numbers alone are of one series, whose interrupted saves the next one removes."""
    folder, model, rank = shared_folder(), stage(), dist.get_rank()
    under_way = folder / ".stage1_0.0123456789abcdef.partial"
    assert not save(folder / f"stage{rank}_0", model)
    if rank == 1:
        under_way.mkdir()
    dist.barrier()
    if rank == 0:
        assert not save(folder / "stage0_1", model)
        assert under_way.exists()
    dist.barrier()
    if rank == 1:
        assert not save(folder / "stage1_1", model)
        assert not under_way.exists(), "its own"
    dist.barrier()
    assert {path.name for path in folder.iterdir()} == {"stage0_0", "stage0_1", "stage1_0", "stage1_1"}
    checkpoint.load(folder / f"stage{rank}_1", model)


@FACTS
def two_stages_keep_the_last_of_one_series() -> None:
    folder, model, rank = shared_folder(), stage(), dist.get_rank()
    if rank == 1:
        dist.barrier()
    error = save(folder / f"stage{rank}_0", model, keep=1)
    if rank == 0:
        dist.barrier()
    assert ("these are those of the model on rank 0, too" in error) == (rank == 1)
    own = folder / f"stage{rank}"
    assert not save(own / "step_0", model, keep=1) and not save(own / "step_1", model, keep=1)
    assert [path.name for path in own.iterdir()] == ["step_1"]
    dist.barrier()


test_on_two_ranks = FACTS.on(2, timeout=120.0)
