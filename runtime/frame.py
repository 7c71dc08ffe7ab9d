"""One run of a program: its buffers, and its collectives and copies under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.runtime.comm import collectives, custom_collectives, host_copies
from graph_fsdp.runtime.comm.collectives import Pending, StartPlan
from graph_fsdp.runtime.comm.copies import Copies, CopyPlan
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
        self.copies = Copies()

    def gather_start(self, plan: GatherPlan, shards: list[Tensor]) -> Pending:
        self.counter.count("all_gather")
        taken: list[Tensor] = []

        def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            # The first allocation is the bucket's buffer, the second the landing buffer.
            if taken:
                taken.append(self.slots.take_landing(numel, dtype, device, plan.landing_slot))
            elif plan.escapes:
                taken.append(self.slots.take_escaping(plan.bucket, numel, dtype, device))
            else:
                taken.append(self.slots.take(numel, dtype, device, plan.slot))
            return taken[-1]

        comm = plan.comms.all_gather if plan.comms is not None else None
        if comm is not None:
            arguments = (shards, plan.layout, plan.dtype, plan.group, allocate)
            pending = custom_collectives.start_all_gather(*arguments, comm)
        else:
            pending = collectives.start_all_gather(
                shards, plan.layout, plan.dtype, plan.group, allocate, self.slots.give_landing
            )
        self.slots.hold(pending.buffer, plan.escapes)
        self.pending[pending] = None
        return pending

    def reduce_start(self, plan: ReducePlan, grads: list[Tensor] | Tensor) -> Pending:
        self.counter.count(plan.kind)
        if self.kept:
            grads = self.kept.added_to(grads, plan.params, plan.begins)
        pending = plan.start(grads)
        self.pending[pending] = None
        return pending

    def reduce_payloads(self, reduce: Callable[[list[Tensor]], Tensor], values: list[Tensor]) -> Tensor:
        self.counter.count("payload_reduce")
        return reduce(values)

    def offload(self, value: Tensor) -> Pending:
        return self._copying(host_copies.start_offload(value))

    def reload(self, host: Tensor, device: torch.device) -> Pending:
        return self._copying(host_copies.start_reload(host, device))

    def copy_start(self, plan: CopyPlan, tensors: list[Tensor]) -> Pending:
        self.counter.count(plan.kind)
        return self._copying(self.copies.start(plan, tensors))

    def _copying(self, pending: Pending) -> Pending:
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

    def close(self) -> None:
        """End of the run. What is still under way may write into the run's buffers: it ends before those go."""
        try:
            while self.pending:
                self.pending.popitem()[0].finish()
            self.copies.close()
        finally:
            self.slots.close()

    def abandon(self, error: BaseException) -> None:
        """End of a run that raised ``error``, which nothing that fails here hides. Collectives in which other ranks do
        not take part are not waited for (those of a rank that the user interrupts may be such): the process group holds
        their memory until they end."""
        try:
            while self.pending and isinstance(error, Exception) and not isinstance(error, OUT_OF_STEP):
                try:
                    self.pending.popitem()[0].finish()
                except OUT_OF_STEP:
                    break
            self.pending.clear()
            self.copies.close()
        finally:
            self.slots.close()
