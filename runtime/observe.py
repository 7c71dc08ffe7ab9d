"""Watching programs run: one way for times, for schedules as they ran, and for ranges in other tools' timelines.

An observer is made for each run of a program that is watched, and sees its compute regions, the starts of collectives
and copies, and the waits for them. Two are here.

*Ranges* name by unit and phase what a program does, in the timelines of torch.profiler and of Nsight Systems:

    FSDP::forward                               a run of a program
    FSDP::compute layers.3 (forward)            a compute region; the units are those whose parameters it reads
    FSDP::gather layers.3 (forward)             the start of a collective, by its bucket; ``reduce``, ``fetch`` …
    FSDP::wait gather layers.3 (forward)        the wait for it, and the unpacking

Where a profiler of torch records, they are its ``record_function``, of which ``torch.autograd.profiler.emit_nvtx``
makes NVTX ranges; else, in a process that nsys has started, NVTX ranges. (nsys tells its processes by
``NSYS_PROFILING_SESSION_ID``.) Who records is asked once per run.

A *recorder* marks the beginning and the end of each region, of each start of a collective or copy, and of the wait for
it; of the collective itself, which runs on threads or streams of its process group, nothing. It waits for nothing that
the program does not wait for, unless what runs is timed *alone*: then each collective is waited for right where it
starts, so that its time is its own, and so are those of the regions. All ranks must time at once: a rank that goes on
computing keeps the others waiting. On CPU times are the host's. On accelerators they lie between events on the current
stream, and are read when a step is over, so that the host runs ahead of the device as it always does.
"""

from __future__ import annotations

import functools
import os
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch.profiler import record_function

from graph_fsdp import compat
from graph_fsdp.runtime.comm.collectives import Pending
from graph_fsdp.runtime.comm.copies import Copy

if TYPE_CHECKING:
    from graph_fsdp.runtime.executor import Program

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


Place: TypeAlias = "tuple[Program, int]"  # a step of a program, by its index in ``cut(program.graph)``


@dataclass(frozen=True)
class Interval:
    """In a run. ``index``: of the region, or of the start, in ``cut(program.graph)``. Seconds from the start of the
    training step."""

    what: What
    index: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class ProgramRun:
    """One run of a program, in seconds from the start of the training step. ``intervals``: in the order in which they
    began."""

    program: Program
    begin: float
    end: float
    intervals: list[Interval]


class Recorder:
    """``steps``: of each training step, the programs that it ran, in order. ``alone``: nothing runs beside a
    collective, and copies are not recorded."""

    def __init__(self, device: torch.device, alone: bool = False) -> None:
        self.device, self.alone = device, alone
        self.steps: list[list[ProgramRun]] = []
        self._runs: list[ProgramRun] = []  # of this step, in marks and not in seconds

    @contextmanager
    def recording(self, programs: Iterable[Program]) -> Iterator[None]:
        """For a time, runs of these programs are recorded."""
        with ExitStack() as stack:
            for program in programs:
                stack.enter_context(program.observed_by(self._begin))
            yield

    def end_step(self) -> None:
        """Turn the marks made so far into seconds, as those of one training step. It waits for the device."""
        runs, self._runs = self._runs, []
        if not runs:
            return
        since = functools.partial(self.seconds_between, runs[0].begin)
        for run in runs:
            run.begin, run.end = since(run.begin), since(run.end)
            run.intervals = [replace(i, begin=since(i.begin), end=since(i.end)) for i in run.intervals]
        self.steps.append(runs)

    @property
    def seconds(self) -> dict[Place, list[float]]:
        """Region or start → what each of its runs took, in the order of their first runs."""
        found: dict[Place, list[float]] = {}
        for run in (run for runs in self.steps for run in runs):
            for interval in run.intervals:
                if interval.what != "wait":
                    found.setdefault((run.program, interval.index), []).append(interval.seconds)
        return found

    def _begin(self, program: Program) -> Observer:
        now = self.mark()
        run = ProgramRun(program, now, now, [])
        self._runs.append(run)

        def see(event: Event, call: Callable[[], T]) -> T:
            begin: Any = self.mark() if event.step is not None else None
            value = call()
            if event.what == "run":
                run.end = self.mark()
            if event.step is None or (self.alone and isinstance(value, Copy)):
                return value
            if self.alone and isinstance(value, Pending):
                value.finish()
                value.finish = lambda: None  # for the program's own wait
            run.intervals.append(Interval(event.what, event.step, begin, self.mark()))
            return value

        return see

    def mark(self) -> Any:
        """Mark the time of the device."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Waits on the host until ``end`` has been reached."""
        if self.device.type == "cpu":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3  # milliseconds
