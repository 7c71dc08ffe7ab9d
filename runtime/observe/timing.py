"""Times of running programs: of each compute region and of each collective by itself.

While a program is timed, each collective is waited for right where it starts, so that nothing runs beside it: its
time is its own, and so are those of the regions. Collectives keep their order, and all ranks must time at once: a rank
that goes on computing keeps the others waiting. A program that is not timed has nothing of this in it.

On CPU times are the host's. On accelerators they lie between events on the current stream, and are read when a step is
over, so that the host runs ahead of the device as it always does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from graph_fsdp.runtime.comm.collectives import Pending, StartPlan
from graph_fsdp.runtime.executor import Program
from graph_fsdp.runtime.frame import GatherPlan, ReducePlan
from graph_fsdp.runtime.observe.observer import Observer
from graph_fsdp.runtime.regions.regions import Compiled

Place = tuple[Program, int]  # a step of a program, by its index in ``cut(program.graph)``


class Clock:
    """Marks on the time of a device, and the seconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Waits on the host until ``end`` has been reached."""
        if self.device.type == "cpu":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3  # milliseconds


class Recorder:
    """What timed programs took. ``seconds``: place → each of its runs, places in the order of their first run."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self.seconds: dict[Place, list[float]] = {}
        self.marks: list[tuple[Place, Any, Any]] = []

    @contextlib.contextmanager
    def timing(self, programs: Iterable[Program]) -> Iterator[None]:
        """For a time, runs of these programs are timed."""
        with contextlib.ExitStack() as stack:
            for program in programs:
                stack.enter_context(program.observed_by(lambda program: _TimedRun(self, program)))
            yield

    def read(self) -> None:
        """Turn the marks made so far into seconds. To be called between steps: it waits for the device."""
        for place, begin, end in self.marks:
            self.seconds.setdefault(place, []).append(self.clock.seconds(begin, end))
        self.marks.clear()


class _TimedRun(Observer):
    """A run in which collectives end where they start."""

    def __init__(self, recorder: Recorder, program: Program) -> None:
        self.recorder, self.program = recorder, program

    def region(self, index: int, function: Compiled, inputs: list[Any]) -> Sequence[Any]:
        begin = self.recorder.clock.mark()
        outputs = function(inputs)
        self._add(index, begin)
        return outputs

    def start(self, plan: StartPlan, start: Callable[[], Pending]) -> Pending:
        if not isinstance(plan, (GatherPlan, ReducePlan)):
            return start()
        begin = self.recorder.clock.mark()
        pending = start()
        pending.finish()
        pending.finish = lambda: None  # for the program's own wait
        self._add(plan.step, begin)
        return pending

    def _add(self, index: int | None, begin: Any) -> None:
        assert index is not None
        self.recorder.marks.append(((self.program, index), begin, self.recorder.clock.mark()))
