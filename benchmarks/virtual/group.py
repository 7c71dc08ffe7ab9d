"""A process group of the virtual device: one rank of N, whose collectives run on a stream of the group's own.

    with Machine("h100"), virtual_group(world_size=8, link=Link(450e9, 25e-6)) as group:
        ...

What they write, and how long the link takes, ``simulated_group.py`` says; when they run, NCCL's process group: with
``async_op=True`` on the group's stream, after what the current stream has been given when they are started, and the
wait makes the current stream wait; otherwise on the current stream. Only a barrier makes the host wait. On whatever
streams, the collectives of one group take the link one after the other, as those of one communicator of NCCL's; that
orders their times, and no accesses to memory.

``keeps_tensors``: a collective under way keeps its tensors alive until it is waited for, as NCCL's does. Without it, a
program that drops them too early is found, since the memory is given away.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from simulated_group import Backend, SimulatedGroup
from simulated_link import INSTANT, Lane, Link, Message, fill
from torch import Tensor

from virtual import library
from virtual.clocks import Moment, Stream
from virtual.machine import Machine

BACKEND = "virtual"


class VirtualWork(dist.Work):
    """``kept``: tensors that live until the wait."""

    def __init__(self, machine: Machine, end: Moment, kept: Sequence[Tensor], blocks_host: bool) -> None:
        super().__init__()
        self.machine, self.end, self.kept, self.blocks_host = machine, end, tuple(kept), blocks_host

    def wait(self, timeout: Any = None) -> bool:
        self.machine.enter()
        self.machine.current_stream.join(self.end)
        if self.blocks_host:
            self.machine.wait_for(self.end)
        self.machine.leave()
        self.kept = ()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self.machine.is_done(self.end)


class VirtualLane:
    """``stream``: the group's."""

    def __init__(self, machine: Machine, name: str) -> None:
        # Numbers of torch's streams are 0 and above.
        self.machine, number = machine, -2 - sum(stream < 0 for stream in machine.clocks.streams)
        self.stream = machine.clocks.add(number, f"the stream of process group {name!r}")
        self.on_current_stream = False
        self.keeps_tensors = True
        self.links: frozenset[str] = frozenset()

    def start(self, seconds: float, messages: Sequence[Message], timed: bool) -> tuple[dist.Work, Callable[[], float]]:
        machine = self.machine
        machine.enter()
        stream: Stream = machine.current_stream if self.on_current_stream else self.stream
        if stream is self.stream:
            stream.join(machine.current_stream)
        # What a message does with its tensors is no work of the device's.
        machine.paused = True
        if machine.numbers:
            fill(messages)
        machine.paused = False
        kinds = "+".join(dict.fromkeys(message.kind for message in messages))
        reads = [tensor for message in messages for tensor in message.inputs]
        writes = [tensor for message in messages for tensor in message.outputs]
        machine.launch(kinds, reads, writes, seconds, stream, self.links if seconds else ())
        kept = [*reads, *writes] if self.keeps_tensors and stream is self.stream else []
        work = VirtualWork(machine, stream.copy(), kept, blocks_host=kinds == "barrier")
        machine.leave()
        return work, lambda: seconds

    def close(self) -> None:
        pass


class RegisteringBackend(Backend):
    """Allocates memory that collectives take without a copy, as NCCL's does."""

    addresses: ClassVar[set[int]] = set()  # of storages

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == library.NAME

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = torch.empty(size, dtype=dtype, device=device)
        storage = made.untyped_storage()
        self.addresses.add(storage.data_ptr())
        weakref.finalize(storage, self.addresses.discard, storage.data_ptr()).atexit = False
        return made


class VirtualGroup(SimulatedGroup):
    """Tensors of the host are exchanged as a simulated group does it. ``landed``: kind of each message, and whether
    what it writes is registered."""

    backend = BACKEND
    keeps_tensors = True
    landed: ClassVar[list[tuple[str, bool]]] = []

    def _get_backend(self, device: torch.device) -> Any:
        return RegisteringBackend(supports_coalescing=device.type != "cpu", abort=self.abort)

    def launch(self, messages: Sequence[Message]) -> dist.Work | None:
        for message in messages:
            addresses = {tensor.untyped_storage().data_ptr() for tensor in message.outputs}
            self.landed.append((message.kind, addresses <= RegisteringBackend.addresses))
        return super().launch(messages)

    def _lane(self, messages: Sequence[Message]) -> Lane:
        devices = {tensor.device for message in messages for tensor in message.tensors}
        if any(device.type != library.NAME for device in devices) or Machine.current is None:
            return super()._lane(messages)
        device = torch.device(library.NAME, 0)
        lane = self._lanes.get(device)
        if not isinstance(lane, VirtualLane) or lane.machine is not Machine.current:
            lane = self._lanes[device] = VirtualLane(Machine.current, self.group_name)
        lane.on_current_stream, lane.keeps_tensors = self._on_current_stream, type(self).keeps_tensors
        lane.links = self.link.levels(self)
        return lane

    _on_current_stream = False


def _on_its_stream(name: str) -> Callable[..., Any]:
    collective = getattr(VirtualGroup, name)

    def call(self: VirtualGroup, *args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("opts", args[-1] if args else None)
        self._on_current_stream = getattr(options, "asyncOp", True) is False
        return collective(self, *args, **kwargs)

    return call


_COLLECTIVES = (
    *("all_gather_single", "all_gather_single_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "allgather", "allreduce", "allreduce_coalesced", "broadcast", "barrier"),
    *("scatter", "alltoall_base", "all_to_all_single"),
)
for _name in _COLLECTIVES:
    setattr(VirtualGroup, _name, _on_its_stream(_name))


def _create(options: Any, link: Link | None) -> VirtualGroup:
    if link is None:
        world = dist.group.WORLD
        link = world.link if isinstance(world, SimulatedGroup) else INSTANT
    return VirtualGroup(options.group_rank, options.group_size, str(options.group_id), link)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", library.NAME])


@contextlib.contextmanager
def virtual_group(world_size: int, link: Link = INSTANT, rank: int = 0) -> Iterator[VirtualGroup]:
    """The default process group, for a while, inside of a machine."""
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=world_size, pg_options=link)
    try:
        assert isinstance(dist.group.WORLD, VirtualGroup)
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
