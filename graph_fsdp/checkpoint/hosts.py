"""Each host has a folder for checkpoints in memory; ranks that see the same one are of one host.

[Note: a checkpoint in memory]
It is a checkpoint as on disk, but its files are spread over hosts. The description, and what is no shard, is on each of
them; what a host's ranks have written is there and on the next host. So each shard is on two hosts, of which one may be
lost. A checkpoint counts if every file of it is on some host.

A host renames it when all hosts have said that they have their files. The one before stays until the next save begins,
on all hosts alike; whatever else is there is removed then. So at most two are there at any time. Ranks that are killed
while some have renamed it and others not leave the one before whole, as before.

The newest is that of the highest ``sequence`` in its header, which counts saves on disk and in memory together.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import shutil
import socket
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from graph_fsdp.checkpoint import checksums
from graph_fsdp.checkpoint.checksums import CHECKSUMS, by_file
from graph_fsdp.checkpoint.folder import HEADER, METADATA, complete, put_aside, sequence_of, series
from graph_fsdp.checkpoint.group import Ranks
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import AnyPath
from graph_fsdp.runtime.ranks.failure import kernel_of_host

VARIABLE = "GRAPH_FSDP_MEMORY"
DESCRIPTION = (METADATA, CHECKSUMS, HEADER)
SHARED = "shared.distcp"  # what is no shard

# Folder of checkpoints on disk → the last sequence that this process has given to a save, complete or not.
_given: dict[Path, int] = {}


def _root() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    return Path(os.environ.get(VARIABLE) or "/dev/shm") / f"graph_fsdp-{user}"


def place_of(folder: AnyPath) -> Path:
    """Return where this host keeps the checkpoints in memory that belong to a folder of checkpoints on disk."""
    return _root() / hashlib.sha256(os.path.abspath(folder).encode()).hexdigest()[:16]


def is_in_memory(path: AnyPath) -> bool:
    return Path(os.path.abspath(path)).parent.parent == Path(os.path.abspath(_root()))


def make(place: Path) -> None:
    """Make a place, for the user alone. Raises CheckpointError where there is nothing to make it in, or others could
    write to it."""
    root = _root()
    if not root.parent.is_dir():
        raise CheckpointError(
            f"memory=True: {root.parent} is no folder; name one that is in memory (a tmpfs) in the environment "
            f"variable {VARIABLE}"
        )
    try:
        for folder in (root, place):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    if not _is_own(place):
        raise CheckpointError(
            f"memory=True: {root} belongs to another user, or others may write to it; remove it, or name another "
            f"folder in the environment variable {VARIABLE}"
        )


def _is_own(place: Path) -> bool:
    """Say whether nobody else could have written what is in a place."""
    return all(_is_users(folder) for folder in (place.parent, place))


def _is_users(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return stat.S_ISDIR(status.st_mode) and own and not status.st_mode & others


def identity(place: Path) -> str:
    """Return what ranks that see the same folder have in common, and no others. The folder is there."""
    status = place.stat()
    return f"{socket.gethostname()} {kernel_of_host()[0]} {status.st_dev} {status.st_ino}"


@dataclass(frozen=True, order=True)
class Generation:
    """Names a checkpoint in memory: two with equal names may be of two saves."""

    sequence: int
    name: str
    digest: str  # of its sums


def files_in(path: Path) -> dict[str, int]:
    """Return name → bytes of the whole files of a checkpoint that are here; of all, while its sums are not."""
    held = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()} if path.is_dir() else {}
    expected = sizes_of(path)
    return {name: size for name, size in held.items() if expected.get(name, size) == size}


def sizes_of(path: Path) -> dict[str, int]:
    """Return name → bytes of all files of a checkpoint, here or not, by its sums; empty where these are not here."""
    try:
        return {name: extents[-1].end for name, extents in by_file(checksums.read(path)).items()}
    except CheckpointError:
        return {}


# Of each checkpoint: its files that are on a host, and how many it has.
Held: TypeAlias = "dict[Generation, tuple[frozenset[str], int]]"


def generations(place: Path) -> Held:
    """Return the checkpoints that are here: the files of each that are here, and how many it has. What others could
    have written is nobody's."""
    found = {}
    for path in sorted(place.iterdir()) if _is_own(place) else ():
        with contextlib.suppress(OSError):  # another rank, or a thread, may be removing it
            sizes = {} if path.name.startswith(".") else sizes_of(path)
            sequence = sequence_of(path)
            if sizes and sequence:
                digest = hashlib.sha256((path / CHECKSUMS).read_bytes()).hexdigest()
                found[Generation(sequence, path.name, digest)] = (frozenset(files_in(path)) & set(sizes), len(sizes))
    return found


def whole(everyone: Iterable[Held]) -> list[Generation]:
    """Return the checkpoints of which every file is on some host, oldest first."""
    held: dict[Generation, set[str]] = {}
    counts: dict[Generation, int] = {}
    for theirs in everyone:
        for generation, (files, count) in theirs.items():
            held.setdefault(generation, set()).update(files)
            counts[generation] = count
    return sorted(generation for generation, files in held.items() if len(files) == counts[generation])


@dataclass(frozen=True)
class Survey:
    """Says what ranks have seen, each on its own host; the same on all of them."""

    generations: list[Generation]  # in memory and whole, oldest first
    last: int  # the sequence of the newest save, on disk or in memory, complete or not
    disk: tuple[int, str] | None  # the sequence and name of the newest checkpoint on disk


def survey(ranks: Ranks, folder: Path, facts: Sequence[str]) -> Survey:
    """Look what there is that belongs to a folder of checkpoints. Ranks call it together, with the same ``facts``. To a
    folder that was removed nothing belongs. Raises CheckpointError on all ranks if one cannot look, or has other facts.
    """
    with ranks.agreeing(facts):
        here = generations(place_of(folder))
        is_gone = ranks.is_first and not folder.is_dir()
        disk = complete(folder)[-1:] if ranks.is_first else []
        newest = [(sequence_of(path), path.name) for path in disk]
    mine = max([_given.get(folder, 0), *(g.sequence for g in here), *(sequence for sequence, _ in newest)])
    everyone = ranks.gather((here, newest, mine, is_gone))
    _, disk_has, _, is_gone = everyone[0]
    last = max(last for _, _, last, _ in everyone)
    return Survey([] if is_gone else whole(theirs for theirs, *_ in everyone), last, next(iter(disk_has), None))


def give_sequence(folder: Path, seen: Survey) -> int:
    """Return the sequence of a save that begins."""
    _given[folder] = seen.last + 1
    return seen.last + 1


def remove_all_but(place: Path, name: str, kept: Generation | None) -> None:
    """Remove from a place, which is this user's, what saves of the series of ``name`` have left, but one checkpoint.
    All ranks of its host may call it at once."""
    here = generations(place)
    names = {generation.name for generation in here if generation == kept}
    for path in place.iterdir():
        if series(path.name) == series(name) and path.name not in names:
            shutil.rmtree(path, ignore_errors=True)


def remove_older(path: Path, sequence: int) -> None:
    """Remove from this host's memory what is of the series of ``path``, complete on disk, and older. All ranks of a
    host may call it at once."""
    place = place_of(path.parent)
    for generation in generations(place):
        if generation.sequence < sequence and series(generation.name) == series(path.name):
            with contextlib.suppress(OSError):  # another rank was first
                shutil.rmtree(put_aside(place / generation.name), ignore_errors=True)


def by_host(hosts: list[str]) -> Mapping[str, list[int]]:
    """Return host → indices of its ranks, in the order of their first ranks. ``hosts``: of each rank."""
    found: dict[str, list[int]] = {}
    for index, host in enumerate(hosts):
        found.setdefault(host, []).append(index)
    return found
