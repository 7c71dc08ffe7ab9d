"""What was gathered, the shards of one rank behind those of another, is put into the order of parameters."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.passes.ir.layout import Message

# On the CPU the copy of a piece takes as long as that of a thousand units by an index of their places.
_UNIT = torch.complex128  # 16 bytes
_UNITS_PER_PIECE, _MAX_UNITS = 2**10, 2**14

# Places of units are held once for equal messages.
PLACES: weakref.WeakValueDictionary[Any, Tensor] = weakref.WeakValueDictionary()


class Unpacking:
    """Copies a message of ``world`` ranks from rank-major (as gathered) to parameter-major (as used), in one kernel
    where the device has one. On the CPU a message of many small pieces is copied by an index of 4 bytes for each 16,
    if its pieces have whole units of 16 bytes."""

    def __init__(self, message: Message, world: int, dtype: torch.dtype, device: torch.device) -> None:
        self.message, self.world, self.numel = message, world, world * message.numel
        self.key = world, message.cuts
        self.places = places_of_units(message, world, dtype) if device.type == "cpu" else None

    def __call__(self, landing: Tensor, buffer: Tensor) -> None:
        """Copy ``landing``, the message, into its part of ``buffer``, the bucket. Both are flat."""
        if self.places is not None:
            source, target = _units(landing, 0, self.numel), _units(buffer, self.world * self.message.begin, self.numel)
            if source is not None and target is not None:
                torch.index_select(source, 0, self.places, out=target)
                return
        world, splits = self.world, self.message.splits
        known = vars(buffer).setdefault("pieces", {})  # see ``_units``
        if (pieces := known.get(self.key)) is None:
            begins = itertools.accumulate(splits, initial=self.message.begin)
            pieces = known[self.key] = [
                compat.reinterpreted(buffer, (world, size), (size, 1), world * begin)
                for begin, size in zip(begins, splits, strict=False)
            ]
        torch.split_with_sizes_copy(landing.view(world, -1), splits, dim=1, out=pieces)


def places_of_units(message: Message, world: int, dtype: torch.dtype) -> Tensor | None:
    """Return where in a gathered message each unit of the bucket's part lies; None where pieces are copied."""
    per_unit, count = _UNIT.itemsize // dtype.itemsize, world * message.numel * dtype.itemsize // _UNIT.itemsize
    splits = message.splits
    if any(size % per_unit for size in splits) or count > min(_UNITS_PER_PIECE * len(splits), _MAX_UNITS):
        return None
    units = tuple(size // per_unit for size in splits)
    found = PLACES.get((world, units))
    if found is None:
        with compat.without_dispatch_modes(), torch.inference_mode(False):
            pieces = torch.arange(count, dtype=torch.int32, device="cpu").view(world, -1).split(units, 1)
            found = PLACES[world, units] = torch.cat([piece.reshape(-1) for piece in pieces])
    return found


def _units(tensor: Tensor, begin: int, numel: int) -> Tensor | None:
    """View elements of a flat tensor as units; None where they do not lie at multiples of a unit."""
    # A slot's buffer is used again. In its views there is no reference to the buffer itself, which they go with.
    known = vars(tensor).setdefault("units", {})
    if begin not in known:
        place, size = (tensor.storage_offset() + begin) * tensor.itemsize, _UNIT.itemsize
        known[begin] = None
        if not place % size and not tensor.data_ptr() % size:
            units = torch.empty(0, dtype=_UNIT)
            known[begin] = units.set_(tensor.untyped_storage(), place // size, (numel * tensor.itemsize // size,), (1,))
    found: Tensor | None = known[begin]
    return found
