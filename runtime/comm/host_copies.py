"""Copies between the CPU and an accelerator, beside compute.

They run on streams of their own, to and from pinned memory. A copy comes after what the current stream has queued when
it starts, and the current stream waits for it where the graph does: memory that is given back after that is reused in
order. On the CPU a copy is done when it has been started.

Saved activations are copied here; shards and their gradients in ``copies.py``, which has rules of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from graph_fsdp.runtime.comm.collectives import Pending

Use = Literal["activations", "fetch", "offload"]


@functools.cache
def copy_stream(device: torch.device, use: Use) -> torch.Stream:
    """The stream of all copies of one use from and to a device. Activations have one for both directions: a copy back
    finds what the copy out wrote."""
    return torch.Stream(device)


def copy_beside(pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device, use: Use) -> torch.Event:
    """Copy (target, source) beside compute on ``device``, an accelerator; the end of it."""
    stream = copy_stream(device, use)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    return stream.record_event()


def wait_on_device(event: torch.Event, device: torch.device) -> None:
    """The device's current stream waits, and the host does not."""
    torch.accelerator.current_stream(device).wait_event(event)


def start_offload(value: Tensor) -> Pending:
    pinned = value.device.type != "cpu"
    return _start(torch.empty_like(value, device="cpu", pin_memory=pinned), value, value.device)


def start_reload(host: Tensor, device: torch.device) -> Pending:
    return _start(torch.empty_like(host, device=device), host, device)


def _start(target: Tensor, source: Tensor, device: torch.device) -> Pending:
    if device.type == "cpu":
        target.copy_(source)
        return Pending(target, lambda: None)
    event = copy_beside([(target, source)], device, "activations")
    return Pending(target, functools.partial(wait_on_device, event, device))
