"""Watching programs run: one way for times, for schedules as they ran, and for ranges in other tools' timelines.

An observer is made for each run of a program that is watched, and sees its compute regions, the starts of collectives
and copies, and the waits for them. A run that nobody watches has nothing of this in it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from graph_fsdp.runtime.comm.collectives import Pending, StartPlan
from graph_fsdp.runtime.frame import Frame
from graph_fsdp.runtime.kept_gradients import KeepPlan

T = TypeVar("T")
What: TypeAlias = Literal["run", "region", "start", "wait", "call"]

_OFFLOAD, _RELOAD = StartPlan(None, "", "offload activation"), StartPlan(None, "", "reload activation")


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


class ObservedFrame:
    """A run's frame, what it does seen by an observer."""

    def __init__(self, frame: Frame | ObservedFrame, observer: Observer) -> None:
        self._frame, self._observer = frame, observer
        self._plans: dict[Pending, StartPlan] = {}  # of what is under way
        # What takes no time is not seen.
        self.free: Callable[[Tensor], None] = frame.free
        self.keep: Callable[[KeepPlan, Tensor], None] = frame.keep

    def gather_start(self, plan: StartPlan, shards: list[Tensor]) -> Pending:
        return self._start(plan, self._frame.gather_start, plan, shards)

    def reduce_start(self, plan: StartPlan, grads: list[Tensor] | Tensor) -> Pending:
        return self._start(plan, self._frame.reduce_start, plan, grads)

    def copy_start(self, plan: StartPlan, tensors: list[Tensor]) -> Pending:
        return self._start(plan, self._frame.copy_start, plan, tensors)

    def offload(self, value: Tensor) -> Pending:
        return self._start(_OFFLOAD, self._frame.offload, value)

    def reload(self, host: Tensor, device: torch.device) -> Pending:
        return self._start(_RELOAD, self._frame.reload, host, device)

    def _start(self, plan: StartPlan, start: Callable[..., Pending], *given: Any) -> Pending:
        pending = self._see(Event("start", plan.step, plan.kind, plan.bucket), start, *given)
        self._plans[pending] = plan
        return pending

    def wait(self, pending: Pending) -> Tensor:
        plan = self._plans.pop(pending)
        return self._see(Event("wait", plan.step, f"wait {plan.kind}", plan.bucket), self._frame.wait, pending)

    def reduce_payloads(self, reduce: Callable[[list[Tensor]], Tensor], values: list[Tensor]) -> Tensor:
        return self._see(Event("call", name="reduce payloads"), self._frame.reduce_payloads, reduce, values)

    def hook(self, unit: str, buffer: Tensor) -> Tensor:
        return self._see(Event("call", name="hook", whose=unit or "root"), self._frame.hook, unit, buffer)

    def _see(self, event: Event, call: Callable[..., T], *given: Any) -> T:
        bound: Callable[[], T] = functools.partial(call, *given)
        return self._observer(event, bound)


def observed(run: Callable[..., Any], regions: Mapping[int, str], observer: Observer) -> Callable[..., Any]:
    """A program's function, its ``regions`` seen by an observer: place → units."""
    assert isinstance(run, types.FunctionType)  # all functions of a program are: made from one code
    seen = dict(run.__globals__)
    for index, units in regions.items():
        event = Event("region", index, "compute", units)
        seen[f"region_{index}"] = functools.partial(_region, observer, event, seen[f"region_{index}"])
    return types.FunctionType(run.__code__, seen)


def _region(observer: Observer, event: Event, function: Callable[[list[Any]], T], inputs: list[Any]) -> T:
    return observer(event, functools.partial(function, inputs))
