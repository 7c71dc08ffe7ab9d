"""Who reads and writes which bytes of a storage, and which two accesses nothing orders."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from virtual.clocks import Moment

_HERE = str(Path(__file__).parent)
_HIDDEN = (_HERE, str(Path(torch.__file__).parent), str(Path(_HERE).parent / "simulated_"))
_FRAMES = 5


class Race(NamedTuple):
    """Two accesses to the same bytes, one of which writes, and neither of which is known to end before the other
    begins; or memory that was given away while ``first`` was not known to have ended."""

    first: Access
    second: Access
    storage: str

    def __str__(self) -> str:
        return f"{self.storage}: nothing orders\n  {self.first}\n  and {self.second}"


@dataclass(frozen=True)
class Place:
    """Where the program was: (code, line) of the innermost functions that are neither torch's nor of this package, and
    the node of autograd, if one was running."""

    frames: tuple[tuple[CodeType, int], ...]
    autograd: str = ""

    @classmethod
    def here(cls) -> Place:
        frame: FrameType | None = sys._getframe(1)
        frames: list[tuple[CodeType, int]] = []
        while frame is not None and len(frames) < _FRAMES:
            if not frame.f_code.co_filename.startswith(_HIDDEN):
                frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        node = torch._C._current_autograd_node()
        return cls(tuple(frames), "" if node is None else node.name())

    def __str__(self) -> str:
        lines = [f"{Path(code.co_filename).name}:{line} {code.co_name}" for code, line in self.frames]
        return " < ".join([*lines, *([f"backward of {self.autograd}"] if self.autograd else [])])


@dataclass(frozen=True)
class Span:
    """The bytes of a tensor in its storage: from ``begin`` to before ``end``, of which it may leave some out."""

    begin: int
    end: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    dense: bool

    @classmethod
    def of(cls, tensor: Tensor, base: int) -> Span:
        size, stride, itemsize = tuple(tensor.shape), tensor.stride(), tensor.element_size()
        begin = tensor.data_ptr() - base
        extent = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if tensor.numel() else 0
        dense = extent == tensor.numel()
        return cls(begin, begin + extent * itemsize, size, stride, itemsize, dense)

    def overlaps(self, other: Span) -> bool:
        if self.begin >= other.end or other.begin >= self.end:
            return False
        if self.dense and other.dense:
            return True
        begin, end = min(self.begin, other.begin), max(self.end, other.end)
        return bool((self._mask(begin, end) & other._mask(begin, end)).any())

    def covers(self, other: Span) -> bool:
        return self.dense and self.begin <= other.begin and other.end <= self.end

    def _mask(self, begin: int, end: int) -> Tensor:
        mask = torch.zeros(end - begin, dtype=torch.bool)
        strides = [step * self.itemsize for step in self.stride]
        mask.as_strided((*self.size, self.itemsize), (*strides, 1), self.begin - begin).fill_(True)
        return mask


@dataclass(frozen=True)
class Access:
    """``number``: of the operation on its stream."""

    span: Span
    writes: bool
    operator: str
    stream: int
    stream_name: str
    number: int
    place: Place

    def __str__(self) -> str:
        kind = "writes" if self.writes else "reads"
        return (
            f"{self.operator} on {self.stream_name}, which {kind} bytes {self.span.begin} to {self.span.end}, "
            f"at {self.place}"
        )


@dataclass
class History:
    """The accesses to a storage that a later one may still conflict with."""

    accesses: list[Access] = field(default_factory=list)

    def conflicts(self, access: Access, now: Moment) -> list[Access]:
        """Earlier accesses that nothing orders before this one, which belongs to the history from here on. ``now``:
        what its stream knows."""
        found: list[Access] = []
        kept: list[Access] = []
        for other in self.accesses:
            known = now.is_after(other.stream, other.number)
            if not known and (other.writes or access.writes) and other.span.overlaps(access.span):
                found.append(other)
            # An access that this one comes after, and that it stands for: who comes after this one comes after both.
            if not (known and access.span.covers(other.span) and (access.writes or not other.writes)):
                kept.append(other)
        kept.append(access)
        self.accesses = kept
        return found

    def not_before(self, now: Moment, streams: Iterable[int] = ()) -> list[Access]:
        """Accesses that are not known to have ended, but for those on ``streams``."""
        allowed = set(streams)
        return [a for a in self.accesses if a.stream not in allowed and not now.is_after(a.stream, a.number)]
