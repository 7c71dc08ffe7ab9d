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
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from graph_fsdp.runtime.comm.copies import CopyPlan
from graph_fsdp.runtime.executor import Frame, GatherPlan, Program, ReducePlan
from graph_fsdp.runtime.kept_gradients import KeptGradients
from graph_fsdp.runtime.observe.timing import Clock
from graph_fsdp.runtime.regions.regions import Compiled, Region, cut
from graph_fsdp.runtime.slots import GatheredBytes, SlotPlan

What: TypeAlias = Literal["region", "start", "wait"]
_Marks: TypeAlias = list[tuple[What, int, Any, Any]]  # the index of the step, and the marks around it


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
                stack.enter_context(self._instrumented(program))
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

    def _instrumented(self, program: Program) -> contextlib.AbstractContextManager[None]:
        regions: dict[str, Compiled] = {}
        plans: dict[int, int] = {}
        for index, step in enumerate(cut(program.graph)):
            name = f"region_{index}"
            if not isinstance(step, Region):
                plans[id(program.constants.get(f"plan_{index}"))] = index
            elif not step.is_view_only:
                regions[name] = partial(self._run_region, index, program.constants[name])

        def frame(_: GatheredBytes, slots: SlotPlan, kept: KeptGradients) -> Frame:
            self._runs.append(_MarkedRun(program, self.clock.mark()))
            return _MarkedFrame(slots, kept, self.clock, self._runs[-1], plans)

        return program.instrumented(regions, frame)

    def _run_region(self, index: int, function: Compiled, inputs: list[Any]) -> Sequence[Any]:
        # The run that began last: no program runs within another one's region.
        begin = self.clock.mark()
        outputs = function(inputs)
        self._runs[-1].marks.append(("region", index, begin, self.clock.mark()))
        return outputs


class _MarkedRun:
    def __init__(self, program: Program, begin: Any) -> None:
        self.program, self.begin, self.end = program, begin, begin
        self.marks: _Marks = []


class _MarkedFrame(Frame):
    """As in training, but that bytes and collectives are not counted: reports tell of training."""

    def __init__(
        self, slots: SlotPlan, kept: KeptGradients, clock: Clock, run: _MarkedRun, plans: dict[int, int]
    ) -> None:
        super().__init__(GatheredBytes(), slots, kept)
        self._clock, self._run, self._plans = clock, run, plans
        self._under_way: dict[int, int] = {}  # the index of the start, by the id of the buffer

    def gather_start(self, plan: GatherPlan, shards: list[Tensor]) -> Tensor:
        return self._start(super().gather_start, plan, shards)

    def reduce_start(self, plan: ReducePlan, grads: list[Tensor] | Tensor) -> Tensor:
        return self._start(super().reduce_start, plan, grads)

    def copy_start(self, plan: CopyPlan, tensors: list[Tensor]) -> Tensor:
        return self._start(super().copy_start, plan, tensors)

    def _start(self, start: Callable[..., Tensor], plan: GatherPlan | ReducePlan | CopyPlan, inputs: Any) -> Tensor:
        begin, index = self._clock.mark(), self._plans[id(plan)]
        buffer = start(plan, inputs)
        self._run.marks.append(("start", index, begin, self._clock.mark()))
        self._under_way[id(buffer)] = index
        return buffer

    def wait(self, buffer: Tensor) -> Tensor:
        index = self._under_way.pop(id(buffer), None)
        if index is None:  # for a copy of an activation
            return super().wait(buffer)
        begin = self._clock.mark()
        super().wait(buffer)
        self._run.marks.append(("wait", index, begin, self._clock.mark()))
        return buffer

    def close(self) -> None:
        super().close()
        self._run.end = self._clock.mark()
