"""When the regions and collectives of running programs ran: beside each other as in training, or each by itself.

Marked are the beginning and the end of each region, of each start of a collective or copy, and of the wait for it; of
the collective itself, which runs on threads or streams of its process group, nothing is. Nothing is waited for that the
program does not wait for, unless what runs is timed *alone*: then each collective is waited for right where it starts,
so that its time is its own, and so are those of the regions. Collectives keep their order, and all ranks must time at
once: a rank that goes on computing keeps the others waiting.

On CPU times are the host's. On accelerators they lie between events on the current stream, and are read when a step is
over, so that the host runs ahead of the device as it always does.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from graph_fsdp.runtime.comm.collectives import Pending
from graph_fsdp.runtime.comm.copies import Copy
from graph_fsdp.runtime.executor import Program
from graph_fsdp.runtime.observe.observer import Event, What

T = TypeVar("T")
Place = tuple[Program, int]  # a step of a program, by its index in ``cut(program.graph)``


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


@dataclass(frozen=True)
class ProgramRun:
    """One run of a program, in seconds from the start of the training step. ``intervals``: in the order in which they
    began."""

    program: Program
    begin: float
    end: float
    intervals: Sequence[Interval]


class Recorder:
    """``steps``: of each training step, the programs that it ran, in order. ``alone``: nothing runs beside a
    collective, and copies are not recorded."""

    def __init__(self, device: torch.device, alone: bool = False) -> None:
        self.device, self.alone = device, alone
        self.steps: list[list[ProgramRun]] = []
        self._runs: list[_MarkedRun] = []

    @contextlib.contextmanager
    def recording(self, programs: Iterable[Program]) -> Iterator[None]:
        """For a time, runs of these programs are recorded."""
        with contextlib.ExitStack() as stack:
            for program in programs:
                stack.enter_context(program.observed_by(self._begin))
            yield

    def end_step(self) -> None:
        """Turn the marks made so far into seconds, as those of one training step. It waits for the device."""
        runs, self._runs = self._runs, []
        step = []
        for run in runs:
            since = functools.partial(self.seconds_between, runs[0].begin)
            intervals = [Interval(what, index, since(begin), since(end)) for what, index, begin, end in run.marks]
            step.append(ProgramRun(run.program, since(run.begin), since(run.end), intervals))
        if step:
            self.steps.append(step)

    @property
    def seconds(self) -> dict[Place, list[float]]:
        """Region or start → what each of its runs took, in the order of their first runs."""
        found: dict[Place, list[float]] = {}
        for run in (run for runs in self.steps for run in runs):
            for interval in run.intervals:
                if interval.what != "wait":
                    found.setdefault((run.program, interval.index), []).append(interval.seconds)
        return found

    def _begin(self, program: Program) -> _MarkedRun:
        self._runs.append(_MarkedRun(program, self))
        return self._runs[-1]

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


class _MarkedRun:
    """An observer of a run, which marks what it does."""

    def __init__(self, program: Program, recorder: Recorder) -> None:
        self.program, self.recorder = program, recorder
        self.begin = self.end = recorder.mark()
        self.marks: list[tuple[What, int, Any, Any]] = []  # the index of the step, and the marks around it

    def __call__(self, event: Event, call: Callable[[], T]) -> T:
        if event.step is None:
            value = call()
            if event.what == "run":
                self.end = self.recorder.mark()
            return value
        begin = self.recorder.mark()
        value = call()
        if self.recorder.alone and isinstance(value, Pending):
            if isinstance(value, Copy):
                return value
            value.finish()
            value.finish = lambda: None  # for the program's own wait
        self.marks.append((event.what, event.step, begin, self.recorder.mark()))
        return value
