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

import functools
import os
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.profiler import record_function

from graph_fsdp import compat
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.runtime.regions.regions import Compiled, Region, cut, unit_of

OpenRange: TypeAlias = Callable[[str], AbstractContextManager[Any]]
# A torch without CUDA has no NVTX to call.
_UNDER_NSYS = "NSYS_PROFILING_SESSION_ID" in os.environ and torch.version.cuda is not None


def recording() -> OpenRange | None:
    """How a range is opened, by its name; None while nobody records."""
    if compat.profiler_is_active():
        return record_function
    return torch.cuda.nvtx.range if _UNDER_NSYS else None


class ProgramRanges:
    """The ranges of one program."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A program's function, in ranges if somebody records now."""
        open_range = recording()
        return run if open_range is None else functools.partial(self._run, open_range, run)

    def _run(self, open_range: OpenRange, run: Callable[..., Any], frame: Any, args: list[Any]) -> Any:
        assert isinstance(run, types.FunctionType)  # all functions of a program are: made from one code
        values = run.__globals__
        regions = {
            function: functools.partial(_in_range, open_range, name, values[function])
            for function, name in self._names.items()
        }
        ranged = types.FunctionType(run.__code__, {**values, **regions})
        with open_range(f"FSDP::{self._graph.phase}"):
            return ranged(_RangedFrame(frame, open_range, self._graph.phase), args)

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        """Of the regions that have kernels, by their functions."""
        steps = enumerate(cut(self._graph))
        kernels = {f"region_{i}": step for i, step in steps if isinstance(step, Region) and not step.is_view_only}
        return {name: _name("compute", unit_of(region), self._graph.phase) for name, region in kernels.items()}


def _in_range(open_range: OpenRange, name: str, function: Compiled, inputs: list[Any]) -> Sequence[Any]:
    with open_range(name):
        return function(inputs)


def _name(what: str, whose: str, phase: str) -> str:
    return " ".join(filter(None, (f"FSDP::{what}", whose, f"({phase})")))


class _RangedFrame:
    """A run's frame, what it does in ranges."""

    def __init__(self, frame: Any, open_range: OpenRange, phase: str) -> None:
        self._frame, self._open_range, self._phase = frame, open_range, phase
        self._under_way: dict[int, tuple[str, str]] = {}  # by the id of the buffer
        self.free, self.keep = frame.free, frame.keep  # nothing that takes time

    def gather_start(self, plan: Any, shards: list[Tensor]) -> Tensor:
        return self._start("gather", plan.bucket, self._frame.gather_start, plan, shards)

    def reduce_start(self, plan: Any, grads: Any) -> Tensor:
        return self._start(plan.kind, plan.bucket, self._frame.reduce_start, plan, grads)

    def copy_start(self, plan: Any, tensors: list[Tensor]) -> Tensor:
        return self._start(plan.kind, plan.bucket, self._frame.copy_start, plan, tensors)

    def offload(self, value: Tensor) -> Tensor:
        return self._start("offload activation", "", self._frame.offload, value)

    def reload(self, host: Tensor, device: torch.device) -> Tensor:
        return self._start("reload activation", "", self._frame.reload, host, device)

    def _start(self, what: str, whose: str, start: Callable[..., Tensor], *args: Any) -> Tensor:
        with self._open_range(_name(what, whose, self._phase)):
            buffer = start(*args)
        self._under_way[id(buffer)] = what, whose
        return buffer

    def wait(self, buffer: Tensor) -> Tensor:
        what, whose = self._under_way.pop(id(buffer))
        with self._open_range(_name(f"wait {what}", whose, self._phase)):
            waited: Tensor = self._frame.wait(buffer)
            return waited

    def reduce_payloads(self, reduce: Callable[[list[Tensor]], Tensor], values: list[Tensor]) -> Tensor:
        with self._open_range(_name("reduce payloads", "", self._phase)):
            reduced: Tensor = self._frame.reduce_payloads(reduce, values)
            return reduced

    def hook(self, unit: str, buffer: Tensor) -> Tensor:
        with self._open_range(_name("hook", unit or "root", self._phase)):
            hooked: Tensor = self._frame.hook(unit, buffer)
            return hooked
