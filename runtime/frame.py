"""A frame is one run of a program: its buffers, and its collectives and copies under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from graph_fsdp.passes.ir.dialect import NodeRecord
from graph_fsdp.runtime.comm import copies
from graph_fsdp.runtime.comm.collectives import AllGather, Comms, Pending
from graph_fsdp.runtime.comm.copies import Copy
from graph_fsdp.runtime.observe import Event, Observer, What, seen_by
from graph_fsdp.runtime.ranks.failure import OUT_OF_STEP
from graph_fsdp.runtime.slots import Slots
from graph_fsdp.runtime.withheld_gradients import KeptGradients


@dataclass(frozen=True)
class StartPlan:
    """Holds the static part of a start: its index ``step`` in the program, or None, its ``kind``, such as "gather", and
    ``begin``, which is given the frame and what the start is given."""

    step: int | None
    bucket: str
    kind: str
    begin: Callable[[Frame, Any], Pending]

    @cached_property
    def counted_as(self) -> str:
        """Return as what the start is counted; "" for what the program does not plan."""
        return "" if self.step is None else "all_gather" if self.kind == "gather" else self.kind

    def event(self, what: What) -> Event:
        """Return what observers see of the start, or of the wait for it."""
        return Event(what, self.step, f"wait {self.kind}" if what == "wait" else self.kind, self.bucket)


def start_gather(
    frame: Frame, shards: list[Tensor], gather: AllGather, record: NodeRecord, comms: Comms | None
) -> Pending:
    """Start an ``all_gather_start``. With ``comms``, the user's own runs it."""
    slots, comm = frame.slots, comms.all_gather if comms is not None else None
    take = partial(slots.take_escaping, record.bucket) if record.escapes else partial(slots.take, slot=record.slot)
    take_landing = partial(slots.take_landing, slot=record.landing_slot)
    pending = gather.start(shards, take=take, take_landing=take_landing, release=slots.give_landing, comm=comm)
    slots.hold(pending.buffer, record.escapes)
    return pending


def start_reduction(
    frame: Frame, given: Any, reduce: Callable[[Any], Pending], params: tuple[str, ...], begins: tuple[int, ...] = ()
) -> Pending:
    """Start a reduction of gradients, or again of the shard in which those of ``params`` begin at ``begins``."""
    if frame.kept:
        given = frame.kept.added_to(given, params, begins)
    return reduce(given)


def start_copy(frame: Frame, given: Any, copy: Callable[[Any], Copy], ends_with_run: bool = False) -> Pending:
    """Start a copy of shards, gradients or an activation. For ``ends_with_run`` see [Note: writes after a run]."""
    pending = copy(given)
    if ends_with_run:
        frame.last_fetch = pending.event
    return pending


_OFFLOAD = StartPlan(None, "", "offload activation", partial(start_copy, copy=copies.offload_activation))


class Frame:
    """Runs a program once. A start returns a handle, and its wait the buffer. ``observers`` see what takes time."""

    def __init__(self, slots: Slots, kept: KeptGradients, observers: Sequence[Observer]) -> None:
        self.slots, self.counter, self.kept, self.observers = slots, slots.counter, kept, observers
        self.free, self.keep = slots.free, kept.add
        self.pending: dict[Pending, StartPlan] = {}  # in the order of their starts
        self.last_fetch: torch.Event | None = None  # see [Note: writes after a run]
        self.updated: dict[str, Tensor] = {}  # parameter → its gradient, for the optimizer's next step

    def run(self, function: Callable[..., Any], args: list[Any]) -> Any:
        try:
            outputs = function(self, args)
        except BaseException as error:
            self.close(error)
            raise
        self.close()
        return outputs

    def start(self, plan: StartPlan, given: Any) -> Pending:
        if counted := plan.counted_as:
            self.counter.count(counted)
        if self.observers:
            pending = seen_by(self.observers, plan.event("start"), plan.begin, self, given)
        else:
            pending = plan.begin(self, given)
        self.pending[pending] = plan
        return pending

    gather_start = reduce_start = copy_start = start  # by the names that programs have for them

    def offload(self, value: Tensor) -> Pending:
        return self.start(_OFFLOAD, value)

    def reload(self, host: Tensor, device: torch.device) -> Pending:
        begin = partial(start_copy, copy=partial(copies.reload_activation, device=device))
        return self.start(StartPlan(None, "", "reload activation", begin), host)

    def wait(self, pending: Pending) -> Tensor:
        plan = self.pending.pop(pending)
        if self.observers:
            seen_by(self.observers, plan.event("wait"), pending.finish)
        else:
            pending.finish()
        return pending.buffer

    def reduce_payloads(self, reduce: Callable[[list[Tensor]], Tensor], values: list[Tensor]) -> Tensor:
        self.counter.count("payload_reduce")
        return seen_by(self.observers, Event("call", None, "reduce payloads"), reduce, values)

    def mean_over_groups(self, bucket: str, of_all: str, buffer: Tensor) -> Tensor:
        event = Event("call", None, "mean over groups", bucket)
        seen_by(self.observers, event, self.kept.mean_over_groups, of_all, buffer)
        return buffer

    def hook(self, unit: str, buffer: Tensor) -> Tensor:
        seen_by(self.observers, Event("call", None, "hook", unit or "root"), self.kept.hooks[unit], buffer)
        return buffer

    def update(self, param: str, grad: Tensor, last: bool) -> None:
        self.updated[param] = grad
        if last:
            gradients, self.updated = self.updated, {}
            seen_by(self.observers, Event("call", None, "update"), self.kept.update, gradients)

    def close(self, error: BaseException | None = None) -> None:
        """End the run, which may have raised ``error``; nothing that fails here hides that. What is still under way may
        write into the run's buffers, so it is waited for first. After an interrupt, or an error that puts ranks out of
        step, it is not, as other ranks may not take part; what is under way then holds what it uses (``OnStream``)."""
        ends = error is None or (isinstance(error, Exception) and not isinstance(error, OUT_OF_STEP))
        try:
            with contextlib.suppress(*(OUT_OF_STEP if error is not None else ())):
                while self.pending and ends:
                    self.pending.popitem()[0].finish()
            self.pending.clear()
            if self.last_fetch is not None:
                self.last_fetch.synchronize()
        finally:
            self.slots.close()
