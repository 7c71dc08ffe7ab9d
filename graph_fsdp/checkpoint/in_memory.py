"""Write a checkpoint into the memory of two hosts, and get back what a host has lost of one (see [Note: a checkpoint in
memory] in ``hosts.py``)."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from graph_fsdp.checkpoint import folder
from graph_fsdp.checkpoint.bringing import bring
from graph_fsdp.checkpoint.checksums import Extent, by_file
from graph_fsdp.checkpoint.files import FillPlanner, Writer
from graph_fsdp.checkpoint.group import Ranks
from graph_fsdp.checkpoint.hosts import (
    DESCRIPTION,
    SHARED,
    Survey,
    by_host,
    generations,
    identity,
    make,
    place_of,
    remove_all_but,
    sizes_of,
    whole,
)
from graph_fsdp.checkpoint.metadata import Checkpoint
from graph_fsdp.errors import CheckpointError

_ENTRY_BYTES = 4096  # at most, of what torch.save writes around the bytes of a tensor, and of an entry that is none


def prepare(path: Path, seen: Survey, overwrite: bool) -> str:
    """Make room on this host for a checkpoint in memory, and return a name for it until it is complete. The newest of
    its series that is whole stays. Raises CheckpointError where it cannot be written."""
    of_series = [g for g in seen.generations if folder.series(g.name) == folder.series(path.name)]
    kept = of_series[-1] if of_series else None
    if kept is not None and kept.name == path.name and not overwrite:
        raise CheckpointError(f"{path.name} is in memory already; choose another name, or overwrite=True")
    place = place_of(path.parent)
    make(place)
    remove_all_but(place, path.name, kept)
    return folder.hidden(path, "partial").name


class MemoryWriter(Writer):
    """Writes a checkpoint to this host's memory, has it copied to the next host's, and renames it when all hosts have
    all that they should. ``ranks``: with a group for the thread that writes."""

    def __init__(self, name: str, path: Path, ranks: Ranks, sequence: int) -> None:
        place = place_of(path.parent)
        self.folder = path.parent  # on disk
        super().__init__(place / name, place / path.name, ranks, sequence)
        self.hosts: list[list[int]] = []  # indices of ranks
        self.room: list[int] = []  # bytes, of each rank's host

    def begin(self) -> None:
        """Look where the ranks are. They call it together."""
        place = self.temporary.parent
        with self.among.agreeing([]):
            if self.among.is_first:
                self.folder.mkdir(parents=True, exist_ok=True)
            self.temporary.mkdir(mode=0o700, exist_ok=True)
            mine = identity(place), shutil.disk_usage(place).free
        everyone = self.among.gather(mine)
        self.hosts = list(by_host([host for host, _ in everyone]).values())
        self.room = [room for _, room in everyone]
        if len(self.hosts) == 1 and self.among.is_first:
            warnings.warn(
                f"memory=True: all ranks share {place}, so that what is there outlives their processes and not their "
                "host",
                stacklevel=1,
            )

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Check on the first rank, which has all plans, that each host has room for its part."""
        shared = sum(map(_size, (item for plan in plans for item in plan.items if not _is_shard(item))))
        shards = [sum(_size(item) for item in plan.items if _is_shard(item)) for plan in plans]
        for at, members in enumerate(self.hosts):
            copied = self.hosts[at - 1] if len(self.hosts) > 1 else []
            needed, room = shared + sum(shards[i] for i in (*members, *copied)), self.room[members[0]]
            if needed > room:
                raise CheckpointError(
                    f"memory=True: the host of rank {self.among.ranks[members[0]]} needs some {needed:,} bytes in "
                    f"{self.temporary.parent}, where {room:,} are free; make its file system larger, or save to disk"
                )
        return super().prepare_global_plan(plans)

    def write_items(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> list[WriteResult]:
        """Write the first rank's values that are no shards, which all ranks read, to a file of their own."""
        shared = [item for item in plan.items if not _is_shard(item)]
        if not self.among.is_first or not shared:
            return super().write_items(plan, planner)
        results = super().write_items(dataclasses.replace(plan, items=shared), planner)
        for name in {result.storage_data.relative_path for result in results}:
            (self.temporary / name).rename(self.temporary / SHARED)
        places = [dataclasses.replace(result.storage_data, relative_path=SHARED) for result in results]
        results = [dataclasses.replace(r, storage_data=place) for r, place in zip(results, places, strict=True)]
        shards = [item for item in plan.items if _is_shard(item)]
        return results + (super().write_items(dataclasses.replace(plan, items=shards), planner) if shards else [])

    def check_visible(self, written: Any) -> None:
        """Do nothing: files of other hosts are not here."""

    def commit(self) -> None:
        """Do nothing: other hosts have no copies yet."""

    def complete(self) -> None:
        bring(self.among, self.temporary, (*DESCRIPTION, SHARED))
        at, place = next((at, m.index(self.among.index)) for at, m in enumerate(self.hosts) if self.among.index in m)
        copied, members = self.hosts[at - 1] if len(self.hosts) > 1 else [], self.hosts[at]
        beginnings = tuple(f"__{index}_" for n, index in enumerate(copied) if n % len(members) == place)
        bring(self.among, self.temporary, [n for n in sizes_of(self.temporary) if n.startswith(beginnings)])
        with self.among.agreeing([]):
            if not place:
                folder.commit(self.temporary, self.final, None)

    def abandon(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)


def _is_shard(item: WriteItem) -> bool:
    return item.type == WriteItemType.SHARD


def _size(item: WriteItem) -> int:
    """Return the bytes that an item will take, at most."""
    if item.tensor_data is None:
        return _ENTRY_BYTES
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize + _ENTRY_BYTES


def bring_values(ranks: Ranks, path: Path, own: str, verify: bool) -> None:
    """Get what each rank reads of a checkpoint in memory but for tensors: the description, what is no shard, and the
    entries below ``own``."""
    with ranks.agreeing([f"in memory: {path.parent.name}/{path.name}"]):
        make(path.parent)
        here = generations(path.parent)
    found = [generation for generation in whole(ranks.gather(here)) if generation.name == path.name]
    if not found:
        raise CheckpointError(f"{path} is in the memory of no hosts in full; load what latest(folder, model) returns")
    with ranks.agreeing([]):
        if found[-1] not in here:  # one of this name that was about to be replaced
            shutil.rmtree(path, ignore_errors=True)
    bring(ranks, path, (*DESCRIPTION, SHARED))
    with ranks.agreeing([]):
        checkpoint = Checkpoint.open(path)
        extents = {index: checkpoint.extent(index) for index in checkpoint.metadata.storage_data}
        read = [at for index, at in extents.items() if index.fqn.startswith(f"{own}.") or at.file == SHARED]
    _bring_entries(ranks, checkpoint, read, verify)


def bring_tensors(ranks: Ranks, checkpoint: Checkpoint, wanted: Mapping[str, Tensor], verify: bool) -> None:
    """Get the files from which this rank will read."""
    with ranks.agreeing([]):
        planner = FillPlanner()
        planner.set_up_planner(dict(wanted), checkpoint.metadata, False)
        read = [checkpoint.extent(item.storage_index) for item in planner.create_local_plan().items]
    _bring_entries(ranks, checkpoint, read, verify)


def _bring_entries(ranks: Ranks, checkpoint: Checkpoint, extents: Collection[Extent], verify: bool) -> None:
    """Get the files of entries. With ``verify``, one whose bytes have changed on this host comes from another."""
    bring(ranks, checkpoint.path, by_file(extents))
    if not verify:
        return
    with ranks.agreeing([]):
        damaged = checkpoint.damaged(extents)
    with ranks.agreeing([]):  # now that no rank of the host reads them
        for file in by_file(damaged):
            (checkpoint.path / file).unlink(missing_ok=True)
    bring(ranks, checkpoint.path, by_file(damaged))
    with ranks.agreeing([]):
        checkpoint.check_sums(damaged)
