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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graph_fsdp.runtime.comm.collectives import Pending
from graph_fsdp.runtime.executor import Frame, GatherPlan, MakeFrame, Program, ReducePlan
from graph_fsdp.runtime.kept_gradients import KeptGradients
from graph_fsdp.runtime.regions.regions import Compiled, Region, cut
from graph_fsdp.runtime.slots import GatheredBytes, SlotPlan

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
        self._marks: list[tuple[Place, Any, Any]] = []

    @contextlib.contextmanager
    def timing(self, programs: Iterable[Program]) -> Iterator[None]:
        """For a time, runs of these programs are timed."""
        with contextlib.ExitStack() as stack:
            for program in programs:
                stack.enter_context(self._instrumented(program))
            yield

    def read(self) -> None:
        """Turn the marks made so far into seconds. To be called between steps: it waits for the device."""
        for place, begin, end in self._marks:
            self.seconds.setdefault(place, []).append(self.clock.seconds(begin, end))
        self._marks.clear()

    def _instrumented(self, program: Program) -> contextlib.AbstractContextManager[None]:
        regions: dict[str, Compiled] = {}
        plans: dict[int, int] = {}
        for index, step in enumerate(cut(program.graph)):
            name = f"region_{index}"
            if not isinstance(step, Region):
                plans[id(program.constants.get(f"plan_{index}"))] = index
            elif not step.is_view_only:
                regions[name] = partial(self._run_region, (program, index), program.constants[name])
        record = lambda plan, begin, end: self._marks.append(((program, plans[id(plan)]), begin, end))  # noqa: E731
        # Bytes and collectives of timed runs are counted by themselves: reports tell of training.
        return program.instrumented(regions, _timed_frames(self.clock, record))

    def _run_region(self, place: Place, function: Compiled, inputs: list[Any]) -> Sequence[Any]:
        begin = self.clock.mark()
        outputs = function(inputs)
        self._marks.append((place, begin, self.clock.mark()))
        return outputs


def _timed_frames(clock: Clock, record: Callable[[Any, Any, Any], None]) -> MakeFrame:
    return lambda _, slots, kept: _TimedFrame(slots, kept, clock, record)


class _TimedFrame(Frame):
    """A run in which collectives end where they start."""

    def __init__(
        self, slots: SlotPlan, kept: KeptGradients, clock: Clock, record: Callable[[Any, Any, Any], None]
    ) -> None:
        super().__init__(GatheredBytes(), slots, kept)
        self.clock, self.record = clock, record

    def gather_start(self, plan: GatherPlan, shards: list[Tensor]) -> Tensor:
        return self._timed(super().gather_start, plan, shards)

    def reduce_start(self, plan: ReducePlan, grads: list[Tensor] | Tensor) -> Tensor:
        return self._timed(super().reduce_start, plan, grads)

    def _timed(self, start: Callable[..., Tensor], plan: GatherPlan | ReducePlan, inputs: Any) -> Tensor:
        begin = self.clock.mark()
        buffer = start(plan, inputs)
        self.pending[id(buffer)].finish()
        self.pending[id(buffer)] = Pending(buffer, lambda: None)  # for the program's own wait
        self.record(plan, begin, self.clock.mark())
        return buffer
