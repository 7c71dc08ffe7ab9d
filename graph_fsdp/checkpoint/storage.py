"""How checkpoints are written and read: the files of ``torch.distributed.checkpoint``, private to the user, with sums
of their bytes, under a temporary name until all ranks have written.

[Note: where a checkpoint becomes one]
All that follows the writing of the parts happens in ``Writer.finish``, which torch.distributed.checkpoint calls on the
first rank, after all ranks have written and before any of them returns. So an error there is an error on all ranks, a
save in the background needs no more messages than one in the foreground, and there is one place where a program that
dies leaves a temporary folder and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from graph_fsdp.checkpoint import checksums, folder, tensor_bytes
from graph_fsdp.checkpoint.metadata import Checkpoint, Place
from graph_fsdp.errors import CheckpointError


class PrivateFiles(FileSystem):
    """Files and folders that only the user can read."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        opener = folder.private if "w" in mode else None
        with open(path, mode, opener=opener) as stream:
            yield stream

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)


@dataclass(frozen=True)
class SummedResult(WriteResult):
    """What a rank has written of an entry, and the sum of its bytes."""

    checksum: int


class Writer(FileSystemWriter):
    """Writes a checkpoint into ``temporary`` and renames it to ``path`` when it is complete."""

    def __init__(self, temporary: Path, path: Path, ranks: int, keep: int | None) -> None:
        super().__init__(temporary, single_file_per_rank=True, sync_files=True)
        self.fs = PrivateFiles()
        self.temporary, self.final, self.ranks, self.keep = temporary, path, ranks, keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        by_file: dict[str, list[WriteResult]] = {}
        for result in results:
            by_file.setdefault(result.storage_data.relative_path, []).append(result)
        summed: list[WriteResult] = []
        for name, parts in by_file.items():
            sums = checksums.spans_sums(self.temporary / name, [_span(part) for part in parts])
            summed += [
                SummedResult(part.index, part.size_in_bytes, part.storage_data, sums[_span(part)]) for part in parts
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(summed)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        sums: checksums.Checksums = {}
        for part in (part for parts in results for part in parts):
            assert isinstance(part, SummedResult)
            sums.setdefault(part.storage_data.relative_path, {})[_span(part)] = part.checksum
        self._check_visible(sums)
        super().finish(metadata, results)
        written = self.temporary / folder.METADATA
        sums[folder.METADATA] = checksums.spans_sums(written, [(0, written.stat().st_size)])
        header = folder.Header(folder.next_sequence(self.final.parent), self.ranks)
        folder.write_private(self.temporary / checksums.CHECKSUMS, checksums.as_text(sums))
        folder.write_private(self.temporary / folder.HEADER, header.text())
        folder.commit(self.temporary, self.final, self.keep)

    def _check_visible(self, sums: checksums.Checksums) -> None:
        """What the other ranks wrote is where this one renames."""
        for name, entries in sums.items():
            file, expected = self.temporary / name, max(offset + length for offset, length in entries)
            if not file.is_file() or file.stat().st_size != expected:
                raise CheckpointError(
                    f"{file} was written by another rank and is not here in full; save to a folder that all hosts share"
                )


class Reader(FileSystemReader):
    """Reads a checkpoint that was opened. What a rank will read is compared with its sums when the plan is made: before
    any rank reads into its tensors."""

    def __init__(self, checkpoint: Checkpoint, verify: bool) -> None:
        super().__init__(checkpoint.path)
        self.checkpoint, self.verify = checkpoint, verify

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.checkpoint.metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        if self.verify:
            self.checkpoint.check_sums(self.checkpoint.place(item.storage_index) for item in plan.items)
        return super().prepare_local_plan(plan)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Place, ReadItem]]] = {}
        for item in plan.items:
            place = self.checkpoint.place(item.storage_index)
            by_file.setdefault(place.file, []).append((place, item))
        left: list[ReadItem] = []
        for name, items in sorted(by_file.items()):
            with open(self.checkpoint.path / name, "rb", buffering=0) as file:
                for place, item in sorted(items, key=lambda found: found[0].offset):
                    if not read_straight(file, place, item, planner):
                        left.append(item)
        return super().read_data(dataclasses.replace(plan, items=left), planner)


class TensorAccess:
    """What torch.distributed.checkpoint is given for a model's tensors: themselves. An engine whose tensors it cannot
    write or fill has a method ``checkpoint_access()`` that returns an object of a class derived from this one."""

    def to_write(self, tensor: Tensor) -> Tensor:
        """What is written for a tensor: one on the CPU with its values, or a DTensor of which this rank has a part."""
        return tensor

    def to_fill(self, tensor: Tensor) -> Tensor:
        """What is read into for a tensor; then comes ``filled``."""
        return tensor

    def filled(self, tensor: Tensor, value: Tensor) -> None:
        """``value``, of ``to_fill(tensor)``, holds what was read."""


def access_of(model: nn.Module) -> TensorAccess:
    engine = getattr(model, "_graph_fsdp", None)
    make = getattr(engine, "checkpoint_access", None)
    return TensorAccess() if make is None else make()


class FillPlanner(DefaultLoadPlanner):
    """Reads into tensors under flat keys, and never unpickles."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor in the checkpoint, and one in the model")


def read_straight(file: io.FileIO, place: Place, item: ReadItem, planner: LoadPlanner) -> bool:
    """Read into the tensor itself if its bytes lie in the file as they do in memory."""
    saved = tensor_bytes.find(file, place.offset, place.length) if item.type is LoadItemType.TENSOR else None
    offset = None if saved is None else saved.part(item.storage_offsets, item.lengths)
    if saved is None or offset is None:
        return False
    target = planner.resolve_tensor(item).detach()
    if target.shape != item.lengths or not tensor_bytes.fits(target, saved.dtype):
        return False
    tensor_bytes.read_into(file, offset, target)
    planner.commit_tensor(item, target)
    return True


def _span(result: WriteResult) -> checksums.Span:
    return result.storage_data.offset, result.storage_data.length
