"""Read what is in a checkpoint, without running anything that it says.

``torch.distributed.checkpoint`` pickles its description of a checkpoint and the values that are not tensors. Here only
its own few classes are unpickled, and values are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from graph_fsdp.checkpoint import checksums
from graph_fsdp.checkpoint.checksums import Extent, Written, by_file
from graph_fsdp.checkpoint.folder import METADATA, Header
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import AnyPath
from graph_fsdp.initialise.state_keys import not_copied, size_mismatch
from graph_fsdp.passes.ir.settings import check_path

Entries: TypeAlias = "Mapping[str, TensorStorageMetadata | BytesStorageMetadata]"

_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"}
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"it asks for {module}.{name}, which no description of a checkpoint needs")


def joined(prefix: str, name: str) -> str:
    """Return the key of a name below another key; below "" it is the name."""
    return f"{prefix}.{name}" if prefix else name


def nbytes_of(entry: TensorStorageMetadata) -> int:
    """Return the bytes of a whole tensor."""
    return entry.size.numel() * entry.properties.dtype.itemsize


def empty(entry: TensorStorageMetadata) -> Tensor:
    """Return a tensor on the CPU, of undefined values, that an entry can be read into."""
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def unfit(name: str, entry: TensorStorageMetadata, value: Tensor) -> str | None:
    """Return why an entry cannot be read into a tensor. Floating point goes into floating point of any width."""
    saved, problem = entry.properties.dtype, size_mismatch(name, entry.size, value)
    same_kind = (saved.is_floating_point, saved.is_complex) == (value.is_floating_point(), value.is_complex())
    if problem is None and not same_kind:
        return f"{name}: {saved} in the checkpoint cannot be loaded into {value.dtype}"
    if problem is None and (lacking := not_copied(value)):
        return f"{name} is {lacking}, and cannot be read into; make it a dense tensor with memory first"
    return problem


def read_metadata(path: Path) -> Metadata:
    """Read the description of a checkpoint. Raises CheckpointError if there is none, it is damaged, or it asks for a
    class that it does not need."""
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
class Checkpoint:
    """Holds the description of a checkpoint that was opened, and nothing else of it."""

    path: Path
    metadata: Metadata
    header: Header | None  # None: another program wrote it
    checksums: Mapping[Extent, Written]  # empty, likewise

    @classmethod
    def open(cls, path: AnyPath) -> Checkpoint:
        check_path("path", path)
        folder = Path(path)
        metadata = read_metadata(folder)
        return cls(folder, metadata, Header.read(folder), checksums.read(folder))

    @property
    def entries(self) -> Entries:
        """Return key, as "model.blocks.0.weight" → what is there."""
        return self.metadata.state_dict_metadata

    @functools.cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return {key: entry for key, entry in self.entries.items() if isinstance(entry, TensorStorageMetadata)}

    @property
    def roots(self) -> list[str]:
        """Return what keys begin with, as "model"."""
        return sorted({key.split(".")[0] for key in self.entries})

    def under(self, prefix: str) -> Entries:
        """Return the entries below a key, by the rest of their keys. Below "" are all."""
        start = joined(prefix, "")
        return {key.removeprefix(start): entry for key, entry in self.entries.items() if key.startswith(start)}

    def extent(self, index: MetadataIndex) -> Extent:
        info = self.metadata.storage_data[index]
        name = str(info.relative_path)
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{self.path / METADATA} asks for {name}, which is not in the checkpoint")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{self.path / name} is compressed; read it by torch.distributed.checkpoint")
        return Extent(name, info.offset, info.length)

    def extents(self) -> dict[str, list[Extent]]:
        """Return file → the entries in it, in order."""
        return by_file(map(self.extent, self.metadata.storage_data))

    def check_files(self) -> None:
        """Check that all files are there and long enough. Raises CheckpointError with those that are not."""
        problems = []
        for name, extents in self.extents().items():
            file = self.path / name
            if not file.is_file():
                problems.append(f"{name} is not there")
            elif (size := file.stat().st_size) < (expected := extents[-1].end):
                problems.append(f"{name} has {size:,} bytes and should have {expected:,}")
        if problems:
            raise CheckpointError(f"{self.path} is damaged: {'; '.join(problems)}")

    def damaged(self, extents: Iterable[Extent]) -> list[Extent]:
        """Return the entries whose sums are not those that graph_fsdp wrote. Raises CheckpointError where a file is not
        there, or shorter."""
        if not self.checksums:
            return []
        found = []
        for extent, total in checksums.sums_of(self.path, extents).items():
            known = self.checksums.get(extent, Written(-1))
            if known != Written.of(total, known.data):
                found.append(extent)
        return found

    def check_sums(self, extents: Iterable[Extent]) -> None:
        """Raise CheckpointError with the first file of which an entry is damaged."""
        if damaged := self.damaged(extents):
            (file, extents), *_ = by_file(damaged).items()
            raise CheckpointError(
                f"{self.path / file} is damaged: {len(extents)} of its entries are not what was written, the first at "
                f"byte {extents[0].offset:,}; load an older checkpoint"
            )

    def read(self, extent: Extent) -> IO[bytes]:
        """Return what ``torch.save`` has written of an entry, in memory."""
        with (self.path / extent.file).open("rb") as file:
            file.seek(extent.offset)
            return io.BytesIO(file.read(extent.length))

    def value(self, key: str) -> Any:
        """Return what is under a key: a value that is no tensor, or a tensor that was saved in one piece. Raises
        CheckpointError if it is damaged, or has objects of other classes than numbers, text, their lists and dicts, and
        tensors."""
        entry = self.entries[key]
        offset = torch.Size([0] * len(entry.size)) if isinstance(entry, TensorStorageMetadata) else None
        extent = self.extent(MetadataIndex(key, offset))
        self.check_sums([extent])
        try:
            return torch.load(self.read(extent), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{key!r} of {self.path} cannot be read: {error}") from error
