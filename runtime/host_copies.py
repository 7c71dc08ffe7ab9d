"""Copies of saved activations to the CPU and back, beside compute.

On an accelerator they run on a stream of their own, to and from pinned memory. Each waits for what the current stream
has been given so far, and the current stream waits for it where the graph does: memory that is given back after that is
reused in order. Copies of one device share a stream, so that a copy back finds what the copy out wrote. On the CPU a
copy is done when it has been started.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from graph_fsdp.runtime.collectives import Pending


def start_offload(value: Tensor) -> Pending:
    pinned = value.device.type != "cpu"
    return _start(torch.empty_like(value, device="cpu", pin_memory=pinned), value, value.device)


def start_reload(host: Tensor, device: torch.device) -> Pending:
    return _start(torch.empty_like(host, device=device), host, device)


@functools.cache
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def _start(target: Tensor, source: Tensor, device: torch.device) -> Pending:
    if device.type == "cpu":
        target.copy_(source)
        return Pending(target, lambda: None)
    stream = _stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        target.copy_(source, non_blocking=True)
    event = stream.record_event()
    return Pending(target, lambda: torch.accelerator.current_stream(device).wait_event(event))
