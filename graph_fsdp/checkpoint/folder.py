"""Checkpoints as folders: made under a temporary name, renamed when complete, the last few kept.

[Note: what is complete]
A checkpoint is written to ``.NAME.TOKEN.partial`` beside its place and renamed by one rank, once all ranks have written
and what they wrote is on the disk. So a folder with ``.metadata`` that does not begin with a dot is complete, whenever
the program was stopped. What an interrupted save has left is removed by the next save of the same series: names that
differ in their numbers only.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import AnyPath

METADATA = ".metadata"
HEADER = "graph_fsdp.json"
FORMAT = 1
_PARTIAL = re.compile(r"^\.(.+)\.[0-9a-f]{16}\.(partial|replaced)$")


@dataclass(frozen=True)
class Header:
    """The header holds what a checkpoint says of itself."""

    sequence: int  # one more than that of the newest checkpoint in the folder when it was saved
    ranks: int
    torch: str = str(torch.__version__)
    format: int = FORMAT

    @classmethod
    def read(cls, path: Path) -> Header | None:
        """Read the header; None where another program wrote it. Raises CheckpointError if damaged or newer."""
        file = path / HEADER
        if not file.exists():
            return None
        try:
            header = cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if header.format != FORMAT:
            raise CheckpointError(f"{path} is of format {header.format}, and this version reads format {FORMAT}")
        return header

    def text(self) -> str:
        return json.dumps(asdict(self))


def is_complete(path: Path) -> bool:
    return not path.name.startswith(".") and (path / METADATA).is_file()


def complete(folder: AnyPath) -> list[Path]:
    """The complete checkpoints in a folder, oldest first: in the order in which they were saved, whatever their names
    and the clocks of their hosts. Those that something else has written come first, by the time of their files."""
    root = Path(folder)
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if is_complete(path)]
    return sorted(found, key=_age)


def latest(folder: AnyPath) -> Path | None:
    """The newest complete checkpoint in a folder; None where there is none, or no folder."""
    found = complete(folder)
    return found[-1] if found else None


def _age(path: Path) -> tuple[int, int, str]:
    sequence = _sequence(path)
    if sequence is None:
        return (0, (path / METADATA).stat().st_mtime_ns, path.name)
    return (1, sequence, path.name)


def _sequence(path: Path) -> int | None:
    """None where nothing says it, or what does is damaged, of which ``load`` speaks."""
    try:
        header = Header.read(path)
    except CheckpointError:
        return None
    return None if header is None else header.sequence


def series(name: str) -> str:
    """What the names of a training's checkpoints have in common: all but their numbers."""
    return re.sub(r"\d+", "#", name)


def begin(path: Path) -> Path:
    """Make the temporary folder of a checkpoint, for the user alone, and remove what interrupted saves have left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.partial"
    temporary.mkdir(mode=0o700)
    return temporary


def remove_leftovers(path: Path) -> None:
    """Remove what interrupted saves of this checkpoint's series have left."""
    for other in path.parent.iterdir():
        found = _PARTIAL.match(other.name)
        if found and series(found[1]) == series(path.name):
            shutil.rmtree(other, ignore_errors=True)  # it is in nobody's way


def next_sequence(folder: Path) -> int:
    return 1 + max((_sequence(path) or 0 for path in complete(folder)), default=0)


def commit(temporary: Path, path: Path, keep: int | None) -> None:
    """Rename a checkpoint that is complete on the disk, in place of one of the same name, and remove all but the last
    ``keep`` of its series."""
    sync(temporary)
    aside = path.parent / f"{temporary.name.removesuffix('.partial')}.replaced"
    replaces = path.exists()
    if replaces:
        path.rename(aside)
    temporary.rename(path)
    sync(path.parent)
    if replaces:
        shutil.rmtree(aside, ignore_errors=True)
    if keep is not None:
        ours = [p for p in complete(path.parent) if series(p.name) == series(path.name) and (p / HEADER).exists()]
        for old in ours[:-keep]:
            _remove(old)


def _remove(path: Path) -> None:
    """Of a checkpoint that is removed by half, nobody must think that it is complete."""
    hidden = path.parent / f".{path.name}.{secrets.token_hex(8)}.replaced"
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sync(folder: Path) -> None:
    """Write the names in a folder to the disk before returning."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Write a small file that only the user can read; it is on the disk when this returns."""
    with open(path, "w", encoding="utf-8", opener=private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def private(path: str, flags: int) -> int:
    """Open a file for the user alone: ``open`` takes this function as ``opener``."""
    return os.open(path, flags, 0o600)
