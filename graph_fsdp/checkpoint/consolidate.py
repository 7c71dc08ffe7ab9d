"""Write a checkpoint's model into files that other programs read, one tensor in memory at a time.

No process group, device or model is needed. ``.safetensors`` files are written here, by the format's description
(https://huggingface.co/docs/safetensors), since the library needs all tensors in memory at once. ``.pt`` files are laid
out by ``torch.save`` with ``torch.serialization.skip_data``, and filled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from graph_fsdp import compat
from graph_fsdp.checkpoint.files import read_tensors
from graph_fsdp.checkpoint.folder import hidden, written
from graph_fsdp.checkpoint.metadata import Checkpoint, joined, nbytes_of
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import AnyPath
from graph_fsdp.initialise.state_keys import listed
from graph_fsdp.mesh import as_bytes

_BITS = {"uint": (8, 16, 32, 64), "int": (8, 16, 32, 64), "float": (16, 32, 64), "bfloat": (16,), "complex": (64,)}
_LETTERS = {"uint": "U", "int": "I", "float": "F", "bfloat": "BF", "complex": "C"}
_DTYPES = {torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_DTYPES |= {getattr(torch, f"{kind}{n}"): f"{_LETTERS[kind]}{n}" for kind, widths in _BITS.items() for n in widths}
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
    model_key: str
    entries: Mapping[str, TensorStorageMetadata]  # by the model's names
    progress: Progress

    def nbytes(self, names: Iterable[str]) -> int:
        return sum(nbytes_of(self.entries[name]) for name in names)

    def write(self, stream: BinaryIO, offsets: Mapping[str, int]) -> None:
        """Write tensors to their places in a file."""
        for name, offset in offsets.items():
            key = joined(self.model_key, name)
            value = read_tensors(self.checkpoint, [key])[key]
            if value.nbytes:
                stream.seek(offset)
                stream.write(as_bytes(value).numpy().data)
            self.progress(value.nbytes)
            del value  # before the next one is read


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
        CheckpointError: the checkpoint is not complete, a file is damaged, or there is no model under ``model_key``.
        ValueError: ``out`` or ``shard_size`` cannot be.
    """
    target = Path(out)
    if target.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"out: {target.name!r} must end with .safetensors or .pt")
    if not target.parent.is_dir():
        raise ValueError(f"out: there is no folder {str(target.parent)!r}; make it first")
    if shard_size is not None and (target.suffix == ".pt" or shard_size < 1):
        raise ValueError("shard_size is a number of bytes for .safetensors files; leave it out for .pt")
    checkpoint = Checkpoint.open(path)
    checkpoint.check_files()
    found = checkpoint.under(model_key)
    entries = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
    if not entries:
        raise CheckpointError(
            f"{path} has no tensors under {model_key!r}; its keys begin with {listed(checkpoint.roots)}: say by "
            'model_key (--model-key) which is the model\'s, such as "app.model" ("" for none)'
        )
    source = _Source(checkpoint, model_key, entries, progress)
    if target.suffix == ".pt":  # what ``torch.load`` reads as a dict; without CRC32, which it ignores
        shapes = {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}
        with _appearing(target) as stream:
            source.write(stream, compat.lay_out(stream.name, shapes))
        files = [target]
    else:
        files = _write_safetensors(source, target, shard_size)
    left_out = [name for name in found if name not in entries]
    return Consolidated(files, len(entries), source.nbytes(entries), left_out)


def _write_safetensors(source: _Source, target: Path, shard_size: int | None) -> list[Path]:
    shards = _shards(source, shard_size)
    of = len(shards)
    numbered = (target.with_name(f"{target.stem}-{at:05}-of-{of:05}.safetensors") for at in range(1, of + 1))
    files = list(numbered) if of > 1 else [target]
    for file, shard in zip(files, shards, strict=True):
        _write_shard(source, shard, file)
    if of > 1:
        weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": source.nbytes(source.entries)}, "weight_map": weight_map}
        files.append(target.with_name(f"{target.name}.index.json"))
        with _appearing(files[-1]) as stream:
            stream.write((json.dumps(index, indent=2) + "\n").encode())
    return files


def _shards(source: _Source, shard_size: int | None) -> list[list[str]]:
    """Divide the names, in order, into files that are each as full as may be."""
    shards: list[list[str]] = [[]]
    held = 0
    for name in source.entries:
        nbytes = source.nbytes([name])
        if shard_size is not None and shards[-1] and held + nbytes > shard_size:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += nbytes
    return shards


def _write_shard(source: _Source, names: Iterable[str], target: Path) -> None:
    """Write one file. Wide dtypes come first, so that each tensor begins at a multiple of its width."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name in sorted(names, key=lambda name: -source.entries[name].properties.dtype.itemsize):
        entry = source.entries[name]
        if entry.properties.dtype not in _DTYPES:
            raise ValueError(f"{name}: .safetensors has no {entry.properties.dtype}; write a .pt file")
        begins[name], end = end, end + nbytes_of(entry)
        dtype = _DTYPES[entry.properties.dtype]
        header[name] = {"dtype": dtype, "shape": list(entry.size), "data_offsets": [begins[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _appearing(target) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        source.write(stream, {name: 8 + len(text) + begin for name, begin in begins.items()})


@contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that is there when it is complete, or not at all."""
    partial = hidden(path, "partial")
    try:
        with written(partial) as stream:
            yield stream
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
