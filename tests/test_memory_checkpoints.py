"""Checkpoints in the memory of hosts: where their files are, and what is loaded when hosts have been lost. A host is a
folder here, which is emptied when the host is replaced."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from facts import Facts, shared_folder
from resuming import Training, compiled, different, odd
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from graph_fsdp import CheckpointError
from graph_fsdp.checkpoint import bringing, checksums, latest, load, save
from graph_fsdp.checkpoint.hosts import DESCRIPTION, SHARED, VARIABLE, place_of

FACTS = Facts(__name__)
EACH, PAIRS = (0, 1, 2, 3), (0, 0, 1, 1)  # rank → host
DESCRIBED = {*DESCRIPTION, SHARED}


# On ranks


@contextlib.contextmanager
def on_hosts(hosts: Sequence[int], mesh: object = None) -> Iterator[tuple[Path, Training]]:
    """A folder of checkpoints, with this host's memory beside it, and a training."""
    root = shared_folder()
    memory = root / f"host{hosts[dist.get_rank()]}"
    memory.mkdir(exist_ok=True)
    os.environ[VARIABLE] = str(memory)
    try:
        yield root / "runs", training(mesh)
    finally:
        dist.barrier()
        del os.environ[VARIABLE]


def replace_host(runs: Path, *hosts: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for host in hosts:
            shutil.rmtree(runs.parent / f"host{host}")
            (runs.parent / f"host{host}").mkdir()
    dist.barrier()


def held(runs: Path) -> dict[str, set[str]]:
    """What this host has in memory."""
    return {path.name: {file.name for file in path.iterdir()} for path in place_of(runs).iterdir()}


def files(*ranks: int) -> set[str]:
    return {f"__{rank}_0.distcp" for rank in ranks}


def training(mesh: object = None, seed: int = 0) -> Training:
    return Training(compiled(mesh), make=odd, seed=seed)


def advance(first: Training, until: int) -> None:
    """Steps of the optimizer, without a program that computes gradients."""
    while first.step < until:
        for parameter in first.model.parameters():
            parameter.grad = parameter.detach() + first.step
        first.optimizer.step()
        first.schedule.step()
        first.optimizer.zero_grad()
        first.step += 1


def resumed(runs: Path, name: str, expected: dict[str, Tensor], mesh: object = None) -> Training:
    """Another training, as of a program that starts again, which has loaded the newest and is what the first was."""
    found = training(mesh, seed=1)
    path = latest(runs, found.model)
    assert path is not None and path.name == name, path
    found.load(path)
    assert not different(found.values(), expected)
    return found


@FACTS
def every_host_that_is_lost_gets_its_part_from_the_next() -> None:
    with on_hosts(EACH) as (runs, first):
        first.train(1)
        first.save(runs / "step_1")
        first.train(2)
        first.save(runs / "step_2", memory=True)
        first.train(3)
        pending = first.save(runs / "step_3", memory=True, asynchronous=True)
        expected = first.values()
        losses = first.train(5)
        assert pending.result() == place_of(runs) / "step_3"
        rank = dist.get_rank()
        mine = DESCRIBED | files(rank, (rank - 1) % 4)
        assert held(runs) == {"step_2": mine, "step_3": mine}
        for lost in ((0,), (1,), (2, 0)):
            replace_host(runs, *lost)
            found = resumed(runs, "step_3", expected)
            first.save(runs / "step_2", memory=True, overwrite=True)  # two hosts have each part again
            found.save(runs / "step_3", memory=True, overwrite=True)
        assert latest(runs) == runs / "step_1", "without a model it looks at the disk"
        assert found.train(5) == losses


@FACTS
def where_parts_are_lost_all_ranks_load_what_is_older() -> None:
    with on_hosts(EACH) as (runs, first):
        advance(first, 1)
        first.save(runs / "step_1")
        on_disk = first.values()
        advance(first, 2)
        first.save(runs / "step_2", memory=True)
        before = first.values()
        advance(first, 3)
        first.save(runs / "step_3", memory=True)
        dist.barrier()
        if dist.get_rank() in (1, 2):  # as if only the others had come to rename it
            shutil.rmtree(place_of(runs) / "step_3")
        dist.barrier()
        resumed(runs, "step_2", before)
        replace_host(runs, 2, 3)
        found = resumed(runs, "step_1", on_disk)
        found.save(runs / "step_2", memory=True)
        assert list(held(runs)) == ["step_2"], "what nobody can load is removed"
        assert latest(runs, found.model) == place_of(runs) / "step_2"
        advance(found, 3)
        found.save(runs / "step_3")
        dist.barrier()
        assert held(runs) == {}, "what is older than the disk's gives its memory back"
        assert latest(runs, found.model) == runs / "step_3"


@FACTS
def a_save_to_disk_that_ends_later_is_not_newer() -> None:
    with on_hosts(PAIRS) as (runs, first):
        advance(first, 1)
        pending = first.save(runs / "step_1", asynchronous=True)
        first.save(runs / "step_2", memory=True, asynchronous=True).result()
        pending.result()
        assert latest(runs, first.model) == place_of(runs) / "step_2"
        assert latest(runs) == runs / "step_1"


@FACTS
def what_belongs_to_a_folder_that_was_removed_is_not_found() -> None:
    with on_hosts(PAIRS) as (runs, first):
        first.save(runs / "step_1", memory=True)
        assert latest(runs, first.model) == place_of(runs) / "step_1" and runs.is_dir()
        dist.barrier()
        if dist.get_rank() == 0:
            runs.rmdir()
        assert latest(runs, first.model) is None
        first.save(runs / "step_2", memory=True)
        assert list(held(runs)) == ["step_2"]


@FACTS
def names_of_another_series_stay() -> None:
    """As of the stages of a pipeline that save to one folder."""
    with on_hosts(PAIRS) as (runs, first):
        for step in range(3):
            first.save(runs / f"a_{step}", memory=True)
            first.save(runs / f"b_{step}", memory=True)
        assert set(held(runs)) == {"a_1", "a_2", "b_1", "b_2"}
        first.save(runs / "a_3")
        dist.barrier()
        assert set(held(runs)) == {"b_1", "b_2"}


@FACTS
def replicas_are_lost_together() -> None:
    """A shard is written by one of its replicas, and copied to the next host as any other."""
    mesh = init_device_mesh("cpu", (2, 2))
    with on_hosts(PAIRS, mesh) as (runs, first):
        advance(first, 1)
        first.save(runs / "step_1", memory=True)
        expected = first.values()
        for lost in (0, 1):
            replace_host(runs, lost)
            found = resumed(runs, "step_1", expected, mesh)
            found.save(runs / "step_1", memory=True, overwrite=True)


def cut_off(file: Path) -> None:
    os.truncate(file, 100)


def flip_a_bit_of_each_entry(file: Path) -> None:
    content = bytearray(file.read_bytes())
    for extent in checksums.by_file(checksums.read(file.parent))[file.name]:
        content[extent.offset + extent.length // 2] ^= 1
    file.write_bytes(content)


@FACTS
def a_damaged_file_is_taken_from_the_other_host() -> None:
    with on_hosts(PAIRS) as (runs, first):
        advance(first, 1)
        first.save(runs / "step_1", memory=True)
        place = place_of(runs) / "step_1"
        for damage in (cut_off, flip_a_bit_of_each_entry):
            before = {file.name: file.read_bytes() for file in place.iterdir()}
            dist.barrier()
            if dist.get_rank() == 0:
                for name in ("__0_0.distcp", SHARED):
                    damage(place / name)
            dist.barrier()
            resumed(runs, "step_1", first.values())
            assert before == {file.name: file.read_bytes() for file in place.iterdir()}, "as it was written"
            dist.barrier()


@FACTS
def a_file_that_is_damaged_on_both_hosts_is_an_error() -> None:
    with on_hosts(PAIRS) as (runs, first):
        advance(first, 1)
        first.save(runs / "step_1", memory=True)
        dist.barrier()
        if dist.get_rank() in (0, 2):
            flip_a_bit_of_each_entry(place_of(runs) / "step_1" / "__0_0.distcp")
        dist.barrier()
        second = training(seed=1)
        expected = second.values()
        with pytest.raises(CheckpointError, match=r"__0_0.distcp.*(any more|is damaged).*load an older checkpoint"):
            second.load(place_of(runs) / "step_1")
        assert not different(second.values(), expected)


@FACTS
def a_checkpoint_that_was_replaced_on_one_host_only_is_not_mixed() -> None:
    with on_hosts(PAIRS) as (runs, first):
        advance(first, 1)
        first.save(runs / "step_1", memory=True)
        place = place_of(runs)
        dist.barrier()
        if dist.get_rank() == 2:
            shutil.copytree(place / "step_1", runs.parent / "kept")
        advance(first, 2)
        first.save(runs / "step_1", memory=True, overwrite=True)
        dist.barrier()
        if dist.get_rank() == 2:  # as if its ranks had been killed before they renamed the new one
            shutil.rmtree(place / "step_1")
            shutil.move(runs.parent / "kept", place / "step_1")
        dist.barrier()
        resumed(runs, "step_1", first.values())


@FACTS
def what_is_in_memory_is_the_users() -> None:
    with on_hosts(PAIRS) as (runs, first):
        first.save(runs / "step_0", memory=True)
        place = place_of(runs)
        for path in (place.parent, place, *place.rglob("*")):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
        dist.barrier()
        place.parent.chmod(0o777)
        with pytest.raises(CheckpointError, match="belongs to another user, or others may write to it; remove it"):
            first.save(runs / "step_1", memory=True)
        assert latest(runs, first.model) is None, "nothing that others could have written is found"


@FACTS
def bad_input_is_one_error_on_all_ranks() -> None:
    with on_hosts(PAIRS) as (runs, first):
        with pytest.raises(TypeError, match=r"memory must be True, .* got 'ram'"):
            save(runs / "step_1", first.model, memory="ram")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="keep=3: memory=True keeps the last two of a series"):
            first.save(runs / "step_1", memory=True, keep=3)
        with pytest.raises(CheckpointError, match="ranks must save and load the same"):
            first.save(runs / "step_1", memory=dist.get_rank() == 1)
        first.save(runs / "step_0")
        given = None if dist.get_rank() else first.optimizer
        with pytest.raises(CheckpointError, match=r"the same: rank 1 has .*'0 optimizers'\] and rank 0 .*'1 optim"):
            save(runs / "step_1", first.model, given)
        with pytest.raises(CheckpointError, match=r"the same: rank 1 has .*'0 optimizers'\] and rank 0 .*'1 optim"):
            load(runs / "step_0", first.model, given)
        os.environ[VARIABLE] += "/missing"
        with pytest.raises(CheckpointError, match=r"missing is no folder; name one that is in memory .*GRAPH_FSDP_MEM"):
            first.save(runs / "step_1", memory=True)
        os.environ[VARIABLE] = os.environ[VARIABLE].removesuffix("/missing")
        first.save(runs / "step_1", memory=True)
        with pytest.raises(CheckpointError, match="step_1 is in memory already; choose another name, or overwrite=Tr"):
            first.save(runs / "step_1", memory=True)
        path = latest(runs, first.model)
        assert path is not None
        with pytest.raises(CheckpointError, match=r"size mismatch|Missing key|Unexpected key"):
            Training(compiled()).load(path)
        replace_host(runs, 0, 1)
        with pytest.raises(CheckpointError, match=r"step_1 is in the memory of no hosts in full; load what latest"):
            first.load(path)


@FACTS
def an_error_in_the_background_is_told() -> None:
    with on_hosts(PAIRS) as (runs, first):
        first.save(runs / "step_1", memory=True)
        reserved = bringing.reserved

        def full(file: Path, size: int) -> Tensor:
            return reserved(file, size * 10**12)

        if dist.get_rank() == 3:
            bringing.reserved = full
        try:
            first.save(runs / "step_2", memory=True, asynchronous=True)
            with pytest.raises(
                CheckpointError, match=r"partial, of .* bytes: (No space left on device|File too large)"
            ):
                first.save(runs / "step_3", memory=True)
        finally:
            bringing.reserved = reserved
        dist.barrier()
        assert list(held(runs)) == ["step_1"]
        first.save(runs / "step_3", memory=True)


test_on_four_ranks = FACTS.on(4)
