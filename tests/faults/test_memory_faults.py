"""Checkpoints in memory: all ranks of a host are killed and its memory is lost, in the middle of a training and at the
worst moments of a save; and a host without room."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from struck import assert_whole, caught, compiled, rank, start_group, step
from test_checkpoint_faults import small_disk, trained  # noqa: F401  (a fixture)
from torch.optim import AdamW

from graph_fsdp import CheckpointError, RankFailure
from graph_fsdp.checkpoint import bringing, folder, latest, load, save
from graph_fsdp.checkpoint.hosts import VARIABLE, place_of

SAVED_AT, STEPS = 2, 4


def on_own_host(root: str) -> str:
    """Each rank is a host; the folder of checkpoints on disk."""
    torch.set_num_threads(1)
    os.environ[VARIABLE] = f"{root}/host{rank_of_environment()}"
    Path(os.environ[VARIABLE]).mkdir(exist_ok=True)
    return f"{root}/runs"


def rank_of_environment() -> int:
    return int(os.environ["RANK"])


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(root: str, where: str) -> list[float]:
    """Rank 1 is killed after the last step, or in a save after it. The losses after the save before."""
    runs = on_own_host(root)
    start_group(60.0)
    model = compiled()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    save(f"{runs}/step_0", model, optimizer, extra={"step": 0})
    shards, losses, saving = list(model.parameters()), [], None
    for number in range(1, STEPS + 1):
        losses.append(step(model, optimizer))
        if number == SAVED_AT:
            saving = save(f"{runs}/step_{number}", model, optimizer, extra={"step": number}, memory=True)
    assert saving is not None and saving.done()
    if rank() == 1:
        module = {"in the exchange": bringing, "before it renames": folder}.get(where)
        if module is None:
            die()
        setattr(module, {bringing: "_send", folder: "commit"}[module], die)
    if where == "in a step":
        error = caught(lambda: step(model, optimizer))
        assert isinstance(error, RankFailure) and "rank 1" in str(error), repr(error)
    else:
        pending = save(f"{runs}/step_{STEPS}", model, optimizer, extra={"step": STEPS}, asynchronous=True, memory=True)
        error = caught(pending.result)
        assert isinstance(error, CheckpointError), repr(error)
        assert "a rank has failed" in str(error) and "rank 1: its process" in str(error)
    assert_whole(model, shards)
    return losses[SAVED_AT:]


def resumed(root: str, losses: list[float], expected: int) -> None:
    runs = on_own_host(root)
    start_group(60.0)
    model = compiled()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    path = latest(runs, model)
    assert path == place_of(runs) / f"step_{expected}", path
    assert load(path, model, optimizer) == {"step": expected}
    found = [step(model, optimizer) for _ in range(expected, STEPS)]
    assert rank() == 1 or found == losses[expected - SAVED_AT :], "with shards of both ranks; losses are rank 0's"
    save(f"{runs}/step_9", model, optimizer, memory=True)
    assert {path.name for path in place_of(runs).iterdir()} == {f"step_{expected}", "step_9"}
    assert (place_of(runs) / "step_9" / f"__{1 - rank()}_0.distcp").is_file(), "the next host has a copy again"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("in a step", SAVED_AT),
        ("in the exchange", SAVED_AT),
        pytest.param("before it renames", STEPS, marks=pytest.mark.long),
    ],
)
def test_a_host_is_lost_with_its_memory(tmp_path: Path, where: str, expected: int) -> None:
    """The other one has renamed what it has in full, where this one was about to."""
    (losses,) = run_ranks(killed, 2, str(tmp_path), where, backend=None, lost=[1])
    shutil.rmtree(tmp_path / "host1")
    run_ranks(resumed, 2, str(tmp_path), losses, expected, backend=None)


def save_without_room(root: str) -> str:
    runs = on_own_host(root)
    start_group(60.0)
    model, optimizer = trained()
    filler = Path(root, "host1", "filler")
    if rank() == 1:
        filler.write_bytes(bytes(1016 * 1024))
    pending = save(f"{runs}/step_1", model, optimizer, memory=True, asynchronous=True)
    step(model, optimizer)
    error = caught(pending.result)
    assert isinstance(error, CheckpointError), repr(error)
    assert list(place_of(runs).iterdir()) == [] and latest(runs, model) is None
    dist.barrier()
    filler.unlink(missing_ok=True)
    dist.barrier()
    save(f"{runs}/step_2", model, optimizer, memory=True)
    assert latest(runs, model) == place_of(runs) / "step_2"
    return str(error)


def test_a_host_without_room(small_disk: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "host1").symlink_to(small_disk)
    for error in run_ranks(save_without_room, 2, str(tmp_path), backend=None):
        assert "the host of rank 1 needs some" in error and "are free" in error, error
