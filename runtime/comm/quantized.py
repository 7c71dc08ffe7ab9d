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
from torch import Tensor

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
        self._quantize(grads, *self._parts(sent))
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

    def _quantize(self, grads: Sequence[Tensor], values: Tensor, scales: Tensor) -> None:
        """Fill a message with gradients. All works in one copy of them: float32, in rank-major rows of whole blocks."""
        rows = grads[0].new_empty((self.world, self.blocks * BLOCK), dtype=self.dtype)
        rows[:, self.numel :] = 0
        pack_gradients(grads, rows[:, : self.numel])
        blocks = rows.view(self.world, self.blocks, BLOCK)
        largest = torch.linalg.vector_norm(blocks, float("inf"), dim=-1, keepdim=True)
        # A scale that is not finite makes all that is multiplied with it NaN.
        largest = torch.where(largest.isfinite(), largest, float("nan"))
        limits = torch.finfo if self.sent_as.is_floating_point else torch.iinfo
        scales.copy_((largest / float(limits(self.sent_as).max)).clamp(min=_SMALLEST))
        blocks.div_(scales)
        values.copy_(rows[:, : self.numel] if self.sent_as.is_floating_point else rows.round_()[:, : self.numel])

    def _sum(self, values: Tensor, scales: Tensor, out: Tensor) -> None:
        """Add up what the ranks have sent, in their order."""
        row = out.new_zeros(self.blocks * BLOCK)
        part, blocks = row[: self.numel], row.view(self.blocks, BLOCK)
        for rank in range(self.world):
            part.copy_(values[rank])
            blocks.mul_(scales[rank])
            if rank:
                out.add_(part)
            else:
                out.copy_(part)


def start_reduce_scatter(
    grads: Sequence[Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    mean: Mean,
    messages: Sequence[int] = (),
    sent_as: torch.dtype | None = None,
) -> Pending:
    """Start the mean over ranks of full gradients, quantized on their way if ``sent_as`` says so; the rank's padded
    chunks come out flat, at ``dialect.reduced_offsets``. Gradients that are sent as they are are only read, until the
    wait."""
    if sent_as is None:
        return ReduceScatter(grads, dtype, group, mean, messages).start(grads)
    return QuantizedReduceScatter(grads, dtype, group, mean, sent_as).start(grads)
