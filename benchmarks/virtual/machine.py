"""A machine with one virtual device: its streams, its memory, its clock, and what it has found."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from graph_fsdp.passes import Hardware, find_hardware
from virtual import library
from virtual.accesses import Access, Place, Race, Span
from virtual.clocks import Clocks, Moment, Stream
from virtual.cost import Kernels
from virtual.memory import Memory, Storage

Host = Literal["zero", "counted"]


class RaceError(Exception):
    """``races``: all that were found, each pair of operators and places once."""

    def __init__(self, races: Sequence[Race]) -> None:
        super().__init__("\n".join([f"{len(races)} races on the virtual device", *map(str, races)]))
        self.races = races


@dataclass(frozen=True)
class Operation:
    """What ran on a stream, in virtual seconds. ``number``: of it on its stream; ``waits``: other stream → the number
    of its operation that had to end first, where the one before it on its stream had not waited for as much;
    ``seconds``: that it takes."""

    stream: int
    operator: str
    begin: float
    end: float
    priority: int = 0
    number: int = 0
    waits: Mapping[int, int] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    seconds: float = 0.0


class Machine:
    """The virtual device, for a while; one at a time.

    with Machine("h100") as machine:
        model = model.to("virtual")
        ...
    machine.seconds, machine.memory.most

    hardware: by which kernels and copies take their time, and what the device says that it is.
    host: what launching takes: nothing ("zero"), or the processor time of this process between two calls of the device
    ("counted"), without what the device itself computes here.
    numbers: compute them. Without, tensors have shapes and addresses, but no memory and no values, so that models of
    any size run: what a program reads of the device is 0, attention is flash attention, and what the host does to
    pinned memory is not checked.
    traced: keep ``operations``.
    expandable_segments: the allocator grows what it has, as ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` says.

    Leaving raises RaceError if races were found that nobody has taken (``take_races``).
    """

    current: Machine | None = None

    def __init__(
        self,
        hardware: str | Hardware = "h100",
        *,
        host: Host = "zero",
        numbers: bool = True,
        traced: bool = False,
        expandable_segments: bool = False,
    ) -> None:
        self.hardware, self.host, self.numbers = find_hardware(hardware), host, numbers
        self.clocks = Clocks()
        self.memory = Memory(self.clocks, expandable_segments)
        self.kernels = Kernels(self.hardware)
        self.races: list[Race] = []
        self.errors: list[BaseException] = []  # raised where torch could not be told
        self.operations: list[Operation] | None = [] if traced else None
        self._seen: set[tuple[object, ...]] = set()
        self.paused = False  # what runs is part of an operation that is launched by itself
        self._depth, self._left = 0, time.process_time()
        self._copies: list[_HostCopy] = []

    def __enter__(self) -> Machine:
        library.install()
        if Machine.current is not None:
            raise RuntimeError("there is a virtual machine already, and a process can have one at a time")
        Machine.current = self
        library.attach(self)
        self._left = time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.synchronize()
        library.detach()
        Machine.current = None
        if kind is None and self.errors:
            raise self.errors[0]
        if kind is None and self.races:
            raise RaceError(self.races)

    @property
    def seconds(self) -> float:
        """Virtual seconds until all that was launched has ended."""
        return self.clocks.seconds

    # time

    def enter(self) -> None:
        """The host comes to the device: what it did since it left is its own time."""
        if self.host == "counted" and not self._depth:
            self.clocks.host.seconds += time.process_time() - self._left
        self._depth += 1

    def leave(self) -> None:
        self._depth -= 1
        if self.host == "counted" and not self._depth:
            self._left = time.process_time()

    # operations

    def launch(
        self,
        operator: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        seconds: float,
        stream: Stream | None = None,
        links: Collection[str] = (),
    ) -> None:
        """An operation of the current stream, or of another one. Tensors of the host count if they are pinned.
        ``links``: those that it has to itself while it runs."""
        if self.paused:
            return
        stream = stream or self.current_stream
        waits = self.clocks.new_waits(stream) if self.operations is not None else {}
        number, begin = self.clocks.launch(stream, seconds, links)
        place = Place.here()
        if self.operations is not None:
            self.operations.append(
                Operation(
                    stream.id,
                    operator,
                    begin,
                    stream.seconds,
                    stream.priority,
                    number,
                    waits,
                    tuple(links),
                    seconds,
                )
            )
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                base = tensor.untyped_storage().data_ptr()
                storage = self.memory.storages.get(base)
                if storage is None or not tensor.numel():
                    continue
                span = Span.of(tensor, base)
                access = Access(span, is_write, operator, stream.id, stream.name, number, place)
                for other in storage.history.conflicts(access, stream):
                    if other.number != number or other.stream != stream.id:
                        self.found(other, access, storage)

    def found(self, first: Access, second: Access, storage: Storage) -> None:
        key = (first.operator, first.place.frames[:1], second.operator, second.place.frames[:1])
        if key not in self._seen:
            self._seen.add(key)
            self.races.append(Race(first, second, str(storage)))

    def add_stream(self, stream: int, priority: int) -> None:
        self.clocks.priorities[stream] = priority
        self.clocks.add(stream, f"stream {stream} (made at {Place.here()})")

    def is_done(self, moment: Moment) -> bool:
        """What the host that asks finds, by virtual time."""
        if moment.seconds > self.clocks.host.seconds:
            return False
        self.wait_for(moment)
        return True

    def take_races(self) -> list[Race]:
        """Those found since the last call; they are then no error any more."""
        races, self.races = self.races, []
        self._seen.clear()
        return races

    @property
    def current_stream(self) -> Stream:
        return self.clocks[library.current_stream()]

    def synchronize(self) -> None:
        self.wait_for(*self.clocks.streams.values())

    def wait_for(self, *moments: Moment) -> None:
        """The host waits."""
        self.clocks.wait_for(*moments)
        self._end([copy for copy in self._copies if self.clocks.host.is_after(copy.stream, copy.number)])

    # memory

    def allocate(self, address: int, nbytes: int, stream: int) -> None:
        for storage, access in self.memory.allocate(address, nbytes, stream):
            now = self.clocks[stream]
            span = Span(0, storage.nbytes, (storage.nbytes,), (1,), 1, True)
            given = Access(span, True, "the next allocation", stream, now.name, 0, Place.here())
            self.found(access, given, storage)

    def free(self, address: int) -> None:
        self.memory.drop(address)

    # copies to and from pinned memory

    def copy_beside_host(self, pinned: Tensor, value: Tensor, is_target: bool) -> None:
        """The copy just launched is one that the host does not wait for. ``value``: what it copies."""
        stream = self.current_stream
        self._copies.append(
            _HostCopy(pinned.detach(), value, is_target, stream.id, stream.known[stream.id], Place.here())
        )

    def arrive(self, pinned: Tensor) -> None:
        """The device is about to read pinned memory, and finds there what it has copied there."""
        base = pinned.untyped_storage().data_ptr()
        here = [c for c in self._copies if c.is_target and c.pinned.untyped_storage().data_ptr() == base]
        self._end([copy for copy in here if self.current_stream.is_after(copy.stream, copy.number)])

    def _end(self, copies: Sequence[_HostCopy]) -> None:
        self._copies = [copy for copy in self._copies if copy not in copies]
        for copy in copies:
            if not copy.end():
                storage = self.memory.storages.get(copy.pinned.untyped_storage().data_ptr())
                whole = Span.of(copy.pinned, copy.pinned.data_ptr())
                stream = self.clocks[copy.stream]
                read = Access(whole, False, "a copy to the device", stream.id, stream.name, copy.number, copy.place)
                written = Access(whole, True, "the program", HOST, "the host", 0, Place((), "between the two"))
                self.found(read, written, storage or Storage(copy.pinned.nbytes, copy.place))


HOST = -1


@dataclass(eq=False)
class _HostCopy:
    """A copy from or to pinned memory that the host has not waited for. What it brings to the host is written when the
    host has waited, and is NaN (-1 in integers) before; what it reads there must not change until then."""

    pinned: Tensor
    value: Tensor
    is_target: bool
    stream: int
    number: int
    place: Place

    def __post_init__(self) -> None:
        if self.is_target:
            unset = torch.full((self.value.nbytes,), 0xFF, dtype=torch.uint8)
            self._write(unset.view(self.value.dtype).view(self.value.shape))

    def end(self) -> bool:
        """The host may know its result from here on. False if what it reads has changed since it was launched."""
        if self.is_target:
            self._write(self.value)
            return True
        now, then = (t.contiguous().reshape(-1).view(torch.uint8) for t in (self.pinned, self.value))
        return torch.equal(now, then)

    def _write(self, value: Tensor) -> None:
        with torch.inference_mode(), torch.autograd._unsafe_preserve_version_counter(self.pinned):
            self.pinned.copy_(value)
