"""Write and read the files of ``torch.distributed.checkpoint``, private to the user, with sums of their bytes, under a
temporary name until all ranks have written.

[Note: where a checkpoint becomes one]
All that follows the writing of the parts happens in ``Writer.finish``, which torch.distributed.checkpoint calls on the
first rank, after all ranks have written and before any of them returns. So an error there is an error on all ranks, and
a save in the background needs no further messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from graph_fsdp import compat
from graph_fsdp.checkpoint import checksums, folder
from graph_fsdp.checkpoint.checksums import Extent, Written, by_file
from graph_fsdp.checkpoint.group import ALONE, NOT_DISTRIBUTED, Ranks
from graph_fsdp.checkpoint.hosts import remove_older
from graph_fsdp.checkpoint.metadata import Checkpoint, empty
from graph_fsdp.errors import CheckpointError
from graph_fsdp.mesh import as_bytes


class PrivateFiles(FileSystem):
    """Makes files that only the user can read."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with open(path, mode, opener=folder.private) as stream:
            yield stream


@dataclass(frozen=True)
class SummedResult(WriteResult):
    """Says what a rank has written of an entry, with the sum of its bytes and where those of a tensor are."""

    entry: Written


def _writes_plain(item: WriteItem, planner: dcp.SavePlanner) -> bool:
    data = None if item.type is WriteItemType.BYTE_IO else planner.resolve_data(item)
    return sys.byteorder == "little" and isinstance(data, Tensor) and _is_plain(data.detach())


class Writer(dcp.FileSystemWriter):
    """Writes a checkpoint into ``temporary`` and renames it to ``path`` when it is complete. ``ranks``: with the group
    that they write in. ``sequence``: see ``folder.Header``."""

    def __init__(self, temporary: Path, path: Path, ranks: Ranks, sequence: int, keep: int | None = None) -> None:
        super().__init__(temporary, single_file_per_rank=True, sync_files=True)
        self.fs = PrivateFiles()
        self.temporary, self.final, self.among, self.sequence, self.keep = temporary, path, ranks, sequence, keep

    def begin(self) -> None:
        """Do what ranks do together before they write."""

    def complete(self) -> None:
        """Do what each rank does when all have written."""
        remove_older(self.final, self.sequence)

    def abandon(self) -> None:
        """Remove what was written: a full disk gets its space back. Each rank calls it, if anything has failed."""
        if self.among.is_first:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def write_items(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> list[WriteResult]:
        written: list[WriteResult] = super().write_data(plan, planner).wait()
        return written

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        results = self.write_items(plan, planner)
        plain = {item.index for item in plan.items if _writes_plain(item, planner)}
        sums = checksums.sums_of(self.temporary, map(_extent, results))
        summed: list[WriteResult] = []
        for name in by_file(sums):
            with open(self.temporary / name, "rb") as file:
                for r in (result for result in results if _extent(result).file == name):
                    data = compat.tensor_offset(file, *_extent(r)[1:]) if r.index in plain else 0
                    entry = Written.of(sums[_extent(r)], data)
                    summed.append(SummedResult(r.index, r.size_in_bytes, r.storage_data, entry))
        future: Future[list[WriteResult]] = Future()
        future.set_result(summed)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {_extent(part): part.entry for part in itertools.chain(*results) if isinstance(part, SummedResult)}
        self.check_visible(written)
        super().finish(metadata, results)
        own = Extent(folder.METADATA, 0, (self.temporary / folder.METADATA).stat().st_size)
        written[own] = Written.of(checksums.sums_of(self.temporary, [own])[own])
        header = folder.Header(self.sequence, len(self.among.ranks))
        texts = {checksums.CHECKSUMS: checksums.as_text(written), folder.HEADER: json.dumps(dataclasses.asdict(header))}
        for name, text in texts.items():
            with folder.written(self.temporary / name) as stream:
                stream.write(text.encode())
        self.commit()

    def commit(self) -> None:
        folder.commit(self.temporary, self.final, self.keep)

    def check_visible(self, written: Iterable[Extent]) -> None:
        """Check that what the other ranks wrote is visible to this one."""
        for name, extents in by_file(written).items():
            file = self.temporary / name
            if not file.is_file() or file.stat().st_size != extents[-1].end:
                raise CheckpointError(
                    f"{file} was written by another rank and is not here in full; save to a folder that all hosts share"
                )


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint that was opened. Sums are compared when the plan is made, before any rank's tensors change."""

    def __init__(self, checkpoint: Checkpoint, verify: bool) -> None:
        super().__init__(checkpoint.path)
        self.checkpoint, self.verify = checkpoint, verify

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.checkpoint.metadata

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        if self.verify:
            self.checkpoint.check_sums(self.checkpoint.extent(item.storage_index) for item in plan.items)
        return super().prepare_local_plan(plan)

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        extents = {item: self.checkpoint.extent(item.storage_index) for item in plan.items}
        content = {name: checksums.content_of(self.checkpoint.path / name) for name in by_file(extents.values())}
        left = [item for item, at in extents.items() if not self.copied(item, at, content[at.file], planner)]
        return super().read_data(dataclasses.replace(plan, items=left), planner)

    def copied(self, item: ReadItem, extent: Extent, content: Tensor, planner: dcp.LoadPlanner) -> bool:
        """Copy the bytes of an item, if they lie together in the file and mean the same in its tensor. If not, return
        False: ``torch.load`` has to read it."""
        entry = self.checkpoint.checksums.get(extent)
        if entry is None or not entry.data or sys.byteorder != "little":
            return False
        whole, target = self.checkpoint.tensors[item.storage_index.fqn], planner.resolve_tensor(item).detach()
        sizes = next(chunk.sizes for chunk in whole.chunks if chunk.offsets == item.storage_index.offset)
        saved = torch.empty(sizes, dtype=whole.properties.dtype, device="meta")
        if target.dtype != saved.dtype or target.shape != item.lengths or not _is_plain(target):
            return False
        part = saved[tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))]
        begin = entry.data + part.storage_offset() * part.itemsize
        inside = extent.offset <= begin <= extent.end - part.nbytes
        if part.shape != item.lengths or not part.is_contiguous() or not inside:
            return False
        as_bytes(target).copy_(content[begin : begin + part.nbytes])
        planner.commit_tensor(item, target)
        return True


class FillPlanner(dcp.DefaultLoadPlanner):
    """Reads into tensors under flat keys, and never unpickles."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor in the checkpoint, and one in the model")


def read(checkpoint: Checkpoint, wanted: Mapping[str, Tensor], ranks: Ranks = ALONE, verify: bool = True) -> None:
    """Read into tensors, by their keys in the checkpoint; all ranks call it. Raises CheckpointError on all ranks if a
    file of theirs is damaged."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NOT_DISTRIBUTED)
            dcp.load(
                dict(wanted),
                storage_reader=Reader(checkpoint, verify),
                planner=FillPlanner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except (Exception, CheckpointException) as error:
        raise ranks.told(error) from error


def read_tensors(checkpoint: Checkpoint, keys: Iterable[str]) -> dict[str, Tensor]:
    """Read whole tensors to the CPU, by their keys in the checkpoint, in this process alone. Raises as ``read``."""
    found = {key: empty(checkpoint.tensors[key]) for key in keys}
    read(checkpoint, found)
    return found


class TensorAccess:
    """Gives torch.distributed.checkpoint a model's tensors as they are. An engine whose tensors it cannot write or fill
    has a method ``checkpoint_access()`` that returns an object of a derived class."""

    def to_write(self, tensor: Tensor, copy: bool = False) -> Tensor:
        """Return what is written for a tensor: one on the CPU with its values, or a DTensor of which this rank has a
        part. With ``copy``, a copy."""
        return tensor.detach().to("cpu", copy=True) if copy else tensor

    def to_fill(self, tensor: Tensor, is_state: bool) -> Tensor:
        """Return what is read into for a tensor; ``filled`` is called afterwards. ``is_state``: an optimizer's."""
        return tensor

    def filled(self, tensor: Tensor, value: Tensor) -> None:
        """Take over ``value``, which ``to_fill(tensor)`` returned and which holds what was read."""


def access_of(model: nn.Module) -> TensorAccess:
    engine = getattr(model, "_graph_fsdp", None)
    make = getattr(engine, "checkpoint_access", None)
    return TensorAccess() if make is None else make()


def _is_plain(tensor: Tensor) -> bool:
    """Say whether the bytes of a tensor's memory are its values, in order."""
    return type(tensor) is Tensor and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _extent(result: WriteResult) -> Extent:
    return Extent(result.storage_data.relative_path, result.storage_data.offset, result.storage_data.length)
