"""Copies go between the CPU and the device that computes: of shards, of their gradients, and of saved activations.

On CUDA and XPU the copies of each use have one stream, also those back, which find there what the copy out wrote; host
memory is pinned. A copy comes after what the current stream has queued when it starts, and the wait blocks the current
stream, not the host. Only that for offloaded gradients blocks the host, as the CPU reads next. Where the device is the
CPU, a copy is done at its start.

[Note: writes after a run]
The optimizer writes to shards on the CPU, which the device may still be about to read. A run that ends with gradients
has waited for them, and so for all that was fetched before. Any other run keeps the event of its last fetch, and the
host waits for it at the end of the run (``Frame.close``); except forward, which backward follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.runtime.comm import streams
from graph_fsdp.runtime.comm.collectives import Pending, slice_in_place


@dataclass(eq=False)
class Copy(Pending):
    """Is a copy under way. ``event`` is its end on the device; None where it is done."""

    event: torch.Event | None = None


def start_fetch(shards: Sequence[Tensor], layout: GatherLayout, device: torch.device) -> Copy:
    """Start to copy a bucket's slice of the shard storage, flat, to ``device``; where the shards lie in several pieces
    of memory, each by itself."""
    buffer = torch.empty(layout.length, dtype=shards[0].dtype, device=device)
    if (source := slice_in_place(shards, layout)) is not None:
        return _start(buffer, [(buffer, source.detach())], device, "fetch")
    targets = [buffer[begin : begin + shard.numel()] for begin, shard in zip(layout.offsets, shards, strict=True)]
    pairs = [(part, shard.detach().reshape(-1)) for part, shard in zip(targets, shards, strict=True)]
    return _start(buffer, pairs, device, "fetch")


def start_offload(values: Sequence[Tensor], pin_memory: bool) -> Copy:
    """Start to copy ``values``, of one dtype, one behind the other into new flat memory of the CPU."""
    numels = [value.numel() for value in values]
    out = torch.empty(sum(numels), dtype=values[0].dtype, pin_memory=pin_memory)
    pairs = [(part, value.reshape(-1)) for part, value in zip(out.split(numels), values, strict=True)]
    return _start(out, pairs, values[0].device, "offload")


def offload_activation(value: Tensor) -> Copy:
    host = torch.empty_like(value, device="cpu", pin_memory=value.device.type != "cpu")
    return _start(host, [(host, value)], value.device, "activations")


def reload_activation(host: Tensor, device: torch.device) -> Copy:
    buffer = torch.empty_like(host, device=device)
    return _start(buffer, [(buffer, host)], device, "activations")


def _start(whole: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, use: streams.Copy) -> Copy:
    """Copy (part of ``whole``, source) from or to ``device``."""
    if device.type == "cpu":
        for part, source in pairs:
            part.copy_(source)
        return Copy(whole, lambda: None)
    stream = streams.stream_of(device, use)
    stream.wait_stream(torch.accelerator.current_stream(device))
    held = streams.OnStream(stream, [value for pair in pairs for value in pair if not value.is_cpu])
    with stream:
        for part, source in pairs:
            part.copy_(source, non_blocking=True)
    event = stream.record_event()
    if use == "offload":  # what is held is dropped now, and its memory used again when the copy is done
        return Copy(whole, event.synchronize, event)

    def finish() -> None:
        torch.accelerator.current_stream(device).wait_event(event)  # and the host does not wait
        held.tensors = ()

    return Copy(whole, finish, event)
