"""A ``MonitoredStep`` has what a monitor notes of one step."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graph_fsdp.runtime import Program


@dataclass
class MonitoredStep:
    """Holds what was noted of one step, in marks of the clock. ``waits``: of collectives, where they were timed.
    ``square`` and ``norm``: scalars on the CPU, which are written when the end is past."""

    number: int
    begin: Any
    end: Any = None
    tokens: int | None = None
    causes: tuple[str, ...] = ()
    captured: bool = False
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    square: Tensor | None = None
    norm: Tensor | None = None


def on_host(value: Tensor) -> Tensor:
    """Start to copy a scalar to the CPU; it is there when the device has reached a later mark."""
    if value.device.type == "cpu":
        return value.detach()
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value.detach(), non_blocking=True)


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes that were held: resident ones of the process on the CPU, else torch's allocator's."""
    if device.type == "cpu":
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kilobytes if sys.platform == "darwin" else kilobytes * 1024
    allocated = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return None if allocated is None else int(allocated(device))
