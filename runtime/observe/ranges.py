"""Ranges in the timelines of torch.profiler and of Nsight Systems: what a program does, named by unit and phase.

    FSDP::forward                               a run of a program
    FSDP::compute layers.3 (forward)            a compute region; the units are those whose parameters it reads
    FSDP::gather layers.3 (forward)             the start of a collective, by its bucket; ``reduce``, ``fetch`` …
    FSDP::wait gather layers.3 (forward)        the wait for it, and the unpacking

Whether anybody records is asked once per run: a run that nobody records has nothing of this in it.

A range is torch.profiler's ``record_function`` where a profiler of torch records; under
``torch.autograd.profiler.emit_nvtx`` torch makes NVTX ranges of these. In a process that nsys has started, and that no
profiler of torch records, it is an NVTX range. (nsys tells its processes by ``NSYS_PROFILING_SESSION_ID``.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch
from torch.profiler import record_function

from graph_fsdp import compat
from graph_fsdp.runtime.observe.observer import Event, Observer

T = TypeVar("T")
OpenRange: TypeAlias = Callable[[str], AbstractContextManager[Any]]
# A torch without CUDA has no NVTX to call.
_UNDER_NSYS = "NSYS_PROFILING_SESSION_ID" in os.environ and torch.version.cuda is not None


def recording() -> OpenRange | None:
    """How a range is opened, by its name; None while nobody records."""
    if compat.profiler_is_active():
        return record_function
    return torch.cuda.nvtx.range if _UNDER_NSYS else None


def ranges(open_range: OpenRange, phase: str) -> Observer:
    """Make the observer that opens a range for each event of a run."""

    def see(event: Event, call: Callable[[], T]) -> T:
        words = (event.name, event.whose, f"({phase})") if event.name else (phase,)
        with open_range(f"FSDP::{' '.join(filter(None, words))}"):
            return call()

    return see
