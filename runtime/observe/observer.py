"""Watching programs run: one way for times, for schedules as they ran, and for ranges in other tools' timelines.

An observer is made for each run of a program that is watched, and sees its compute regions, the starts of collectives
and copies, and the waits for them. A run that nobody watches has nothing of this in it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from graph_fsdp.runtime.comm.collectives import Pending, StartPlan
from graph_fsdp.runtime.regions.regions import Compiled

T = TypeVar("T")

OFFLOAD, RELOAD = StartPlan(None, "", "offload activation"), StartPlan(None, "", "reload activation")


class Observer:
    """Sees one run of a program. Each method calls what it is given, once, and returns what that returned."""

    def run(self, run: Callable[[], T]) -> T:
        """All of the run, its end too."""
        return run()

    def region(self, index: int, function: Compiled, inputs: list[Any]) -> Sequence[Any]:
        """A compute region that has kernels. ``index``: its place in ``cut(program.graph)``."""
        return function(inputs)

    def start(self, plan: StartPlan, start: Callable[[], Pending]) -> Pending:
        """The start of a collective or of a copy."""
        return start()

    def wait(self, pending: Pending, wait: Callable[[], Tensor]) -> Tensor:
        """The wait for what ``start`` has returned."""
        return wait()

    def call(self, what: str, unit: str, call: Callable[[], Tensor]) -> Tensor:
        """What else is run between regions and takes time: a hook of the user's, a reduction of payloads."""
        return call()


MakeObserver = Callable[[Any], Observer]  # of the program that begins a run


class ObservedFrame:
    """A run's frame, what it does seen by an observer. ``frame``: a ``Frame``, or one that is observed already."""

    def __init__(self, frame: Any, observer: Observer) -> None:
        self._frame, self._observer = frame, observer
        self.free, self.keep = frame.free, frame.keep  # nothing that takes time

    def gather_start(self, plan: StartPlan, shards: list[Tensor]) -> Pending:
        return self._observer.start(plan, functools.partial(self._frame.gather_start, plan, shards))

    def reduce_start(self, plan: StartPlan, grads: list[Tensor] | Tensor) -> Pending:
        return self._observer.start(plan, functools.partial(self._frame.reduce_start, plan, grads))

    def copy_start(self, plan: StartPlan, tensors: list[Tensor]) -> Pending:
        return self._observer.start(plan, functools.partial(self._frame.copy_start, plan, tensors))

    def offload(self, value: Tensor) -> Pending:
        return self._observer.start(OFFLOAD, functools.partial(self._frame.offload, value))

    def reload(self, host: Tensor, device: torch.device) -> Pending:
        return self._observer.start(RELOAD, functools.partial(self._frame.reload, host, device))

    def wait(self, pending: Pending) -> Tensor:
        return self._observer.wait(pending, functools.partial(self._frame.wait, pending))

    def reduce_payloads(self, reduce: Callable[[list[Tensor]], Tensor], values: list[Tensor]) -> Tensor:
        return self._observer.call(
            "reduce payloads", "", functools.partial(self._frame.reduce_payloads, reduce, values)
        )

    def hook(self, unit: str, buffer: Tensor) -> Tensor:
        return self._observer.call("hook", unit or "root", functools.partial(self._frame.hook, unit, buffer))


def observed(run: Callable[..., Any], regions: Iterable[int], observer: Observer) -> Callable[..., Any]:
    """A program's function, its ``regions`` seen by an observer."""
    assert isinstance(run, types.FunctionType)  # all functions of a program are: made from one code
    values = run.__globals__
    seen = {f"region_{i}": functools.partial(observer.region, i, values[f"region_{i}"]) for i in regions}
    return types.FunctionType(run.__code__, {**values, **seen})
