"""Slots hold the buffers of gathered parameters; what is gathered is counted here, too.

A graph's plan says in which slot each buffer lies; a run allocates a slot for its first buffer and gives it back after
the last (docs/decisions/memory.md). CUDA graphs need their inputs at fixed addresses: with them, slots are pieces of a
``SlotMemory``, which stays. A buffer without a slot comes from the device's allocator.

On CUDA and XPU a slot's next gather comes after what the current stream has queued, as the process group's stream waits
for it at the start of a collective; and what is given back to the allocator was waited for on that stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Held:
    """Counts the bytes that are held, and their peak."""

    current: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        self.current += nbytes
        self.peak = max(self.peak, self.current)


@dataclass
class GatheredBytes(Held):
    """Counts the bytes of unsharded parameters that a model holds, and the collectives that it started, by kind.
    Landing buffers, in which a collective's result waits to be unpacked, and slots are counted apart."""

    landing: Held = field(default_factory=Held)
    slots: Held = field(default_factory=Held)
    collectives: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, times: int = 1) -> None:
        self.collectives[kind] = self.collectives.get(kind, 0) + times

    def reset(self) -> None:
        """Forget the peaks and counts; what is held now stays counted."""
        for held in (self, self.landing, self.slots):
            held.peak = held.current
        self.collectives.clear()


@dataclass(frozen=True)
class SlotPlan:
    """Plans the slots of a graph: the bytes of each, and how many buffers lie in it during a run. ``memory`` is where
    each is kept between runs. ``lend`` gives memory (bucket, bytes) to a buffer that outlives the run."""

    nbytes: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    memory: tuple[Tensor, ...] = ()
    lend: Callable[[str, int], Tensor] | None = None


class SlotMemory:
    """Keeps ``pieces`` of memory for the slots of a model's graphs, no two of which run at once."""

    def __init__(self, device: torch.device, counter: GatheredBytes) -> None:
        self.device, self.counter = device, counter
        self.pieces: list[Tensor] = []

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

    def _allocate(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            self.pieces.append(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        self.counter.slots.add(nbytes)
        return self.pieces[-1]


class Slots:
    """Allocates the buffers of one run of a graph."""

    def __init__(self, counter: GatheredBytes, plan: SlotPlan) -> None:
        self.counter, self.plan = counter, plan
        self._storage = dict(enumerate(plan.memory))  # of slots
        self._uses = list(plan.uses)  # still to come, or under way
        self._slot_of: dict[int, int] = {}  # by the id of the buffer
        self._gathered = 0  # bytes, but for what escapes the run

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, slot: int | None = None) -> Tensor:
        """Return a buffer of the run, to be given back with ``give``."""
        if slot is None:
            return torch.empty(numel, dtype=dtype, device=device)
        if slot not in self._storage:
            self._storage[slot] = torch.empty(self.plan.nbytes[slot], dtype=torch.uint8, device=device)
            self.counter.slots.add(self.plan.nbytes[slot])
        buffer = self._storage[slot][: numel * dtype.itemsize].view(dtype)
        self._slot_of[id(buffer)] = slot
        return buffer

    def give(self, buffer: Tensor) -> None:
        slot = self._slot_of.pop(id(buffer), None)
        if slot is None:
            return
        self._uses[slot] -= 1
        if not self._uses[slot] and not self.plan.memory:
            del self._storage[slot]
            self.counter.slots.add(-self.plan.nbytes[slot])

    def take_escaping(self, bucket: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer that outlives the run."""
        if self.plan.lend is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return self.plan.lend(bucket, numel * dtype.itemsize).view(dtype)

    def take_landing(self, numel: int, dtype: torch.dtype, device: torch.device, slot: int | None = None) -> Tensor:
        self.counter.landing.add(numel * dtype.itemsize)
        return self.take(numel, dtype, device, slot)

    def give_landing(self, buffer: Tensor) -> None:
        self.counter.landing.add(-buffer.nbytes)
        self.give(buffer)

    def hold(self, buffer: Tensor, escapes: bool) -> None:
        """Count ``buffer`` as gathered, until ``free`` or, if it escapes the run, until nobody refers to it."""
        nbytes = buffer.nbytes
        self.counter.add(nbytes)
        if escapes:
            # On the storage: what the user holds on to may be a view of the buffer.
            weakref.finalize(buffer.untyped_storage(), self.counter.add, -nbytes)
        else:
            self._gathered += nbytes

    def free(self, buffer: Tensor) -> None:
        self._gathered -= buffer.nbytes
        self.counter.add(-buffer.nbytes)
        self.give(buffer)

    def close(self) -> None:
        """End the run, orderly or not: nothing of it stays counted or held."""
        self.counter.add(-self._gathered)
        for slot in self._storage if not self.plan.memory else ():
            self.counter.slots.add(-self.plan.nbytes[slot])
        self.counter.landing.current = 0
        self._storage.clear()
        self._slot_of.clear()
