"""The virtual device's memory: what torch's caching allocator would reserve for it, and when it may give it away.

[Note: when memory is given away]
The caching allocator keeps a block for the stream that it was allocated on. When the host drops it, the next request on
that stream can get it, and what that request's owner launches comes after what *that stream* has been given, and after
nothing else. Another stream may still be using the block, unless the allocator was told so (``record_stream``), or the
block's stream waits for the other before the next request. So the next request on its stream is where a block that was
dropped is judged: whether the allocator picks that block, or another, must not decide whether a program is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from graph_fsdp.planning.allocator import Block, CachingAllocator
from virtual.accesses import Access, History, Place
from virtual.clocks import Clocks, Moment


@dataclass(eq=False)
class Storage:
    """Memory at an address. ``stream``: it was allocated on; ``block``: None for pinned memory of the host."""

    nbytes: int
    place: Place
    stream: int = 0
    block: Block | None = None
    used_on: set[int] = field(default_factory=set)
    history: History = field(default_factory=History)

    def __str__(self) -> str:
        kind = "memory" if self.block is not None else "pinned memory"
        return f"{self.nbytes} bytes of {kind} allocated at {self.place}"


class Memory:
    """All storages of the device, and pinned ones of the host, by address."""

    def __init__(self, clocks: Clocks, expandable_segments: bool = False) -> None:
        self.clocks, self.allocator = clocks, CachingAllocator(expandable_segments=expandable_segments)
        self.storages: dict[int, Storage] = {}
        self.most = 0  # bytes at once, since ``forget_peak``
        self._dropped: dict[int, list[Storage]] = {}  # by their stream, until its next request
        self._waiting: list[tuple[Moment, Storage]] = []  # used on other streams, until what they do has ended

    @property
    def allocated(self) -> int:
        return self.allocator.allocated

    @property
    def reserved(self) -> int:
        return self.allocator.reserved

    @property
    def pinned(self) -> int:
        """Bytes of the host that are pinned: torch's allocator rounds each request up to a power of two."""
        sizes = (storage.nbytes for storage in self.storages.values() if storage.block is None)
        return sum(1 << (nbytes - 1).bit_length() for nbytes in sizes if nbytes)

    def allocate(self, address: int, nbytes: int, stream: int) -> Iterator[tuple[Storage, Access]]:
        """Account for a request on a stream; what it could be given although others may still use it."""
        now = self.clocks[stream].copy()
        now.join(self.clocks.host)
        for storage in self._dropped.pop(stream, ()):
            for access in storage.history.not_before(now, {stream, *storage.used_on}):
                yield storage, access
        self._give_back_what_has_ended()
        block = self.allocator.allocate(nbytes, str(stream))
        self.storages[address] = Storage(nbytes, Place.here(), stream, block)
        self.most = max(self.most, self.allocator.allocated)

    def pin(self, address: int, nbytes: int) -> None:
        self.storages[address] = Storage(nbytes, Place.here())

    def drop(self, address: int) -> Storage | None:
        """The host drops memory; None if the machine has not given it out."""
        storage = self.storages.pop(address, None)
        if storage is None or storage.block is None:
            return storage
        self._dropped.setdefault(storage.stream, []).append(storage)
        if not storage.used_on:
            self.allocator.free(storage.block)
            return storage
        end = Moment()  # as the allocator's events, recorded now
        for stream in storage.used_on:
            end.join(self.clocks[stream])
        self._waiting.append((end, storage))
        return storage

    def use_on(self, address: int, stream: int) -> None:
        """``record_stream``."""
        storage = self.storages.get(address)
        if storage is not None and stream != storage.stream:
            storage.used_on.add(stream)

    def forget_peak(self) -> None:
        self.most = self.allocator.allocated

    def _give_back_what_has_ended(self) -> None:
        waiting = []
        for end, storage in self._waiting:
            if end.seconds > self.clocks.host.seconds:
                waiting.append((end, storage))
            elif storage.block is not None:
                self.allocator.free(storage.block)
        self._waiting = waiting
