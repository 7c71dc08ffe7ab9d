"""Files: a save that is killed, a full disk, damaged and foreign checkpoints. The last complete one loads."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from models import MLP
from struck import Struck, assert_whole, caught, compiled, rank, start_group, step, warm
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import graph_fsdp
from graph_fsdp import CheckpointError
from graph_fsdp.checkpoint import complete, folder, latest, load, save

FLIPS = 24  # of each file


def trained(**options: object) -> tuple[nn.Module, Optimizer]:
    model = compiled(**options)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def values(model: nn.Module) -> list[Tensor]:
    """This rank's shards, copied."""
    return [value.to_local().clone() if hasattr(value, "to_local") else value.clone() for value in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# A save that is killed


def killed_between_write_and_rename(path: str, killed: int, where: str) -> str:
    """Two checkpoints; the process is killed in the second, when all of it is written."""
    torch.set_num_threads(1)
    start_group(30.0)
    model, optimizer = trained()
    shards = list(model.parameters())
    save(f"{path}/step_1", model, optimizer, extra={"step": 1})
    step(model, optimizer)
    if rank() == killed:
        setattr(folder, where, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    error = caught(lambda: save(f"{path}/step_2", model, optimizer, extra={"step": 2}))
    assert isinstance(error, CheckpointError), repr(error)
    assert_whole(model, shards)
    return str(error)


@pytest.mark.parametrize(
    "where",
    [pytest.param("commit", marks=pytest.mark.long), "sync"],
    ids=["before it is on the disk", "before it is renamed"],
)
def test_a_rank_is_killed_between_write_and_rename(tmp_path: Path, where: str) -> None:
    (error,) = run_ranks(killed_between_write_and_rename, 2, str(tmp_path), 0, where, backend=None, lost=[0])
    assert "a rank has failed" in error and "rank 0: its process" in error and "has ended" in error
    assert [path.name for path in complete(tmp_path)] == ["step_1"]
    (leftover,) = [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]
    assert (leftover / ".metadata").is_file(), "it was written in full"
    found = loads_in_one_process(latest(tmp_path))
    assert found == {"step": 1}


def loads_in_one_process(path: Path | None) -> dict[str, object]:
    assert path is not None
    model = graph_fsdp.compile(Struck(depth=3), backend="eager")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    found = load(path, model, optimizer)
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    save(path.parent / "step_9", model, optimizer)
    assert not [p for p in path.parent.iterdir() if p.name.endswith(".partial")], "the next save has removed it"
    return found


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def save_on_a_full_disk(path: str) -> str:
    torch.set_num_threads(1)
    start_group(60.0)
    model, optimizer = trained()
    save(f"{path}/step_1", model, optimizer, extra={"step": 1})
    saved = values(model)
    filler = Path(path, "filler")
    if rank() == 0:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    dist.barrier()
    step(model, optimizer)
    shards, before = list(model.parameters()), values(model)
    error = caught(lambda: save(f"{path}/step_2", model, optimizer))
    assert isinstance(error, CheckpointError), repr(error)
    assert_whole(model, shards)
    assert equal(values(model), before)
    assert [p.name for p in complete(path)] == ["step_1"]
    dist.barrier()
    assert sorted(p.name for p in Path(path).iterdir()) == ["filler", "step_1"], "nothing half written is left"
    assert load(f"{path}/step_1", model, optimizer) == {"step": 1}
    assert equal(values(model), saved)
    dist.barrier()
    if rank() == 0:
        filler.unlink()
    dist.barrier()
    step(model, optimizer)
    save(f"{path}/step_2", model, optimizer)
    return str(error)


def test_a_full_disk(small_disk: Path) -> None:
    for error in run_ranks(save_on_a_full_disk, 2, str(small_disk), backend=None):
        assert "No space left on device" in error
    assert latest(small_disk) == small_disk / "step_2"


def save_beyond_a_limit(path: str) -> str:
    """Rank 1's files may be no larger than 4 KiB."""
    torch.set_num_threads(1)
    start_group(60.0)
    model, optimizer = trained()
    save(f"{path}/step_1", model, optimizer, extra={"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    error = caught(lambda: save(f"{path}/step_2", model, optimizer))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert isinstance(error, CheckpointError), repr(error)
    assert load(f"{path}/step_1", model, optimizer) == {"step": 1}
    step(model, optimizer)
    save(f"{path}/step_2", model, optimizer)
    return str(error)


def test_a_rank_that_may_not_write_is_named_on_all(tmp_path: Path) -> None:
    for error in run_ranks(save_beyond_a_limit, 2, str(tmp_path), backend=None):
        assert "rank 1" in error and "File too large" in error, error
    assert latest(tmp_path) == tmp_path / "step_2"


# Damaged files, on one process and on two


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with an optimizer, saved by one process."""
    path = tmp_path_factory.mktemp("checkpoints") / "step_1"
    torch.manual_seed(0)
    model = graph_fsdp.compile(MLP(), backend="eager")
    optimizer = AdamW(model.parameters())
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    save(path, model, optimizer, extra={"step": 1})
    return path


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "step_2"))


def another() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(1)
    model = graph_fsdp.compile(MLP(), backend="eager")
    return model, AdamW(model.parameters())


FILES = ["__0_0.distcp", ".metadata", "checksums.json", "graph_fsdp.json"]


def refused(path: Path, *words: str) -> None:
    """It does not load, and changes nothing; its neighbour does."""
    model, optimizer = another()
    before = values(model)
    with pytest.raises(CheckpointError) as raised:
        load(path, model, optimizer)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)
    assert equal(values(model), before)
    assert not optimizer.state, "an optimizer that had no state has none"


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_file(copied: Path, checkpoint: Path, file: str) -> None:
    content = (copied / file).read_bytes()
    for length in (0, len(content) // 2, len(content) - 1):
        (copied / file).write_bytes(content[:length])
        refused(copied, file)
    model, optimizer = another()
    assert load(checkpoint, model, optimizer) == {"step": 1}


@pytest.mark.parametrize("file", FILES[:2])
def test_a_missing_file(copied: Path, file: str) -> None:
    (copied / file).unlink()
    refused(copied, file)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_noticed_or_harms_nothing(copied: Path, checkpoint: Path, file: str) -> None:
    model, optimizer = another()
    load(checkpoint, model, optimizer)
    expected = [*values(model), *_optimizer_values(optimizer)]
    content = (copied / file).read_bytes()
    at_random = random.Random(0)
    noticed = 0
    for bit in sorted(at_random.sample(range(8 * len(content)), FLIPS)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (copied / file).write_bytes(changed)
        torch.manual_seed(1)
        fresh = MLP()
        model = graph_fsdp.compile(fresh, backend="eager")
        optimizer, before = AdamW(model.parameters()), values(model)
        try:
            found = load(copied, model, optimizer)
        except CheckpointError:
            noticed += 1
            assert equal(values(model), before) and not optimizer.state, f"bit {bit}: half loaded"
        else:
            assert found == {"step": 1}, f"bit {bit}"
            assert equal([*values(model), *_optimizer_values(optimizer)], expected), f"bit {bit}: other values"
    print(f"{file}: {FLIPS} bits flipped, {noticed} noticed, the others harmless")
    assert noticed or file == "graph_fsdp.json"


def _optimizer_values(optimizer: Optimizer) -> list[Tensor]:
    found = []
    for state in optimizer.state.values():
        found += [value.clone() for _, value in sorted(state.items())]
    return found


def test_a_checkpoint_of_another_model(checkpoint: Path) -> None:
    for other, word in ((MLP(depth=3), "blocks.2.up.weight"), (MLP(width=8), "[32, 16]")):
        model = graph_fsdp.compile(other, backend="eager")
        before = values(model)
        with pytest.raises(CheckpointError) as raised:
            load(checkpoint, model, SGD(model.parameters(), lr=0.1))
        assert word in str(raised.value)
        assert equal(values(model), before)
        model(torch.ones(4, other.head.in_features)).sum().backward()


def load_what_is_damaged(path: str) -> list[str]:
    """Rank 1's file is damaged in one way after the other, and both ranks say so."""
    torch.set_num_threads(1)
    start_group(60.0)
    model, optimizer = trained()
    save(f"{path}/step_1", model, optimizer, extra={"step": 1})
    saved = values(model)
    step(model, optimizer)
    save(f"{path}/step_2", model, optimizer, extra={"step": 2})
    file = Path(path, "step_2", "__1_0.distcp")
    content = file.read_bytes()
    step(model, optimizer)
    shards, before, errors = list(model.parameters()), values(model), []
    # A bit in the middle of the first entry: of a weight.
    flipped = bytearray(content)
    flipped[len(content) // 3] ^= 1
    for damaged in (content[: len(content) // 2], bytes(flipped), None):
        dist.barrier()
        if rank() == 0:
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
        dist.barrier()
        error = caught(lambda: load(f"{path}/step_2", model, optimizer))
        assert isinstance(error, CheckpointError), repr(error)
        assert_whole(model, shards)
        assert equal(values(model), before)
        errors.append(str(error))
    assert load(f"{path}/step_1", model, optimizer) == {"step": 1}
    assert equal(values(model), saved)
    warm(model)
    return errors


def test_damaged_files_are_named_on_all_ranks(tmp_path: Path) -> None:
    for errors in run_ranks(load_what_is_damaged, 2, str(tmp_path), backend=None):
        truncated, flipped, missing = errors
        assert "__1_0.distcp has" in truncated and "bytes and should have" in truncated
        assert "__1_0.distcp is damaged" in flipped and "load an older checkpoint" in flipped
        assert "__1_0.distcp is not there" in missing
