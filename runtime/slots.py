"""Slots hold the buffers of gathered parameters; what is gathered is counted here, too.

A graph's plan says in which slot each buffer lies; a run allocates a slot for its first buffer and gives it back after
the last (docs/decisions/memory.md). CUDA graphs need their inputs at fixed addresses, and registering memory with a
process group takes time: with either, slots are pieces of a ``SlotMemory``, which stays.

On CUDA and XPU a slot's next gather comes after what the current stream has queued, as the stream of gathers waits for
it at the start of each; and what is given back to the allocator was waited for on that stream.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

# Allocates a flat buffer, given its number of elements.
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]


def by_device(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


@dataclass
class Held:
    """Counts the bytes that are held, and their peak."""

    current: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        self.current += nbytes
        if self.current > self.peak:
            self.peak = self.current


@dataclass
class GatheredBytes(Held):
    """Counts the bytes of unsharded parameters that a model holds, and the collectives that it started, by kind.
    Landing buffers, in which a collective's result waits to be unpacked, and slots are counted apart."""

    landing: Held = field(default_factory=Held)
    slots: Held = field(default_factory=Held)
    collectives: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str) -> None:
        self.collectives[kind] += 1

    def hold(self, buffer: Tensor) -> None:
        """Count ``buffer``, which outlives a run, as gathered until nobody refers to its memory."""
        self.add(buffer.nbytes)
        # On the storage: what is held may be a view of the buffer.
        weakref.finalize(buffer.untyped_storage(), self.add, -buffer.nbytes)

    def reset(self) -> None:
        """Forget the peaks and counts; what is held now stays counted."""
        for held in (self, self.landing, self.slots):
            held.peak = held.current
        self.collectives.clear()


@dataclass(frozen=True)
class SlotPlan:
    """Plans the slots of a graph: the bytes of each, and how many buffers lie in it during a run. ``memory`` is where
    each is kept between runs. ``lend`` gives memory (bucket, bytes) to a buffer that outlives the run, and ``allocate``
    all that has no other place."""

    nbytes: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    memory: tuple[Tensor, ...] = ()
    lend: Callable[[str, int], Tensor] | None = None
    allocate: Allocate = by_device


class SlotMemory:
    """Keeps ``pieces`` of memory for the slots of a model's graphs, no two of which run at once."""

    def __init__(self, device: torch.device, counter: GatheredBytes, allocate: Allocate = by_device) -> None:
        self.device, self.counter, self.allocate = device, counter, allocate
        self.others = allocate  # allocates what lies in no slot, and buffers of reductions
        self.pieces: list[Tensor] = []
        self._lent = False

    def anew(self, counter: GatheredBytes) -> SlotMemory:
        """Return such memory without pieces, for a copy of the model, which has this ``counter``."""
        made = SlotMemory(self.device, counter, self.allocate)
        made.others = self.others
        return made

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def take(self, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return a piece for each slot of a graph: the smallest that is large enough, else a new one."""
        free = sorted(self.pieces, key=lambda piece: piece.nbytes)
        taken: dict[int, Tensor] = {}
        for slot in sorted(range(len(sizes)), key=lambda slot: -sizes[slot]):
            fitting = [piece for piece in free if piece.nbytes >= sizes[slot]]
            taken[slot] = fitting[0] if fitting else self._allocate(sizes[slot])
            free = [piece for piece in free if piece is not taken[slot]]
        return tuple(taken[slot] for slot in range(len(sizes)))

    @contextlib.contextmanager
    def lent_to(self, plan: SlotPlan) -> Iterator[SlotPlan]:
        """Give a run its slots here; a run within a run has others."""
        if self._lent:
            yield plan
            return
        self._lent = True
        try:
            yield replace(plan, memory=self.take(plan.nbytes))
        finally:
            self._lent = False

    def clear(self) -> None:
        """Drop the pieces; those of captured CUDA graphs stay with them."""
        self.counter.slots.add(-self.nbytes)
        self.pieces.clear()

    def _allocate(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            self.pieces.append(self.allocate(nbytes, torch.uint8, self.device))
        self.counter.slots.add(nbytes)
        return self.pieces[-1]


class Slots:
    """Allocates the buffers of one run of a graph."""

    def __init__(self, counter: GatheredBytes, plan: SlotPlan) -> None:
        self.counter, self.plan = counter, plan
        self._storage = dict(enumerate(plan.memory))  # of slots
        self._buffers: dict[int, Tensor] = {}  # that were taken of slots last
        self._uses = list(plan.uses)  # still to come, or under way
        self._slot_of: dict[int, int] = {}  # by the id of the buffer
        self._gathered = 0  # bytes, but for what escapes the run
        self._landing = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, slot: int | None = None) -> Tensor:
        """Return a buffer of the run, to be given back with ``give``; the slot's last one, where that is alike."""
        if slot is None:
            return self.plan.allocate(numel, dtype, device)
        if slot not in self._storage:
            self._storage[slot] = self.plan.allocate(self.plan.nbytes[slot], torch.uint8, device)
            self.counter.slots.add(self.plan.nbytes[slot])
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.dtype is not dtype or buffer.numel() != numel:
            buffer = self._buffers[slot] = self._storage[slot][: numel * dtype.itemsize].view(dtype)
        self._slot_of[id(buffer)] = slot
        return buffer

    def give(self, buffer: Tensor) -> None:
        slot = self._slot_of.pop(id(buffer), None)
        if slot is None:
            return
        self._uses[slot] -= 1
        if not self._uses[slot] and not self.plan.memory:
            del self._storage[slot], self._buffers[slot]
            self.counter.slots.add(-self.plan.nbytes[slot])

    def take_escaping(self, bucket: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer that outlives the run."""
        if self.plan.lend is None:
            return self.plan.allocate(numel, dtype, device)
        return self.plan.lend(bucket, numel * dtype.itemsize).view(dtype)

    def take_landing(self, numel: int, dtype: torch.dtype, device: torch.device, slot: int | None = None) -> Tensor:
        self._land(numel * dtype.itemsize)
        return self.take(numel, dtype, device, slot)

    def give_landing(self, buffer: Tensor) -> None:
        self._land(-buffer.nbytes)
        self.give(buffer)

    def _land(self, nbytes: int) -> None:
        self._landing += nbytes
        self.counter.landing.add(nbytes)

    def hold(self, buffer: Tensor, escapes: bool) -> None:
        """Count ``buffer`` as gathered, until ``free`` or, if it escapes the run, until nobody refers to it."""
        if escapes:
            self.counter.hold(buffer)
        else:
            self.counter.add(buffer.nbytes)
            self._gathered += buffer.nbytes

    def free(self, buffer: Tensor) -> None:
        nbytes = buffer.nbytes
        self._gathered -= nbytes
        self.counter.add(-nbytes)
        self.give(buffer)

    def close(self) -> None:
        """End the run, orderly or not: nothing of it stays counted or held."""
        self.counter.add(-self._gathered)
        for slot in self._storage if not self.plan.memory else ():
            self.counter.slots.add(-self.plan.nbytes[slot])
        self._land(-self._landing)
        self._storage.clear()
        self._buffers.clear()
        self._slot_of.clear()
