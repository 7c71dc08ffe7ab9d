"""Gradients are quantized to 8 bits for their way to the rank that keeps their sum, which adds them up in float32.

A sum of 8-bit numbers does not fit into 8 bits, and a ring that quantizes partial sums adds an error at every step. So
ranks exchange quantized gradients by an all-to-all, and each is rounded once (qgZ in Wang et al. 2023, "ZeRO++:
Extremely Efficient Collective Communication for Giant Model Training", here on one level).

Of the ``numel`` elements that a rank keeps, each ``BLOCK`` has a float32 scale: its largest magnitude over the
largest number of the type. The error of an element is at most half a step: for int8 1/254 of the largest magnitude in
its block; for float8 1/16 (e4m3) or 1/8 (e5m2) of its own, or where that is less, 2^-10/448 or 2^-17/57344 of the
largest. A block with a value that is not finite arrives as NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.layout import BLOCK, quantized_blocks, quantized_nbytes
from graph_fsdp.runtime.comm.collectives import Mean, Pending, ReduceScatter, pack_gradients
from graph_fsdp.runtime.comm.streams import UnderWay
from graph_fsdp.runtime.slots import by_device

_SMALLEST = torch.finfo(torch.float32).tiny  # the scale of a block of zeros


class QuantizedReduceScatter:
    """Holds what is the same in every quantized reduction of a bucket, for ``grads`` of these shapes; the other
    arguments are those of ``start_reduce_scatter``, and of ``ReduceScatter``. Everything goes in one message."""

    def __init__(
        self,
        grads: Sequence[Tensor],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        mean: Mean,
        sent_as: torch.dtype,
        registered: bool = False,
    ) -> None:
        self.allocate = functools.partial(compat.allocate_from_group, group) if registered else by_device
        self.dtype, self.group, self.world, self.sent_as = dtype, group, group.size(), sent_as
        op, _, after = mean
        self.divisor = float(self.world) if op == dist.ReduceOp.AVG else after
        self.numel = sum(dialect.chunk_numels(grads, self.world))
        self.blocks, self.nbytes = quantized_blocks(self.numel), quantized_nbytes(self.numel)

    def start(self, grads: Sequence[Tensor]) -> Pending:
        device = grads[0].device
        sent, received = (self.allocate(self.world * self.nbytes, torch.uint8, device) for _ in range(2))
        self._quantize(self._rank_major(grads), *self._parts(sent))
        out = self.allocate(self.numel, self.dtype, device)

        def start(async_op: bool) -> list[Any]:
            return [dist.all_to_all_single(received, sent, group=self.group, async_op=async_op)]

        under_way = UnderWay("reduce", self.group, [sent, received], start)

        def finish() -> None:
            under_way.wait()
            self._sum(*self._parts(received), out)
            if self.divisor is not None:
                out.div_(self.divisor)

        return Pending(out, finish)

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """View the values, (ranks, numel), and the scales, (ranks, blocks, 1), of a message."""
        rows = message.view(self.world, -1)
        scales = rows[:, self.nbytes - 4 * self.blocks :].view(torch.float32)
        return rows[:, : self.numel].view(self.sent_as), scales.unsqueeze(-1)

    def _rank_major(self, grads: Sequence[Tensor]) -> Tensor:
        """Return gradients as (ranks, numel): packed, unless one is that as it lies."""
        first = grads[0]
        if len(grads) == 1 and dialect.is_sent_as_it_is(first, first.dtype, self.world):
            return first.view(self.world, -1)
        common = functools.reduce(torch.promote_types, [grad.dtype for grad in grads])
        packed = first.new_empty((self.world, self.numel), dtype=common)
        pack_gradients(grads, self.world, packed)
        return packed

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """View (…, numel) as (…, blocks, BLOCK), padded with zeros."""
        padding = self.blocks * BLOCK - self.numel
        whole = nn.functional.pad(rows, (0, padding)) if padding else rows
        return whole.view(*rows.shape[:-1], self.blocks, BLOCK)

    def _quantize(self, rows: Tensor, values: Tensor, scales: Tensor) -> None:
        blocks = self._in_blocks(rows)
        largest = torch.linalg.vector_norm(blocks, float("inf"), dim=-1, keepdim=True).float()
        # A scale that is not finite makes all that is multiplied with it NaN.
        largest = torch.where(largest.isfinite(), largest, float("nan"))
        scales.copy_((largest / _largest(self.sent_as)).clamp(min=_SMALLEST))
        scaled = (blocks / scales).flatten(1)[:, : self.numel]
        values.copy_(scaled if self.sent_as.is_floating_point else scaled.round_())

    def _sum(self, values: Tensor, scales: Tensor, out: Tensor) -> None:
        """Add up what the ranks have sent, in their order."""
        for rank in range(self.world):
            blocks = self._in_blocks(values[rank].to(self.dtype))
            part = (blocks * scales[rank]).view(-1)[: self.numel]
            if rank:
                out.add_(part)
            else:
                out.copy_(part)


def _largest(dtype: torch.dtype) -> float:
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def start_reduce_scatter(
    grads: Sequence[Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    mean: Mean,
    messages: Sequence[int] = (),
    sent_as: torch.dtype | None = None,
) -> Pending:
    """Start the mean over ranks of full gradients, quantized on their way if ``sent_as`` says so. Otherwise the
    arguments, and what comes out, are those of ``collectives.start_reduce_scatter``."""
    if sent_as is None:
        return ReduceScatter(grads, dtype, group, mean, messages).start(grads)
    return QuantizedReduceScatter(grads, dtype, group, mean, sent_as).start(grads)
