"""The link of a simulated process group: where its collectives take their time, beside what the device computes.

**Streams** (accelerators whose torch module has ``_sleep``; in torch 2.13 that is CUDA's alone). A collective waits for
what the current stream has queued, occupies a stream of the link's with a kernel that spins for the time, and its
output is written on another stream meanwhile. The work's ``wait`` makes the current stream wait. The spinning kernel
takes one block of one multiprocessor: what NCCL's kernels take from compute is not simulated.

**CPU.** A thread of the link's sleeps until the collective's end and then writes its output; ``wait`` blocks the host.
Copies come on top of the time, and take a core and memory bandwidth from compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Link:
    """What each rank has to the others. bandwidth: bytes/s, "bus bandwidth" as nccl-tests report it; latency: seconds
    of a collective besides its bytes."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise ValueError(f"Link: bandwidth must be above 0 bytes/s and latency 0 s or more, got {self}")

    def seconds(self, messages: Sequence[Message], group: dist.ProcessGroup) -> float:
        """What messages take that a group launches as one."""
        return self.latency + sum(message.moved for message in messages) / self.bandwidth

    def levels(self, group: dist.ProcessGroup) -> frozenset[str]:
        """What the group's collectives share with those of other groups."""
        return frozenset({"link"})


INSTANT = Link(math.inf, 0.0)  # collectives take no time but that of the copies


@dataclass(frozen=True)
class Message:
    """One collective. ``moved``: bytes over this rank's link. ``fill`` reads ``inputs`` and writes ``outputs``, and no
    other tensors; what is reduced in place is an output."""

    kind: str
    moved: float
    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    fill: Callable[[], None]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.outputs, *self.inputs)


class Lane(Protocol):
    """Where collectives of one device take their time, one after the other."""

    def start(self, seconds: float, messages: Sequence[Message], timed: bool) -> tuple[dist.Work, Callable[[], float]]:
        """Start a launch that takes ``seconds`` and fills the messages' outputs; the work, and ``Launch.occupied``,
        which works if ``timed``."""

    def close(self) -> None:
        """Wait for what was started."""


# --- the CPU


class HostWork(dist.Work):
    def __init__(self, done: Future[float]) -> None:
        super().__init__()
        self.done = done

    def wait(self, timeout: Any = None) -> bool:
        self.done.result()
        return True

    def is_completed(self) -> bool:
        return self.done.done()


class ThreadLane:
    """The time of a launch begins when it is started and the link is free: what the thread is late with one launch
    (copies, the interpreter's lock) does not delay the next."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="simulated link")
        self._free = 0.0

    def start(self, seconds: float, messages: Sequence[Message], timed: bool) -> tuple[dist.Work, Callable[[], float]]:
        begin = max(time.perf_counter(), self._free)
        end = self._free = begin + seconds

        def run() -> float:
            time.sleep(max(0.0, end - time.perf_counter()))
            fill(messages)
            return time.perf_counter() - begin

        done = self._thread.submit(run)
        return HostWork(done), done.result

    def close(self) -> None:
        self._thread.shutdown()


# --- devices with streams


class StreamWork(dist.Work):
    """``tensors``: kept until a stream waits, so that the allocator does not give their memory to others before."""

    def __init__(self, done: torch.Event, device: torch.device, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.done, self.device, self.tensors = done, device, tensors

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream(self.device).wait_event(self.done)
        self.tensors = ()
        return True

    def is_completed(self) -> bool:
        return self.done.query()


class StreamLane:
    """Its streams have a high priority, unless ``priority`` says another: a collective does not wait for a free
    multiprocessor."""

    priority = -1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.link, self.copies = (torch.Stream(device, priority=self.priority) for _ in range(2))
        self.spin = _spin_kernel(device)
        self.cycles_per_second = self._calibrate()

    def start(self, seconds: float, messages: Sequence[Message], timed: bool) -> tuple[dist.Work, Callable[[], float]]:
        begin, done = (torch.Event(self.device, enable_timing=timed) for _ in range(2))
        self.link.wait_event(torch.accelerator.current_stream(self.device).record_event())
        self.link.record_event(begin)
        self.copies.wait_event(begin)
        with self.copies:
            fill(messages)
        if seconds:
            with self.link:
                self.spin(round(seconds * self.cycles_per_second))
        self.link.wait_event(self.copies.record_event())
        self.link.record_event(done)

        def occupied() -> float:
            done.synchronize()
            return begin.elapsed_time(done) * 1e-3  # milliseconds

        return StreamWork(done, self.device, [t for message in messages for t in message.tensors]), occupied

    def _calibrate(self, cycles: int = 20_000_000) -> float:
        """Cycles per second while the device also multiplies matrices: clocks are lower under load."""
        matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device=self.device)
        for _ in range(3):  # the last counts: clocks have settled
            for _ in range(100):
                matrix @ matrix
            begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
            with self.link:
                begin.record()
                self.spin(cycles)
                end.record()
            torch.accelerator.synchronize(self.device)
        return cycles / (begin.elapsed_time(end) * 1e-3)

    def close(self) -> None:
        self.link.synchronize()


def _spin_kernel(device: torch.device) -> Callable[[int], None]:
    """A private name of torch: a kernel that spins for so many cycles, as torch's own tests use it."""
    kernel: Callable[[int], None] | None = getattr(torch.get_device_module(device), "_sleep", None)
    if kernel is None:
        raise NotImplementedError(
            f"simulated process group: torch.{device.type} has no _sleep, the kernel that occupies a stream for a "
            "time; use CUDA or the CPU"
        )
    return kernel


def fill(messages: Sequence[Message]) -> None:
    """Write the outputs of messages."""
    # Autograd sees nothing of it, and tensors made in inference mode can be written, as by other backends.
    with torch.inference_mode():
        for message in messages:
            message.fill()
