"""A process group of which only one rank exists: one device acts as one rank of N.

    with simulated_group(world_size=64, link=Link(bandwidth=45e9, latency=100e-6)) as group:
        ...  # fully_shard, graph_fsdp.compile, torch.distributed: as on the 64 ranks

It is the backend "simulated" of torch.distributed. A collective takes the time that it would take on the link, beside
what the device computes (``simulated_link.py``), and writes what it would write if every rank held what this one holds:
an all-gather repeats this rank's shard, a mean is this rank's own chunk, a sum is that times N. Two programs that shard
alike therefore compute alike.

A ring moves (N-1)/N of the full buffer over each rank's link for an all-gather or a reduce-scatter, twice that for an
all-reduce, all of a tensor for a broadcast; a collective takes ``latency + bytes moved / bandwidth``. A group of
messages (a coalesced call) has one latency. Collectives of a process group run one after the other, in the order
in which they are started; different process groups do not share a link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from named_group import NamedGroup
from simulated_link import INSTANT, Lane, Link, Message, StreamLane, ThreadLane
from torch import Tensor

BACKEND = "simulated"


@dataclass(frozen=True)
class Launch:
    """What ``SimulatedGroup.trace`` records of a collective, or of a group of them: ``seconds`` as planned;
    ``occupied()`` waits for its end and says how long it was the link's, the copies included."""

    kinds: tuple[str, ...]
    moved: float
    seconds: float
    occupied: Callable[[], float]


@dataclass(frozen=True)
class Backend:
    """What programs ask of a backend in C++: on an accelerator what they ask of NCCL's, on the CPU of gloo's."""

    supports_coalescing: bool
    abort: Callable[[], None]

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False


class SimulatedGroup(NamedGroup):
    """``link`` may be changed between collectives. While ``trace`` is a list, each launch is added to it.
    ``host_lane`` makes the lanes of the CPU."""

    backend = BACKEND
    host_lane: Callable[[], Lane] = ThreadLane

    def __init__(self, rank: int, world_size: int, name: str, link: Link) -> None:
        super().__init__(rank, world_size, name)
        self.link = link
        self.trace: list[Launch] | None = None
        self._lanes: dict[torch.device, Lane] = {}
        self._grouped: list[Message] | None = None

    def _get_backend(self, device: torch.device) -> Any:
        return Backend(supports_coalescing=device.type != "cpu", abort=self.abort)

    def shutdown(self) -> None:
        while self._lanes:
            self._lanes.popitem()[1].close()

    abort = shutdown

    # Collectives, under the names of c10d. torch 2.13 renamed some of them, and calls the new names.

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work | None:
        return self.launch([self._all_gather(output, input)])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work | None:
        return self.launch([self._all_gather(o, i) for o, i in zip(outputs, inputs, strict=True)])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work | None:
        return self.launch([self._all_gather_list(o, i) for o, i in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work | None:
        return self.launch([self._reduce_scatter(output, input, opts)])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work | None:
        return self.launch([self._reduce_scatter(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work | None:
        scale = self._scale(opts)

        def message(tensor: Tensor) -> Message:
            moved = 2 * self._ring_bytes(tensor)
            return Message("all_reduce", moved, (tensor,), (), lambda: _copy(tensor, tensor, scale))

        return self.launch([message(tensor) for tensor in tensors])

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work | None:
        return self.launch([Message("broadcast", t.nbytes, (t,), (), lambda: None) for t in tensors])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work | None:
        """As the rank that has what all are sent."""
        if len(inputs) != len(outputs):
            raise NotImplementedError("simulated scatter: only the rank that sends is simulated")

        def message(output: Tensor, parts: Sequence[Tensor]) -> Message:
            own = parts[self.rank()]
            moved = output.nbytes * (self.size() - 1)
            return Message("scatter", moved, (output,), tuple(parts), lambda: _copy(output, own))

        return self.launch([message(output, parts) for output, parts in zip(outputs, inputs, strict=True)])

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> dist.Work | None:
        """Every rank sends what this one sends: this rank's part of it comes from each."""
        size, rank = self.size(), self.rank()
        sent = input.split(list(input_splits) or [len(input) // size] * size)
        received = output.split(list(output_splits) or [len(output) // size] * size)
        pairs = [(part, sent[rank]) for part in received]
        if any(part.shape != own.shape for part, own in pairs):
            raise ValueError(f"simulated all-to-all: each rank sends {list(sent[rank].shape)} to this one")

        def exchange() -> None:
            for part, own in pairs:
                _copy(part, own)

        return self.launch([Message("all_to_all", self._ring_bytes(input), (output,), (input,), exchange)])

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> dist.Work | None:
        return self.launch([Message("barrier", 0, (), (), lambda: None)])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _unsupported(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "simulated process group: all-gather, reduce-scatter and all-to-all (of single tensors), all-reduce, "
            "broadcast, scatter and barrier are simulated; others are not"
        )

    gather = reduce = reduce_scatter = alltoall = send = recv = recv_anysource = _unsupported

    def _start_coalescing(self, device: torch.device) -> None:
        self._grouped = []

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:
        messages, self._grouped = self._grouped or [], None
        return self.launch(messages)

    def launch(self, messages: Sequence[Message]) -> dist.Work | None:
        """Start messages as one; None while a group is being collected, whose end has the work."""
        if self._grouped is not None:
            self._grouped += messages
            return None
        moved = sum(message.moved for message in messages)
        seconds = self.link.seconds(messages, self) if self.size() > 1 else 0.0
        work, occupied = self._lane(messages).start(seconds, messages, timed=self.trace is not None)
        if self.trace is not None:
            self.trace.append(Launch(tuple(message.kind for message in messages), moved, seconds, occupied))
        return work

    def _lane(self, messages: Sequence[Message]) -> Lane:
        """The lane of the messages' device; without tensors, that of what came before."""
        devices = dict.fromkeys(tensor.device for message in messages for tensor in message.tensors)
        if len(devices) > 1:
            raise ValueError(
                f"simulated process group: tensors of one collective lie on {', '.join(map(str, devices))}"
            )
        device = next(iter([*devices, *self._lanes]), torch.device("cpu"))
        if device not in self._lanes:
            self._lanes[device] = type(self).host_lane() if device.type == "cpu" else StreamLane(device)
        return self._lanes[device]

    def _ring_bytes(self, full: Tensor) -> float:
        return full.nbytes * (self.size() - 1) / self.size()

    def _all_gather(self, output: Tensor, input: Tensor) -> Message:
        self._check("all-gather", full=output, part=input)
        rank, chunks, part = self.rank(), output.view(self.size(), -1), input.view(1, -1)

        def fill() -> None:
            if chunks[rank].data_ptr() != part.data_ptr():
                chunks.copy_(part)
                return
            for others in (chunks[:rank], chunks[rank + 1 :]):
                if len(others):
                    others.copy_(part)

        return Message("all_gather", self._ring_bytes(output), (output,), (input,), fill)

    def _all_gather_list(self, outputs: list[Tensor], input: Tensor) -> Message:
        if len(outputs) != self.size():
            raise ValueError(f"simulated all-gather: {len(outputs)} outputs for {self.size()} ranks")

        def fill() -> None:
            for output in outputs:
                _copy(output, input)

        return Message("all_gather", input.nbytes * (self.size() - 1), tuple(outputs), (input,), fill)

    def _reduce_scatter(self, output: Tensor, input: Tensor, opts: Any) -> Message:
        self._check("reduce-scatter", full=input, part=output)
        scale, chunk = self._scale(opts), input.view(self.size(), -1)[self.rank()].view(output.shape)
        moved = self._ring_bytes(input)
        return Message("reduce_scatter", moved, (output,), (input,), lambda: _copy(output, chunk, scale))

    def _scale(self, opts: Any) -> int:
        """What reducing equal tensors of all ranks multiplies them with."""
        # Not ``in``: it asks the enum's own ``==``, which does not know what options hold.
        if any(opts.reduceOp == op for op in (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)):
            return 1
        if opts.reduceOp == dist.ReduceOp.SUM:
            return self.size()
        raise NotImplementedError("simulated process group: reductions are SUM, AVG, MIN and MAX; others are not there")

    def _check(self, name: str, full: Tensor, part: Tensor) -> None:
        if full.numel() != self.size() * part.numel() or full.dtype is not part.dtype:
            raise ValueError(
                f"simulated {name}: {self.size()} ranks' parts of {part.numel()} elements ({part.dtype}) are not the "
                f"full tensor's {full.numel()} ({full.dtype})"
            )


def _copy(target: Tensor, source: Tensor, scale: int = 1) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
    if scale != 1:
        target.mul_(scale)


def _create(options: Any, link: Link | None) -> SimulatedGroup:
    """Groups that are made of a simulated one, as a mesh's are, have its link."""
    if link is None:
        world = dist.group.WORLD
        link = world.link if isinstance(world, SimulatedGroup) else INSTANT
    return SimulatedGroup(options.group_rank, options.group_size, str(options.group_id), link)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda", "xpu"])


@contextlib.contextmanager
def simulated_group(world_size: int, link: Link, rank: int = 0) -> Iterator[SimulatedGroup]:
    """The default process group, for a while."""
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=world_size, pg_options=link)
    try:
        assert isinstance(dist.group.WORLD, SimulatedGroup)
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
