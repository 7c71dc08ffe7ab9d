"""A model's values out of a checkpoint into files that other programs read, one tensor in memory at a time.

No process group, no device and no model is needed. ``.safetensors`` files are written by this module, after the
format's description (https://huggingface.co/docs/safetensors): a library that is handed all tensors at once has to hold
them. ``.pt`` files are laid out by ``torch.save`` with ``torch.serialization.skip_data``, and filled.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from graph_fsdp import compat
from graph_fsdp.checkpoint.folder import private
from graph_fsdp.checkpoint.metadata import Checkpoint
from graph_fsdp.checkpoint.tensors import read_tensors
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import AnyPath

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Consolidated:
    files: list[Path]  # the index, where there is one, comes last
    tensors: int
    bytes: int
    left_out: list[str]  # what is no tensor, under the model's names


@dataclass(frozen=True)
class _Source:
    checkpoint: Checkpoint
    keys: Mapping[str, str]  # the model's name → key of the checkpoint

    def entry(self, name: str) -> TensorStorageMetadata:
        return self.checkpoint.tensors[self.keys[name]]

    def nbytes(self, name: str) -> int:
        entry = self.entry(name)
        return entry.size.numel() * entry.properties.dtype.itemsize

    def read(self, name: str) -> Tensor:
        return read_tensors(self.checkpoint, [self.keys[name]])[self.keys[name]]


def consolidate(
    path: AnyPath,
    out: AnyPath,
    *,
    shard_size: int | None = None,
    model_key: str = "model",
    progress: Progress = lambda nbytes: None,
) -> Consolidated:
    """Write the model of a checkpoint as one file, or as several with Hugging Face's index.

    Args:
        path: a checkpoint that graph_fsdp or ``torch.distributed.checkpoint`` has written.
        out: a file that ends with ``.safetensors`` or ``.pt``. It appears when it is complete, readable by the user.
        shard_size: bytes. A larger model becomes ``NAME-00001-of-00003.safetensors`` and so on, with
            ``NAME.safetensors.index.json``; each has one tensor at least.
        model_key: where the model is in the checkpoint; "": the model's names are the keys.
        progress: called with the bytes of each tensor that was written.

    Raises:
        CheckpointError: it is no complete checkpoint, a file is damaged, or it has no model there.
        ValueError: ``out`` or ``shard_size`` cannot be.
    """
    target = Path(out)
    if target.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"out: {target.name!r} must end with .safetensors or .pt")
    if shard_size is not None and (target.suffix == ".pt" or shard_size < 1):
        raise ValueError("shard_size is a number of bytes for .safetensors files; leave it out for .pt")
    checkpoint = Checkpoint.open(path)
    checkpoint.check_files()
    start = f"{model_key}." if model_key else ""
    entries = checkpoint.under(model_key)
    names = [name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]
    if not names:
        found = sorted({key.split(".")[0] for key in checkpoint.entries})
        raise CheckpointError(f"{path} has no tensors under {model_key!r}; its keys begin with {found}")
    source = _Source(checkpoint, {name: start + name for name in names})
    if target.suffix == ".pt":
        _write_pt(source, names, target, progress)
        files = [target]
    else:
        files = _write_safetensors(source, names, target, shard_size, progress)
    left_out = [name for name in entries if name not in source.keys]
    return Consolidated(files, len(names), sum(map(source.nbytes, names)), left_out)


def _write_safetensors(
    source: _Source, names: Sequence[str], target: Path, shard_size: int | None, progress: Progress
) -> list[Path]:
    shards = _shards(source, names, shard_size)
    if len(shards) == 1:
        _write_shard(source, names, target, progress)
        return [target]
    files = []
    weight_map: dict[str, str] = {}
    for at, shard in enumerate(shards, 1):
        file = target.with_name(f"{target.stem}-{at:05}-of-{len(shards):05}.safetensors")
        _write_shard(source, shard, file, progress)
        files.append(file)
        weight_map |= {name: file.name for name in shard}
    index = {"metadata": {"total_size": sum(map(source.nbytes, names))}, "weight_map": weight_map}
    path = target.with_name(f"{target.name}.index.json")
    with _appearing(path) as stream:
        stream.write((json.dumps(index, indent=2) + "\n").encode())
    return [*files, path]


def _shards(source: _Source, names: Sequence[str], shard_size: int | None) -> list[list[str]]:
    """In the order of names, each as full as may be."""
    shards: list[list[str]] = [[]]
    held = 0
    for name in names:
        nbytes = source.nbytes(name)
        if shard_size is not None and shards[-1] and held + nbytes > shard_size:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes
    return shards


def _write_shard(source: _Source, names: Iterable[str], target: Path, progress: Progress) -> None:
    """Wide dtypes come first, so that each tensor begins at a multiple of its width."""
    ordered = sorted(names, key=lambda name: -source.entry(name).properties.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        entry = source.entry(name)
        if entry.properties.dtype not in _DTYPES:
            raise ValueError(f"{name}: .safetensors has no {entry.properties.dtype}; write a .pt file")
        begin, end = end, end + source.nbytes(name)
        dtype = _DTYPES[entry.properties.dtype]
        header[name] = {"dtype": dtype, "shape": list(entry.size), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _appearing(target) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            _write_tensor(stream, source.read(name))
            progress(source.nbytes(name))


def _write_pt(source: _Source, names: Sequence[str], target: Path, progress: Progress) -> None:
    """What ``torch.load`` reads as a dict of tensors. The CRC32 of the records stay empty: ``torch.load`` does not look
    at them, and ``unzip`` complains."""
    with _appearing(target) as stream:
        shapes = {name: (source.entry(name).size, source.entry(name).properties.dtype) for name in names}
        offsets = compat.lay_out(stream.name, shapes)
        for name in names:
            if source.nbytes(name):
                stream.seek(offsets[name])
                _write_tensor(stream, source.read(name))
            progress(source.nbytes(name))


def _write_tensor(stream: BinaryIO, value: Tensor) -> None:
    value = value.contiguous()
    if value.nbytes:
        stream.write((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))


@contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """A file that is there when it is complete, or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "w+b", opener=private) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
