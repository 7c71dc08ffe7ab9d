"""A checkpoint has a sum of the bytes of each entry of its files.

An entry's bytes are added as little-endian words of 64 bits, modulo 2^64. Words are those of the file, so that an entry
may begin in the middle of one. It is as fast as reading memory and finds any one changed byte; two changes may cancel
out, which the CRC32 of ``torch.save``, stronger and slower, finds. ``graph-fsdp inspect-checkpoint`` checks both.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from graph_fsdp.checkpoint.folder import read_json
from graph_fsdp.errors import CheckpointError

CHECKSUMS = "checksums.json"

_WORD = 8
_MASK = (1 << 64) - 1


class Extent(NamedTuple):
    """Says where the bytes of an entry are."""

    file: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Written(NamedTuple):
    """Says what is known of an entry that was written."""

    total: int  # the sum of its bytes, and of ``data``: a change of either is noticed
    data: int = 0  # where in the file the bytes of a contiguous tensor begin; 0: it is something else

    @classmethod
    def of(cls, total: int, data: int = 0) -> Written:
        return cls((total + data) & _MASK, data)


def by_file(extents: Iterable[Extent]) -> dict[str, list[Extent]]:
    """Return file → the entries in it, in order, each once."""
    return {file: list(found) for file, found in itertools.groupby(sorted(set(extents)), lambda extent: extent.file)}


def content_of(path: Path) -> Tensor:
    """Map a file into memory, as bytes. Raises CheckpointError where there is none."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there") from error
    return torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def sums_of(folder: Path, extents: Iterable[Extent]) -> dict[Extent, int]:
    """Compute the sums of entries. Raises CheckpointError where a file is not there, or shorter."""
    sums: dict[Extent, int] = {}
    for file, wanted in by_file(extents).items():
        content, end = content_of(folder / file), max(extent.end for extent in wanted)
        if end > len(content):
            raise CheckpointError(f"{folder / file} has {len(content):,} bytes and should have {end:,}: it is cut off")
        sums.update({extent: _sum(content, extent.offset, extent.end) for extent in wanted})
    return sums


def _sum(content: Tensor, offset: int, end: int) -> int:
    first = min(-(-offset // _WORD) * _WORD, end)
    last = max(end // _WORD * _WORD, first)
    total = int(content[first:last].view(torch.int64).sum()) if first < last else 0
    for begin, part in ((offset, content[offset:first]), (last, content[last:end])):
        total += int.from_bytes(part.tolist(), "little") << 8 * (begin % _WORD)
    return total & _MASK


def as_text(checksums: Mapping[Extent, Written]) -> str:
    """Return the text of the file: file → [offset, bytes, sum, where a tensor's own bytes begin] of its entries."""
    files = by_file(checksums).items()
    return json.dumps({file: [[*extent[1:], *checksums[extent]] for extent in extents] for file, extents in files})


def read(folder: Path) -> dict[Extent, Written]:
    """Read the sums of a checkpoint; empty where another program wrote it. Rows of format 1 end with the sum. Raises
    CheckpointError if the file is damaged."""

    def made_of(found: dict[str, list[list[int]]]) -> dict[Extent, Written]:
        rows = ((file, row) for file, rows in found.items() for row in rows)
        return {Extent(file, offset, length): Written(*entry) for file, (offset, length, *entry) in rows}

    return read_json(folder / CHECKSUMS, made_of) or {}
