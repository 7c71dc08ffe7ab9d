"""Ranges in the timelines of torch.profiler and of Nsight Systems: what a program does, named by unit and phase.

    FSDP::forward                               a run of a program
    FSDP::compute layers.3 (forward)            a compute region; the units are those whose parameters it reads
    FSDP::gather layers.3 (forward)             the start of a collective, by its bucket; ``reduce``, ``fetch`` …
    FSDP::wait gather layers.3 (forward)        the wait for it, and the unpacking

Whether anybody records is asked once per run: a run that nobody records has nothing of this in it.

A range is torch.profiler's ``record_function`` where a profiler of torch records; under
``torch.autograd.profiler.emit_nvtx`` torch makes NVTX ranges of these. In a process that nsys has started, and that no
profiler of torch records, it is an NVTX range. (nsys tells its processes by ``NSYS_PROFILING_SESSION_ID``.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from graph_fsdp import compat
from graph_fsdp.runtime.comm.collectives import Pending, StartPlan
from graph_fsdp.runtime.observe.observer import Observer
from graph_fsdp.runtime.regions.regions import Compiled

T = TypeVar("T")
OpenRange: TypeAlias = Callable[[str], AbstractContextManager[Any]]
# A torch without CUDA has no NVTX to call.
_UNDER_NSYS = "NSYS_PROFILING_SESSION_ID" in os.environ and torch.version.cuda is not None


def recording() -> OpenRange | None:
    """How a range is opened, by its name; None while nobody records."""
    if compat.profiler_is_active():
        return record_function
    return torch.cuda.nvtx.range if _UNDER_NSYS else None


class Ranges(Observer):
    """A run in ranges. ``kernels``: place of a region → its units."""

    def __init__(self, open_range: OpenRange, phase: str, kernels: Mapping[int, str]) -> None:
        self._open_range, self._phase, self._kernels = open_range, phase, kernels
        self._under_way: dict[Pending, StartPlan] = {}

    def run(self, run: Callable[[], T]) -> T:
        with self._open_range(f"FSDP::{self._phase}"):
            return run()

    def region(self, index: int, function: Compiled, inputs: list[Any]) -> Sequence[Any]:
        with self._named("compute", self._kernels[index]):
            return function(inputs)

    def start(self, plan: StartPlan, start: Callable[[], Pending]) -> Pending:
        with self._named(plan.kind, plan.bucket):
            pending = start()
        self._under_way[pending] = plan
        return pending

    def wait(self, pending: Pending, wait: Callable[[], Tensor]) -> Tensor:
        plan = self._under_way.pop(pending)
        with self._named(f"wait {plan.kind}", plan.bucket):
            return wait()

    def call(self, what: str, unit: str, call: Callable[[], Tensor]) -> Tensor:
        with self._named(what, unit):
            return call()

    def _named(self, what: str, whose: str) -> AbstractContextManager[Any]:
        return self._open_range(" ".join(filter(None, (f"FSDP::{what}", whose, f"({self._phase})"))))
