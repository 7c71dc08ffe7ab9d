"""Checkpoints are folders, made under a temporary name and renamed when complete; the last few are kept.

[Note: what is complete]
A checkpoint is written to ``.NAME.TOKEN.partial`` and renamed by one rank, once what all ranks wrote is on the disk. So
a folder with ``.metadata`` whose name begins with no dot is complete. What an interrupted save has left is removed by
the next save of its series: names that differ in their numbers only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import AnyPath
from graph_fsdp.passes.ir.settings import check_path

METADATA = ".metadata"
HEADER = "graph_fsdp.json"
FORMAT = 2  # format 1 does not say where the bytes of tensors are
Value = TypeVar("Value")
private = functools.partial(os.open, mode=0o600)  # opens a file for the user alone, as ``opener`` of ``open``
_PARTIAL = re.compile(r"^\.(.+)\.[0-9a-f]{16}\.(partial|replaced)$")


@dataclass(frozen=True)
class Header:
    """The header holds what a checkpoint says of itself."""

    sequence: int  # one more than that of the newest checkpoint of the folder, on disk or in memory, when it was saved
    ranks: int
    torch: str = str(torch.__version__)
    format: int = FORMAT

    @classmethod
    def read(cls, path: Path) -> Header | None:
        """Read the header; None where another program wrote it. Raises CheckpointError if damaged or newer."""
        header = read_json(path / HEADER, lambda fields: cls(**fields))
        if header is not None and header.format not in (1, FORMAT):
            raise CheckpointError(
                f"{path} is of format {header.format}, and this version reads 1 and {FORMAT}; read it with the "
                "version of graph_fsdp that wrote it"
            )
        return header


def read_json(file: Path, made_of: Callable[[Any], Value]) -> Value | None:
    """Return what is made of a file's content; None where there is no file. Raises CheckpointError if damaged."""
    if not file.exists():
        return None
    try:
        return made_of(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def complete(folder: AnyPath) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first: in the order in which they were saved, whatever their
    names and hosts' clocks. Those of other programs come first, by the time of their files."""
    check_path("folder", folder)
    root = Path(folder)
    named = (path for path in root.iterdir() if not path.name.startswith(".")) if root.is_dir() else ()
    found = [path for path in named if (path / METADATA).is_file()]
    return sorted(found, key=lambda path: (sequence_of(path), (path / METADATA).stat().st_mtime_ns, path.name))


def sequence_of(path: Path) -> int:
    """Return the header's sequence; 0 where there is none or it is damaged, which ``load`` reports."""
    try:
        header = Header.read(path)
    except CheckpointError:
        return 0
    return 0 if header is None else header.sequence


def series(name: str) -> str:
    """Return what the names of a training's checkpoints have in common: all but their numbers, and what is added to one
    that stands beside for a while."""
    found = _PARTIAL.match(name)
    return re.sub(r"\d+", "#", found[1] if found else name)


def begin(path: Path, overwrite: bool, is_of_others: Callable[[Path], bool]) -> Path:
    """Make a checkpoint's temporary folder, for the user alone; remove what interrupted saves of its series left, but
    not of those checkpoints that other ranks may be saving now. Raises CheckpointError where that cannot be, or
    ``path`` is there already and not to be overwritten."""
    try:
        if not overwrite and path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise CheckpointError(f"{path} is there already; choose another name, or overwrite=True")
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.iterdir():
            found = _PARTIAL.match(other.name)
            if found and series(other.name) == series(path.name) and not is_of_others(path.parent / found[1]):
                shutil.rmtree(other, ignore_errors=True)
        temporary = hidden(path, "partial")
        temporary.mkdir(mode=0o700)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    return temporary


def commit(temporary: Path, path: Path, keep: int | None) -> None:
    """Rename a checkpoint that is complete on the disk, in place of one of the same name, and remove all but the last
    ``keep`` of its series."""
    sync(temporary)
    removed = [put_aside(path)] if path.exists() else []
    temporary.rename(path)
    sync(path.parent)
    if keep is not None:
        ours = [p for p in complete(path.parent) if series(p.name) == series(path.name) and (p / HEADER).exists()]
        removed += map(put_aside, ours[:-keep])
    for old in removed:
        shutil.rmtree(old, ignore_errors=True)


def put_aside(path: Path) -> Path:
    """Rename a checkpoint, so that it is not taken for complete while it is removed."""
    aside = hidden(path, "replaced")
    path.rename(aside)
    return aside


def hidden(path: Path, kind: str) -> Path:
    """Return a name for what stands beside a path for a while."""
    return path.parent / f".{path.name}.{secrets.token_hex(8)}.{kind}"


def sync(folder: Path) -> None:
    """Write the names in a folder to the disk before returning."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, readable by the user alone; it is on the disk afterwards."""
    with open(path, "w+b", opener=private) as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
