"""Sums of the bytes of a checkpoint's files, one per entry.

The sum of an entry is that of its bytes as little-endian words of 64 bits, modulo 2^64; words are those of the file, so
that an entry may begin in the middle of one. It is as fast as reading memory, and any one changed byte changes it.
(Two changes may cancel each other out: the CRC32 that ``torch.save`` puts beside each tensor is stronger, and slower.
``graph-fsdp inspect-checkpoint`` checks both.)
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch

from graph_fsdp.errors import CheckpointError

CHECKSUMS = "checksums.json"
Span: TypeAlias = tuple[int, int]  # offset, length, in bytes
Checksums: TypeAlias = dict[str, dict[Span, int]]  # file → entry → sum

_WORD = 8
_MASK = (1 << 64) - 1


def spans_sums(path: Path, spans: Iterable[Span]) -> dict[Span, int]:
    """Compute the sums of parts of a file. Raises CheckpointError where there is no file, or a shorter one."""
    wanted = list(spans)
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there") from error
    end = max((offset + length for offset, length in wanted), default=0)
    if end > size:
        raise CheckpointError(f"{path} has {size:,} bytes and should have {end:,}: it is cut off")
    if not size:
        return {span: 0 for span in wanted}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        found = {span: _sum(view, *span) for span in wanted}
    return found


def _sum(view: mmap.mmap, offset: int, length: int) -> int:
    end = offset + length
    first, last = -(-offset // _WORD) * _WORD, end // _WORD * _WORD
    if first >= last:
        return sum(view[at] << 8 * (at % _WORD) for at in range(offset, end)) & _MASK
    words = torch.frombuffer(view, dtype=torch.int64, count=(last - first) // _WORD, offset=first)
    total = int(words.sum())
    del words  # or the map could not be closed
    ends = sum(view[at] << 8 * (at % _WORD) for at in (*range(offset, first), *range(last, end)))
    return int(total + ends) & _MASK


def as_text(checksums: Mapping[str, Mapping[Span, int]]) -> str:
    """The text of the file: file → [offset, bytes, sum] of its entries."""
    table = {
        name: [[offset, length, total] for (offset, length), total in sorted(entries.items())]
        for name, entries in sorted(checksums.items())
    }
    return json.dumps(table)


def read(folder: Path) -> Checksums:
    """Nothing, of a checkpoint that something else has written.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
        return {name: {(o, n): total for o, n, total in entries} for name, entries in table.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
