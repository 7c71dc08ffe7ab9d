"""Collectives that the user brings: FSDP2's ``AllGather`` and ``ReduceScatter`` protocols.

An object that has ``allocate(size, *, dtype, device)`` and is called with ``output_tensor``, ``input_tensor``,
``group``, ``async_op``, and for a reduction ``op``; it returns what to wait for, or None when the result is there (on
the current stream). It gets what FSDP2 would give it: one call per bucket; of a gather the rank's own part of the
output as input; both buffers of a reduction from its own ``allocate``. What is gathered is copied to the bucket's
buffer from there.

Gradients are views of a reduction's output: an ``allocate`` that gives out the same memory again would change the
gradients of the step before, as it would with FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.runtime.comm import collectives
from graph_fsdp.runtime.comm.collectives import Allocate, Pending


class Comm(Protocol):
    """What both protocols have in common."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any
    ) -> Any: ...


@dataclass
class Comms:
    """The objects of a model; None for the process group's own collectives."""

    all_gather: Comm | None = None
    reduce_scatter: Comm | None = None


def start_all_gather(
    shards: Sequence[Tensor],
    layout: GatherLayout,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    allocate: Allocate,
    comm: Comm,
) -> Pending:
    """As ``collectives.start_all_gather``, of a layout of one message."""
    source, length = collectives.shard_slice(shards, layout), layout.length
    world, device = layout.world_size, source.device
    buffer = allocate(world * length, dtype, device)
    output = comm.allocate((world * length,), dtype=dtype, device=device)
    own = output.narrow(0, group.rank() * length, length)
    own.copy_(source)
    work = comm(output_tensor=output, input_tensor=own, group=group, async_op=True)

    def finish() -> None:
        if work is not None:
            work.wait()
        collectives.unpack(output, buffer, layout.messages[0], world)

    return Pending(buffer, finish)


def start_reduce_scatter(
    grads: Sequence[Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    comm: Comm,
    replicas: int = 1,
    factor: float | None = None,
    summed: bool = False,
) -> Pending:
    """As ``collectives.start_reduce_scatter``, in one message."""
    world, device = group.size(), grads[0].device
    op, before, after = collectives.mean_of(dtype, world * replicas, factor, summed)
    numel = sum(dialect.chunk_numels(grads, world))
    sent = comm.allocate((world * numel,), dtype=dtype, device=device)
    compat.chunk_cat(list(grads), dim=0, num_chunks=world, out=sent.view(world, numel))
    if before is not None:
        sent.div_(before)
    out = comm.allocate((numel,), dtype=dtype, device=device)
    work = comm(output_tensor=out, input_tensor=sent, group=group, op=op, async_op=True)
    works = [] if work is None else [work]
    return Pending(out, collectives.finish_reduction(works, out, after if replicas == 1 else None, keep_alive=sent))


class ProcessGroupMemory:
    """Buffers from the process group's own allocator, where it has one (NCCL's registers them for copies without
    staging); what ``set_allocate_memory_from_process_group_for_comm`` installs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return compat.allocate_from_group(self.group, size, dtype, device)


class ProcessGroupAllGather(ProcessGroupMemory):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return compat.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class ProcessGroupReduceScatter(ProcessGroupMemory):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Any:
        return compat.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
