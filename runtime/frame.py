"""One run of a program: its buffers, and its collectives and copies under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.runtime.comm import collectives, copies, custom_collectives
from graph_fsdp.runtime.comm.collectives import Pending, StartPlan
from graph_fsdp.runtime.comm.copies import CopyPlan
from graph_fsdp.runtime.comm.custom_collectives import Comms
from graph_fsdp.runtime.kept_gradients import KeepPlan, KeptGradients
from graph_fsdp.runtime.ranks.failure import OUT_OF_STEP
from graph_fsdp.runtime.slots import GatheredBytes, SlotPlan, Slots


@dataclass(frozen=True)
class GatherPlan(StartPlan):
    """The static part of one ``all_gather_start``."""

    layout: GatherLayout
    dtype: torch.dtype
    group: dist.ProcessGroup
    escapes: bool
    slot: int | None
    landing_slot: int | None
    comms: Comms | None = None  # where the user's own runs it


@dataclass(frozen=True)
class ReducePlan(StartPlan):
    """The static part of one reduction. ``start`` takes the gradients, or the shard that is reduced again."""

    start: Callable[[Any], Pending]
    params: tuple[str, ...] = ()
    begins: tuple[int, ...] = ()  # in a shard that is reduced again: where each parameter's gradient begins


class Frame:
    """One run of a program. A start returns a handle, and the wait for it the buffer."""

    def __init__(self, counter: GatheredBytes, plan: SlotPlan, kept: KeptGradients) -> None:
        self.counter, self.kept = counter, kept
        self.slots = Slots(counter, plan)
        self.pending: dict[Pending, None] = {}  # in the order of their starts
        self._last_fetch: torch.Event | None = None  # see [Note: writes after a run]

    def gather_start(self, plan: GatherPlan, shards: list[Tensor]) -> Pending:
        self.counter.count("all_gather")
        layout, dtype, device = plan.layout, plan.dtype, shards[0].device
        numel = layout.world_size * layout.length
        if plan.escapes:
            buffer = self.slots.take_escaping(plan.bucket, numel, dtype, device)
        else:
            buffer = self.slots.take(numel, dtype, device, plan.slot)
        comm = plan.comms.all_gather if plan.comms is not None else None
        if comm is not None:
            pending = custom_collectives.start_all_gather(shards, layout, dtype, plan.group, comm, buffer)
        else:
            landing = None
            if layout.landing_numel:
                landing = self.slots.take_landing(layout.landing_numel, dtype, device, plan.landing_slot)
            buffers = (buffer, landing, self.slots.give_landing)
            pending = collectives.start_all_gather(shards, layout, dtype, plan.group, *buffers)
        self.slots.hold(pending.buffer, plan.escapes)
        return self._under_way(pending)

    def reduce_start(self, plan: ReducePlan, grads: list[Tensor] | Tensor) -> Pending:
        self.counter.count(plan.kind)
        if self.kept:
            grads = self.kept.added_to(grads, plan.params, plan.begins)
        return self._under_way(plan.start(grads))

    def reduce_payloads(self, reduce: Callable[[list[Tensor]], Tensor], values: list[Tensor]) -> Tensor:
        self.counter.count("payload_reduce")
        return reduce(values)

    def offload(self, value: Tensor) -> Pending:
        return self._under_way(copies.offload_activation(value))

    def reload(self, host: Tensor, device: torch.device) -> Pending:
        return self._under_way(copies.reload_activation(host, device))

    def copy_start(self, plan: CopyPlan, tensors: list[Tensor]) -> Pending:
        self.counter.count(plan.kind)
        copy = plan.start(tensors)
        if plan.ends_with_run:
            self._last_fetch = copy.event
        return self._under_way(copy)

    def _under_way(self, pending: Pending) -> Pending:
        self.pending[pending] = None
        return pending

    def wait(self, pending: Pending) -> Tensor:
        del self.pending[pending]
        pending.finish()
        return pending.buffer

    def keep(self, plan: KeepPlan, grad: Tensor) -> None:
        """Autograd gets no gradient."""
        self.kept.add(plan, grad)

    def hook(self, unit: str, buffer: Tensor) -> Tensor:
        self.kept.hooks[unit](buffer)
        return buffer

    def free(self, buffer: Tensor) -> None:
        self.slots.free(buffer)

    def close(self, error: BaseException | None = None) -> None:
        """End of a run, which may have raised ``error``; nothing that fails here hides that. What is still under way
        may write into the run's buffers: it ends before those go. Collectives in which other ranks do not take part are
        not waited for (those of a rank that the user interrupts may be such): the process group holds their memory
        until they end."""
        ends = error is None or (isinstance(error, Exception) and not isinstance(error, OUT_OF_STEP))
        try:
            with contextlib.suppress(*(OUT_OF_STEP if error is not None else ())):
                while self.pending and ends:
                    self.pending.popitem()[0].finish()
            self.pending.clear()
            if self._last_fetch is not None:
                self._last_fetch.synchronize()
        finally:
            self.slots.close()
