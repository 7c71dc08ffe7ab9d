"""``nn.SyncBatchNorm`` in a graph: one gather of statistics in forward, and one reduction of sums in backward.

torch's own selects ranks by the values of their counts, whose number no graph knows. The formulas are the same: of all
ranks' statistics those of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_functional = torch.ops._c10d_functional


class SyncBatchNorm(torch.autograd.Function):
    """Normalizes ``x``, ``[batch, channels, …]``, by the mean and variance of all ranks of ``group``, which it returns
    too, as ``[channels]`` of float32 or float64, with the number of values of a channel, ``[1]``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: int, group: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels, dims = x.shape[1], _all_but_channels(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if x.numel() > 0:
            variance, mean = torch.var_mean(wide, dims, correction=0)
        else:  # of nothing they are not defined; a count of zero leaves them out
            variance = mean = wide.new_zeros(channels)
        own = torch.cat([mean, variance, mean.new_full((1,), x.numel() // channels)])
        gathered = _functional.wait_tensor(_functional.all_gather_into_tensor(own[None], ranks, group))
        means, variances, counts = gathered.split(channels, 1)
        total = counts.sum(0)
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total
        scale = _over_channels((variance + eps).rsqrt(), x)
        y = (wide - _over_channels(mean, x)) * scale
        y = y if weight is None else y * _over_channels(weight, x)
        y = y if bias is None else y + _over_channels(bias, x)
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        ctx.group = group
        return y.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, total = ctx.saved_tensors
        dims = _all_but_channels(x)
        wide = grad.to(mean.dtype)
        centered = x.to(mean.dtype) - _over_channels(mean, x)
        normalized = centered * scale
        of_bias, of_weight = wide.sum(dims), (wide * normalized).sum(dims)
        of_x = None
        if ctx.needs_input_grad[0]:
            sums = _functional.all_reduce(torch.cat([of_bias, of_weight]), "sum", ctx.group)
            along_bias, along_weight = (_functional.wait_tensor(sums) / total).chunk(2)
            of_x = (wide - _over_channels(along_bias, x) - normalized * _over_channels(along_weight, x)) * scale
            of_x = (of_x if weight is None else of_x * _over_channels(weight, x)).to(x.dtype)
        if weight is None:
            return of_x, None, None, None, None, None
        return of_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    momentum: float,
    group: ProcessGroup,
    world_size: int,
) -> Tensor:
    """Stand for what ``nn.SyncBatchNorm`` applies."""
    if x.numel() == x.shape[1] and world_size < 2:
        raise ValueError("Expected more than 1 value per channel when training, got input size 1")
    y: Tensor
    y, mean, variance, count = SyncBatchNorm.apply(x, weight, bias, eps, world_size, group.group_name)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(mean * momentum)
        if running_var is not None:
            running_var.mul_(1 - momentum).add_(variance * (count / (count - 1)) * momentum)
    return y


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _over_channels(value: Tensor, x: Tensor) -> Tensor:
    return value.view(-1, *[1] * (x.dim() - 2))
