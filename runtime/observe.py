"""Observers watch programs run: for times, for schedules as they ran, and for ranges in other tools' timelines.

An observer is made for each run of a watched program. It sees the compute regions, the starts of collectives and
copies, and the waits for them. There are two kinds.

*Ranges* name what a program does in the timelines of torch.profiler and of Nsight Systems:

    FSDP::forward                               a run of a program
    FSDP::compute layers.3 (forward)            a compute region, by the units whose parameters it reads
    FSDP::gather layers.3 (forward)             the start of a collective, by its bucket; ``reduce``, ``fetch`` …
    FSDP::wait gather layers.3 (forward)        the wait for it, and the unpacking

They are torch's ``record_function`` where a profiler of torch records, else NVTX ranges in a process that nsys has
started (docs/decisions/reports_and_plans.md).

A *recorder* marks begin and end of each region, start and wait: in time of the host on the CPU, else by events on the
current stream. It waits for nothing itself, unless it times each collective *alone*, by waiting for it where it starts.
All ranks must record at once, or one that computes keeps the others waiting.

A *watcher* stays for a whole training. It sees the starts and waits of the runs that it chooses, and no regions, so
that these runs are as ever: counted in reports, and replayed where they are CUDA graphs.
"""

from __future__ import annotations

import functools
import os
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
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
    """Describes something that a program does and that takes time. ``step`` is the index of its region or start in
    ``cut(program.graph)``, or None; ``name`` says what it is, and ``whose`` names its bucket or units."""

    what: What
    step: int | None = None
    name: str = ""
    whose: str = ""


class Observer(Protocol):
    """Sees one run of a program: it calls what it is given, once, and returns what that returned."""

    def __call__(self, event: Event, call: Callable[[], T]) -> T: ...


MakeObserver = Callable[[Any], Observer]  # of the program that begins a run


class Watcher(Protocol):
    """Watches a compiled model for as long as it is in the engine's list of watchers."""

    def forward(self, unit: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Learn that the model (``unit`` is ""), or a unit by itself, is called."""

    def run(self, program: Program) -> Observer | None:
        """Return what is to see the starts and waits of a run that begins; None: nothing."""

    def clipped(self, norm: Tensor) -> None:
        """Learn the 2-norm of all gradients, a scalar, before they were clipped."""


def seen_by(observers: Sequence[Observer], event: Event, call: Callable[..., T], *given: Any) -> T:
    """Call a function in the sight of observers, the last one outermost."""
    seen: Callable[[], T] = functools.partial(call, *given)
    for observer in observers:
        seen = functools.partial(observer, event, seen)
    return seen()


def observed(run: Callable[..., Any], regions: Mapping[int, str], observers: Sequence[Observer]) -> Callable[..., Any]:
    """Return a program's function with its ``regions`` (index → units) seen by observers."""
    assert isinstance(run, types.FunctionType)  # all functions of a program are: made from one code
    seen = dict(run.__globals__)
    for index, units in regions.items():
        name, event = f"region_{index}", Event("region", index, "compute", units)
        seen[name] = functools.partial(seen_by, observers, event, seen[name])
    return types.FunctionType(run.__code__, seen)


def recording() -> OpenRange | None:
    """Return the function that opens a range by its name; None while nobody records."""
    if compat.profiler_is_active():
        return record_function
    return torch.cuda.nvtx.range if _UNDER_NSYS else None


def ranges(phase: str) -> list[Observer]:
    """Return what opens the ranges of a run; nothing while nobody records."""
    open_range = recording()
    if open_range is None:
        return []

    def see(event: Event, call: Callable[[], T]) -> T:
        words = (event.name, event.whose, f"({phase})") if event.name else (phase,)
        with open_range(f"FSDP::{' '.join(filter(None, words))}"):
            return call()

    return [see]


Place: TypeAlias = "tuple[Program, int]"  # a step of a program, by its index in ``cut(program.graph)``


@dataclass(frozen=True)
class Interval:
    """Times a region, start or wait in a run. ``index`` is that of the region or start in ``cut(program.graph)``;
    ``begin`` and ``end`` are seconds from the start of the training step."""

    what: What
    index: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class ProgramRun:
    """Times one run of a program, in seconds from the start of the training step; ``intervals`` are in order."""

    program: Program
    begin: float
    end: float
    intervals: list[Interval]


class Clock:
    """Marks moments: of the host on the CPU, else of the device's current stream, by events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        """Say whether the device has reached a mark, without waiting for it."""
        return self.device.type == "cpu" or bool(mark.query())

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Wait on the host until ``end`` is reached, and return the seconds since ``begin``."""
        if self.device.type == "cpu":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3  # milliseconds


class Recorder(Clock):
    """Records programs. ``steps`` has the runs of each training step, in order. With ``alone``, nothing runs beside a
    collective, and copies are not recorded."""

    def __init__(self, device: torch.device, alone: bool = False) -> None:
        super().__init__(device)
        self.alone = alone
        self.steps: list[list[ProgramRun]] = []
        self._runs: list[ProgramRun] = []  # of this step, in marks and not in seconds

    @contextmanager
    def recording(self, programs: Iterable[Program]) -> Iterator[None]:
        watched = list(programs)
        for program in watched:
            program.observers.append(self._begin)
        try:
            yield
        finally:
            for program in watched:
                program.observers.remove(self._begin)

    def end_step(self) -> None:
        """Turn the marks made so far into seconds, as those of one training step. This waits for the device."""
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
        """Return, for each region and start, what each of its runs took, in the order of their first runs."""
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
