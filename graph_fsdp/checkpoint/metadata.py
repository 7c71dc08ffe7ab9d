"""What is in a checkpoint, without running anything that it says.

``torch.distributed.checkpoint`` pickles its description of a checkpoint and the values that are not tensors. Here the
description is unpickled with its own few classes allowed and nothing else, and values with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from graph_fsdp.checkpoint import checksums
from graph_fsdp.checkpoint.folder import METADATA, Header
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import AnyPath

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"it asks for {module}.{name}, which no description of a checkpoint needs")


def read_metadata(path: Path) -> Metadata:
    """Read the description of a checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged, or it asks for something that it does not need.
    """
    file = path / METADATA
    if not file.is_file():
        what = "has no .metadata" if path.is_dir() else "is no folder"
        raise CheckpointError(f"{path} {what}: it is no checkpoint, or not a complete one")
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except Exception as error:  # what damaged pickles raise is of many types
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{file} is no description of a checkpoint")
    return metadata


@dataclass(frozen=True)
class Place:
    """Where the bytes of an entry are."""

    file: str
    offset: int
    length: int

    @property
    def span(self) -> checksums.Span:
        return self.offset, self.length


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was opened: its description, and nothing else of it is in memory."""

    path: Path
    metadata: Metadata
    header: Header | None  # None: something else has written it
    checksums: checksums.Checksums

    @classmethod
    def open(cls, path: AnyPath) -> Checkpoint:
        folder = Path(path)
        metadata = read_metadata(folder)
        return cls(folder, metadata, Header.read(folder), checksums.read(folder))

    @property
    def entries(self) -> Mapping[str, TensorStorageMetadata | BytesStorageMetadata]:
        """Key, as "model.blocks.0.weight" → what is there."""
        return self.metadata.state_dict_metadata

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return {key: entry for key, entry in self.entries.items() if isinstance(entry, TensorStorageMetadata)}

    def under(self, prefix: str) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
        """The entries below a key, by the rest of their keys. Below "" are all."""
        start = f"{prefix}." if prefix else ""
        return {key.removeprefix(start): entry for key, entry in self.entries.items() if key.startswith(start)}

    def place(self, index: MetadataIndex) -> Place:
        info = self.metadata.storage_data[index]
        name = str(info.relative_path)
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{self.path / METADATA} asks for {name}, which is not in the checkpoint")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{self.path / name} is compressed; read it by torch.distributed.checkpoint")
        return Place(name, info.offset, info.length)

    def places(self) -> dict[str, list[Place]]:
        """File → the entries in it, in order."""
        found: dict[str, list[Place]] = {}
        for index in self.metadata.storage_data:
            place = self.place(index)
            found.setdefault(place.file, []).append(place)
        return {file: sorted(places, key=lambda p: p.offset) for file, places in sorted(found.items())}

    def check_files(self) -> None:
        """Every file is there and as long as it should be. Nothing of them is read.

        Raises:
            CheckpointError: with all files that are not.
        """
        problems = []
        for name, places in self.places().items():
            file, last = self.path / name, places[-1]
            if not file.is_file():
                problems.append(f"{name} is not there")
            elif (size := file.stat().st_size) < (expected := last.offset + last.length):
                problems.append(f"{name} has {size:,} bytes and should have {expected:,}")
        if problems:
            raise CheckpointError(f"{self.path} is damaged: {'; '.join(problems)}")

    def check_sums(self, places: Iterable[Place]) -> None:
        """What was written is still there. Nothing is known of checkpoints that something else has written.

        Raises:
            CheckpointError: with the first file that has changed.
        """
        by_file: dict[str, set[Place]] = {}
        for place in places:
            by_file.setdefault(place.file, set()).add(place)
        for name, wanted in sorted(by_file.items()):
            expected = self.checksums.get(name)
            if expected is None:
                continue
            found = checksums.spans_sums(self.path / name, {place.span for place in wanted})
            wrong = sorted(span for span, total in found.items() if expected.get(span) != total)
            if wrong:
                raise CheckpointError(
                    f"{self.path / name} is damaged: {len(wrong)} of its entries are not what was written, the first "
                    f"at byte {wrong[0][0]:,}; load an older checkpoint"
                )

    def value(self, key: str) -> Any:
        """Return what is under a key: a value that is no tensor, or a tensor that was saved in one piece.

        Raises:
            CheckpointError: it is damaged, or holds objects of other classes than numbers, text, their lists and dicts,
                and tensors.
        """
        entry = self.entries[key]
        offset = torch.Size([0] * len(entry.size)) if isinstance(entry, TensorStorageMetadata) else None
        place = self.place(MetadataIndex(key, offset))
        self.check_sums([place])
        try:
            with (self.path / place.file).open("rb") as file:
                return torch.load(_part(file, place), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{key!r} of {self.path} cannot be read: {error}") from error


def _part(file: IO[bytes], place: Place) -> IO[bytes]:
    file.seek(place.offset)
    return io.BytesIO(file.read(place.length))
