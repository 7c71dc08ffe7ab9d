"""When the regions and collectives of running programs ran, beside each other as in training.

Nothing is waited for that the program does not wait for. Marked are the beginning and the end of each region, of each
start of a collective or copy, and of the wait for it; of the collective itself, which runs on threads or streams of its
process group, nothing is. Marks are as in ``timing.py``: the host's time on CPU, events on the current stream on
accelerators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from graph_fsdp.runtime.comm.collectives import Pending, StartPlan
from graph_fsdp.runtime.executor import Program
from graph_fsdp.runtime.observe.observer import Observer
from graph_fsdp.runtime.observe.timing import Clock
from graph_fsdp.runtime.regions.regions import Compiled

T = TypeVar("T")
What: TypeAlias = Literal["region", "start", "wait"]


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


class ScheduleRecorder:
    """``steps``: of each training step, the programs that it ran, in order."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
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
        if not runs:
            return
        since = partial(self.clock.seconds, runs[0].begin)
        self.steps.append(
            [
                ProgramRun(
                    run.program,
                    since(run.begin),
                    since(run.end),
                    [Interval(what, index, since(begin), since(end)) for what, index, begin, end in run.marks],
                )
                for run in runs
            ]
        )

    def _begin(self, program: Program) -> _MarkedRun:
        self._runs.append(_MarkedRun(program, self.clock))
        return self._runs[-1]


class _MarkedRun(Observer):
    """A run as in training, with marks around what it does."""

    def __init__(self, program: Program, clock: Clock) -> None:
        self.program, self.clock = program, clock
        self.begin = self.end = clock.mark()
        self.marks: list[tuple[What, int, Any, Any]] = []  # the index of the step, and the marks around it
        self._under_way: dict[Pending, int] = {}

    def run(self, run: Callable[[], T]) -> T:
        value = run()
        self.end = self.clock.mark()
        return value

    def region(self, index: int, function: Compiled, inputs: list[Any]) -> Sequence[Any]:
        return self._marked("region", index, partial(function, inputs))

    def start(self, plan: StartPlan, start: Callable[[], Pending]) -> Pending:
        if plan.step is None:
            return start()
        pending = self._marked("start", plan.step, start)
        self._under_way[pending] = plan.step
        return pending

    def wait(self, pending: Pending, wait: Callable[[], Tensor]) -> Tensor:
        index = self._under_way.pop(pending, None)
        return wait() if index is None else self._marked("wait", index, wait)

    def _marked(self, what: What, index: int, call: Callable[[], T]) -> T:
        begin = self.clock.mark()
        value = call()
        self.marks.append((what, index, begin, self.clock.mark()))
        return value
