"""Sums of the bytes of a checkpoint's files, one per entry.

The sum of an entry is that of its bytes as little-endian words of 64 bits, modulo 2^64; words are those of the file, so
that an entry may begin in the middle of one. It is as fast as reading memory, and any one changed byte changes it.
(Two changes may cancel each other out: the CRC32 that ``torch.save`` puts beside each tensor is stronger, and slower.
``graph-fsdp inspect-checkpoint`` checks both.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from graph_fsdp.checkpoint.folder import read_json
from graph_fsdp.errors import CheckpointError

CHECKSUMS = "checksums.json"
Span: TypeAlias = tuple[int, int]  # offset, length, in bytes

_WORD = 8
_MASK = (1 << 64) - 1


class Written(NamedTuple):
    """What is known of an entry that was written."""

    total: int  # the sum of its bytes, and of ``data``: a change of either is noticed
    data: int = 0  # where in the file the bytes of a contiguous tensor begin; 0: it is something else

    @classmethod
    def of(cls, total: int, data: int = 0) -> Written:
        return cls((total + data) & _MASK, data)


Checksums: TypeAlias = dict[str, dict[Span, Written]]  # file → entry → what was written


def content_of(path: Path) -> Tensor:
    """Map a file into memory, as bytes. Raises CheckpointError where there is none."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not there") from error
    return torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def spans_sums(path: Path, spans: Iterable[Span]) -> dict[Span, int]:
    """Compute the sums of parts of a file. Raises CheckpointError where there is no file, or a shorter one."""
    wanted, content = list(spans), content_of(path)
    end = max((offset + length for offset, length in wanted), default=0)
    if end > len(content):
        raise CheckpointError(f"{path} has {len(content):,} bytes and should have {end:,}: it is cut off")
    return {span: _sum(content, *span) for span in wanted}


def _sum(content: Tensor, offset: int, length: int) -> int:
    end = offset + length
    first = min(-(-offset // _WORD) * _WORD, end)
    last = max(end // _WORD * _WORD, first)
    total = int(content[first:last].view(torch.int64).sum()) if first < last else 0
    for begin, part in ((offset, content[offset:first]), (last, content[last:end])):
        total += int.from_bytes(part.tolist(), "little") << 8 * (begin % _WORD)
    return total & _MASK


def as_text(checksums: Checksums) -> str:
    """The text of the file: file → [offset, bytes, sum, where a tensor's own bytes begin] of its entries."""
    rows = {name: [[*span, *entry] for span, entry in sorted(of.items())] for name, of in sorted(checksums.items())}
    return json.dumps(rows)


def read(folder: Path) -> Checksums:
    """Nothing, of a checkpoint that something else has written.

    Raises:
        CheckpointError: the file is damaged.
    """
    table = read_json(folder / CHECKSUMS, lambda found: {name: _of_file(rows) for name, rows in found.items()})
    return table or {}


def _of_file(rows: Iterable[list[int]]) -> dict[Span, Written]:
    """Of format 1, rows end with the sum."""
    return {(offset, length): Written(*entry) for offset, length, *entry in rows}
