"""Hosts send each other files of a checkpoint in memory that they lack: when it is saved, and when it is loaded."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from graph_fsdp.checkpoint.checksums import content_of
from graph_fsdp.checkpoint.folder import private
from graph_fsdp.checkpoint.group import Ranks, no_answer
from graph_fsdp.checkpoint.hosts import by_host, files_in, identity
from graph_fsdp.errors import CheckpointError


@dataclass(frozen=True)
class Move:
    file: str
    size: int  # bytes
    source: int  # the index of a rank on a host that has it
    target: int  # of one on a host that lacks it


def bring(ranks: Ranks, path: Path, wanted: Collection[str]) -> None:
    """Get those files of a checkpoint that this host lacks and this rank wants. Ranks call it together; the folder of
    ``path`` is there, and ``path`` itself has the same name on all hosts.

    Memory for what comes is reserved on all hosts before anything is sent.

    Raises:
        CheckpointError: on all ranks. No host has a file, a host has no memory for it, or a rank does not answer.
    """
    held = files_in(path)
    everyone = ranks.gather((identity(path.parent), held, [name for name in wanted if name not in held]))
    moves = _moves(path, everyone)
    partial = {m.file: path / f"{m.file}.partial" for m in moves if m.target == ranks.index}
    with ranks.agreeing([]):
        path.mkdir(mode=0o700, exist_ok=True)
        buffers = {m.file: reserved(partial[m.file], m.size) for m in moves if m.target == ranks.index}
    with ranks.agreeing([]):
        _send(ranks, path, moves, buffers)
        for name, file in partial.items():
            file.rename(path / name)


def _moves(path: Path, everyone: list[tuple[str, dict[str, int], list[str]]]) -> list[Move]:
    """Return who sends what to whom, the same on all ranks. Ranks of a host, and hosts, take turns as sources."""
    hosts = by_host([host for host, _, _ in everyone])
    held = {host: {name: n for i in members for name, n in everyone[i][1].items()} for host, members in hosts.items()}
    moves: list[Move] = []
    for name in sorted({name for _, _, missing in everyone for name in missing}):
        holders = [host for host in hosts if name in held[host]]
        if not holders:
            raise CheckpointError(f"no host has {name} of {path} any more; load an older checkpoint")
        for host, members in hosts.items():
            wanting = [i for i in members if name in everyone[i][2]]
            if wanting and host not in holders:
                holder = holders[len(moves) % len(holders)]
                source = hosts[holder][len(moves) % len(hosts[holder])]
                moves.append(Move(name, held[holder][name], source, wanting[0]))
    return moves


def _send(ranks: Ranks, path: Path, moves: list[Move], buffers: dict[str, Tensor]) -> None:
    works, group = [], ranks.group
    try:
        for tag, move in enumerate(moves):
            if move.size and move.source == ranks.index:
                content = content_of(path / move.file)
                works.append((dist.isend(content, ranks.ranks[move.target], group=group, tag=tag), content))
            elif move.size and move.target == ranks.index:
                buffer = buffers[move.file]
                works.append((dist.irecv(buffer, ranks.ranks[move.source], group=group, tag=tag), buffer))
        for work, _ in works:
            if work is not None:
                work.wait()
    except RuntimeError as error:
        raise no_answer(error, ranks.ranks) from error


def reserved(file: Path, size: int) -> Tensor:
    """Return a new file, readable by the user alone, as a tensor of bytes that is its content. Its memory is there: a
    file system that is full is an error here, and would be the end of the process where the tensor is written."""
    try:
        with open(file, "wb", opener=private) as stream:
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), 0, size)
            elif size:
                stream.truncate(size)
    except OSError as error:
        raise CheckpointError(f"{file}, of {size:,} bytes: {error.strerror}") from error
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
