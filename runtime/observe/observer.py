"""Watching programs run: one way for times, for schedules as they ran, and for ranges in other tools' timelines.

An observer is made for each run of a program that is watched, and sees its compute regions, the starts of collectives
and copies, and the waits for them.

Ranges are what an observer of this file makes, in the timelines of torch.profiler and of Nsight Systems: what a program
does, named by unit and phase.

    FSDP::forward                               a run of a program
    FSDP::compute layers.3 (forward)            a compute region; the units are those whose parameters it reads
    FSDP::gather layers.3 (forward)             the start of a collective, by its bucket; ``reduce``, ``fetch`` …
    FSDP::wait gather layers.3 (forward)        the wait for it, and the unpacking

Whether anybody records is asked once per run. A range is torch.profiler's ``record_function`` where a profiler of torch
records; under ``torch.autograd.profiler.emit_nvtx`` torch makes NVTX ranges of these. In a process that nsys has
started, and that no profiler of torch records, it is an NVTX range. (nsys tells its processes by
``NSYS_PROFILING_SESSION_ID``.)
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch.profiler import record_function

from graph_fsdp import compat

T = TypeVar("T")
What: TypeAlias = Literal["run", "region", "start", "wait", "call"]
OpenRange: TypeAlias = Callable[[str], AbstractContextManager[Any]]
# A torch without CUDA has no NVTX to call.
_UNDER_NSYS = "NSYS_PROFILING_SESSION_ID" in os.environ and torch.version.cuda is not None


@dataclass(frozen=True)
class Event:
    """Something that a program does and that takes time. ``step``: the place of its region, or of its start, in
    ``cut(program.graph)``; None where it has none. ``name`` and ``whose``, a bucket or units, in words."""

    what: What
    step: int | None = None
    name: str = ""
    whose: str = ""


class Observer(Protocol):
    """Sees one run of a program: calls what it is given, once, and returns what that returned."""

    def __call__(self, event: Event, call: Callable[[], T]) -> T: ...


MakeObserver = Callable[[Any], Observer]  # of the program that begins a run


def seen_by(observers: Sequence[Observer], event: Event, call: Callable[..., T], *given: Any) -> T:
    """Call a function in the sight of observers, the last one outermost."""
    seen: Callable[[], T] = functools.partial(call, *given)
    for observer in observers:
        seen = functools.partial(observer, event, seen)
    return seen()


def observed(run: Callable[..., Any], regions: Mapping[int, str], observers: Sequence[Observer]) -> Callable[..., Any]:
    """A program's function, its ``regions`` seen by observers: place → units."""
    assert isinstance(run, types.FunctionType)  # all functions of a program are: made from one code
    seen = dict(run.__globals__)
    for index, units in regions.items():
        name, event = f"region_{index}", Event("region", index, "compute", units)
        seen[name] = functools.partial(seen_by, observers, event, seen[name])
    return types.FunctionType(run.__code__, seen)


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
