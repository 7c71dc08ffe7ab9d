"""Buffers for gathered parameters, and the count of what is gathered.

Within one run of a graph, buffers that were freed are used again for later gathers of the same size: a model of
equal layers runs in as many buffers as layers are gathered at once. At the end of the run they go back to the
device's allocator, so that between steps a rank holds its shards and nothing else.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class GatheredBytes:
    """Bytes of unsharded parameters that a model holds, and the most that it has held. Landing buffers, in which
    a collective's result waits to be unpacked, are counted apart."""

    current: int = 0
    peak: int = 0
    landing_current: int = 0
    landing_peak: int = 0
    collectives: dict[str, int] = field(default_factory=dict)

    def add(self, nbytes: int) -> None:
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def add_landing(self, nbytes: int) -> None:
        self.landing_current += nbytes
        self.landing_peak = max(self.landing_peak, self.landing_current)

    def count(self, kind: str) -> None:
        self.collectives[kind] = self.collectives.get(kind, 0) + 1

    def reset(self) -> None:
        """Forget the peaks and counts; what is held now stays counted."""
        self.peak, self.landing_peak = self.current, self.landing_current
        self.collectives.clear()


class Slots:
    """The buffers of one run of a graph."""

    def __init__(self, counter: GatheredBytes) -> None:
        self.counter = counter
        self._unused: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._gathered: dict[int, int] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of the run: given back with ``give``."""
        unused = self._unused.get((numel, dtype))
        return unused.pop() if unused else torch.empty(numel, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        self._unused.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def take_landing(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.counter.add_landing(numel * dtype.itemsize)
        return self.take(numel, dtype, device)

    def give_landing(self, buffer: Tensor) -> None:
        self.counter.add_landing(-buffer.nbytes)
        self.give(buffer)

    def hold(self, buffer: Tensor, escapes: bool) -> None:
        """Count ``buffer`` as gathered, until ``free`` or, if it escapes the run, until nobody refers to it."""
        nbytes = buffer.nbytes
        self.counter.add(nbytes)
        if escapes:
            # On the storage: what the user holds on to may be a view of the buffer.
            weakref.finalize(buffer.untyped_storage(), self.counter.add, -nbytes)
        else:
            self._gathered[id(buffer)] = nbytes

    def free(self, buffer: Tensor) -> None:
        self.counter.add(-self._gathered.pop(id(buffer)))
        self.give(buffer)

    def close(self) -> None:
        """End of the run, orderly or not: nothing of it stays counted or held."""
        for nbytes in self._gathered.values():
            self.counter.add(-nbytes)
        self.counter.landing_current = 0
        self._gathered.clear()
        self._unused.clear()
