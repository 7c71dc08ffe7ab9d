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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from graph_fsdp import compat


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


@dataclass(frozen=True)
class ProcessGroupCollective:
    """A process group's own ``collective``, with buffers from its allocator, where it has one (NCCL's registers them
    for copies without staging); what ``set_allocate_memory_from_process_group_for_comm`` installs."""

    group: dist.ProcessGroup
    collective: Callable[..., Any]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return compat.allocate_from_group(self.group, size, dtype, device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
        return self.collective(output_tensor, input_tensor, group=group, **options)
