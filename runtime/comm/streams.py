"""Collectives and copies run on streams of their own, and those under way hold their tensors.

[Note: streams of collectives]
With ``async_op=True`` a process group runs a collective on a stream of its own, of normal priority, where it waits for
processors as long as the compute stream has kernels to start. So collectives have streams of ours, as with FSDP2
(``FSDPCommContext``): one for gathers, one for reductions and one for reductions over replicas, all of high priority.
There ``async_op=False`` runs them; each comes after what the current stream has queued, and the wait makes the current
stream wait for its event, and not the host. Models on one device share the streams.

Process groups then keep no tensors. They live here until the wait, as do those of copies; where nobody waits (a start
that raised, a run that was interrupted), the allocator is told that the stream uses their memory.

gloo has no streams: the host waits for its collectives, whatever device their tensors are on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.runtime.ranks import lockstep

Collective = Literal["gather", "reduce", "reduce over replicas"]
Copy = Literal["activations", "fetch", "offload"]
_HIGH = -1  # the priority, as CUDA and XPU count


@functools.cache
def stream_of(device: torch.device, use: Collective | Copy) -> torch.Stream:
    """Return the stream of all collectives, or copies, of one use."""
    return torch.Stream(device, priority=0 if use in ("activations", "fetch", "offload") else _HIGH)


class OnStream:
    """Holds ``tensors`` of a device that ``stream`` uses, until somebody has waited for it and empties them."""

    def __init__(self, stream: torch.Stream | None, tensors: Sequence[Tensor]) -> None:
        self.stream, self.tensors = stream, tensors

    def __del__(self) -> None:
        if self.stream is not None:
            for tensor in self.tensors:
                tensor.record_stream(self.stream)


class UnderWay(OnStream):
    """Is one collective, or several that are waited for together. ``start`` is called with ``async_op``, and returns
    what else to wait for, with None for nothing; it may read and write ``tensors``, and no memory of others."""

    def __init__(
        self, use: Collective, group: dist.ProcessGroup, tensors: Sequence[Tensor], start: Callable[[bool], list[Any]]
    ) -> None:
        OnStream.__init__(self, None, tensors)  # not super(): a mutant of it is a plain function
        self.device = tensors[0].device
        if tensors[0].is_cpu or compat.uses_gloo(group, self.device):
            self.works = start(True)
            return
        self.stream = stream_of(self.device, use)
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            works = start(False)
        self.works = [*works, self.stream.record_event()]

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                lockstep.finish(work, self.device)
        self.tensors = ()
