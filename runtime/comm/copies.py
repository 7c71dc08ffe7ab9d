"""Copies between the CPU, where shards and their gradients are kept, and the device that computes.

On CUDA and XPU each direction has a stream of its own. A copy comes after what the current stream has queued when it
starts: the memory that it writes (a fetch) may have had another use before, and what it reads (an offload) is computed
there. The wait for a fetch makes the current stream wait, and not the host; the wait for an offload makes the host
wait, because the CPU reads next. Copies run beside compute where the CPU's memory is page-locked.

[Note: writes after a run]
The optimizer writes to shards on the CPU, which the device may still be about to read. A run that ends with gradients
has waited for them, and so for all that was fetched before. Any other run keeps the event of its last fetch, and the
host waits for it at the end of the run (``Copies.close``); except forward, behind which comes backward.

Where the device is the CPU, a copy is a copy, done when it is started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.runtime.comm import collectives, host_copies
from graph_fsdp.runtime.comm.collectives import Pending, StartPlan
from graph_fsdp.runtime.comm.host_copies import copy_beside, copy_stream, wait_on_device
from graph_fsdp.runtime.operators import finished, implement, started


@dataclass(frozen=True)
class CopyPlan(StartPlan):
    """The static part of one copy, of kind "fetch" or "offload". ``start`` takes the shards, or the gradients.
    ``ends_with_run``: see [Note: writes after a run]."""

    start: Callable[[list[Tensor]], Copy]
    ends_with_run: bool


@dataclass(eq=False)
class Copy(Pending):
    """A copy under way. ``event``: its end on the device; None where it is done."""

    event: torch.Event | None = None


def copy_plan(node: fx.Node, step: int, graph: Graph) -> CopyPlan:
    """The plan of a node of ``dialect.COPY_STARTS``."""
    bucket = node.meta["fsdp"].bucket
    if node.target is dialect.offload_start:
        start = functools.partial(start_offload, pin_memory=dialect.argument(node, "pin_memory"))
        return CopyPlan(step, bucket, "offload", start, False)
    shards, offsets, length = (dialect.argument(node, name) for name in ("shards", "offsets", "length"))
    layout = GatherLayout.make(offsets, [shard.meta["val"].numel() for shard in shards], length, 1)
    fetch = functools.partial(start_fetch, layout=layout, device=dialect.argument(node, "device"))
    return CopyPlan(step, bucket, "fetch", fetch, graph.phase != "forward")


def start_fetch(shards: Sequence[Tensor], layout: GatherLayout, device: torch.device) -> Copy:
    """A bucket's slice of the shard storage, flat, on ``device``."""
    source = collectives.shard_slice(shards, layout).detach()
    if device.type == "cpu":
        return Copy(source.clone(), _nothing)
    buffer = torch.empty(source.shape, dtype=source.dtype, device=device)
    event = copy_beside([(buffer, source)], device, "fetch")
    return Copy(buffer, functools.partial(wait_on_device, event, device), event)


def start_offload(values: Sequence[Tensor], pin_memory: bool) -> Copy:
    """``values``, of one dtype, one behind the other, flat, in memory of the CPU that nothing else has."""
    first = values[0]
    out = torch.empty(sum(v.numel() for v in values), dtype=first.dtype, pin_memory=pin_memory)
    parts = out.split([v.numel() for v in values])
    if first.device.type == "cpu":
        for part, value in zip(parts, values, strict=True):
            part.copy_(value.reshape(-1))
        return Copy(out, _nothing)
    pairs = [(part, value.reshape(-1)) for part, value in zip(parts, values, strict=True)]
    event = copy_beside(pairs, first.device, "offload")
    for _, value in pairs:  # it is dropped now, and its memory used again when the copy is done
        value.record_stream(copy_stream(first.device, "offload"))
    return Copy(out, event.synchronize, event)


def _nothing() -> None:
    pass


class Copies:
    """The copies of one run."""

    def __init__(self) -> None:
        self._last: torch.Event | None = None

    def start(self, plan: CopyPlan, tensors: list[Tensor]) -> Copy:
        copy = plan.start(tensors)
        if plan.ends_with_run:
            self._last = copy.event
        return copy

    def close(self) -> None:
        if self._last is not None:
            self._last.synchronize()


# --- the operators called one by one


@implement("fetch_start")
def _fetch_start(shards: list[Tensor], offsets: list[int], length: int, device: torch.device) -> Tensor:
    layout = GatherLayout.make(offsets, [s.numel() for s in shards], length, 1)
    return started(start_fetch(shards, layout, device))


@implement("fetch_wait")
def _fetch_wait(buffer: Tensor) -> Tensor:
    return finished(buffer)


@implement("offload_start")
def _offload_start(values: list[Tensor], pin_memory: bool) -> Tensor:
    return started(start_offload(values, pin_memory))


@implement("offload_wait")
def _offload_wait(buffer: Tensor) -> Tensor:
    return finished(buffer)


@implement("offload_activation")
def _offload_activation(value: Tensor) -> Tensor:
    return started(host_copies.start_offload(value))


@implement("activation_offloaded")
def _activation_offloaded(host: Tensor, value: Tensor) -> Tensor:
    return finished(host)


@implement("reload_activation")
def _reload_activation(host: Tensor, device: torch.device) -> Tensor:
    return started(host_copies.start_reload(host, device))


@implement("activation_reloaded")
def _activation_reloaded(buffer: Tensor, host: Tensor) -> Tensor:
    return finished(buffer)
