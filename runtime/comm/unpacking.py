"""Messages are unpacked from the buffers that they land in, by views of these that are made once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.passes.ir.layout import Message


def unpack(landing: Tensor, buffer: Tensor, message: Message, world: int, begin: int = 0) -> None:
    """Copy what lies from ``begin`` on in ``landing`` from rank-major (as gathered) to parameter-major (as used): in
    one kernel where the device has one; on the CPU by one call, each run of chunks by one copy, and no gaps."""
    row, key, start = message.numel, (world, message), message.begin
    if landing.is_cpu:
        runs = message.runs
        rows = (((world, n, size), (row, step, 1), begin + at - start) for at, size, n, step in runs)
        used = (((world, n, size), (size, world * step, 1), world * at) for at, size, n, step in runs)
        compat.foreach_copy(views_of(buffer, key, used), views_of(landing, (*key, begin), rows))
        return
    (sent,) = views_of(landing, (*key, begin), [((world, row), (row, 1), begin)])
    places = zip(itertools.accumulate(message.splits, initial=start), message.splits, strict=False)
    pieces = views_of(buffer, key, (((world, size), (size, 1), world * at) for at, size in places))
    torch.split_with_sizes_copy(sent, message.splits, dim=1, out=pieces)


def part_of(memory: Tensor, begin: int, numel: int) -> Tensor:
    (part,) = views_of(memory, (begin, numel), [((numel,), (1,), begin)])
    return part


def views_of(memory: Tensor, key: Any, places: Iterable[Any]) -> list[Tensor]:
    """Return views of a slot's buffer (shape, strides and offset of each), which stay with it as it is used again.
    There is no reference to the buffer itself in them."""
    known: dict[Any, list[Tensor]] = vars(memory).setdefault("pieces", {})
    if (views := known.get(key)) is None:
        views = known[key] = [compat.reinterpreted(memory, *place) for place in places]
    return views
