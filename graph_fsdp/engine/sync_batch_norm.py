"""``nn.SyncBatchNorm`` in a graph: one gather of statistics in forward, and one reduction of sums in backward.

torch's own selects ranks by the values of their counts, whose number no graph knows, and refuses CPUs. The formulas are
the same: of all ranks' statistics those of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances" (1979).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
        # On torch 2.11, Dynamo loses the gradient of an output whose cast changes nothing.
        return y if y.dtype is x.dtype else y.to(x.dtype), mean, variance, total

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
        wanted = zip(ctx.needs_input_grad[1:3], (of_weight, of_bias), strict=True)
        of_parameters = [value.to(weight.dtype) if needed else None for needed, value in wanted]
        return of_x, *of_parameters, None, None, None


def trace_sync_batch_norm(model: nn.Module) -> None:
    """Have the ``nn.SyncBatchNorm`` of a model run in the form that a graph has, on all devices."""
    for module in model.modules():
        if type(module).forward is nn.SyncBatchNorm.forward and "forward" not in vars(module):
            vars(module)["forward"] = MethodType(_forward, module)


def _forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
    self._check_input_dim(input)
    self._check_non_zero_input_channels(input)
    group: Any = self.process_group or dist.group.WORLD
    if not self.training or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return nn.BatchNorm2d.forward(self, input)  # that of all numbers of dimensions
    ranks, name = dist.get_world_size(group), group.group_name
    y: Tensor
    y, mean, variance, count = SyncBatchNorm.apply(input, self.weight, self.bias, self.eps, ranks, name)
    tracked, means, variances = self.num_batches_tracked, self.running_mean, self.running_var
    if tracked is not None and means is not None and variances is not None:
        with torch.no_grad():
            tracked.add_(1)
            part = 1.0 / tracked if self.momentum is None else self.momentum
            means.mul_(1 - part).add_(mean * part)
            variances.mul_(1 - part).add_(variance * (count / (count - 1)) * part)
    return y


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _over_channels(value: Tensor, x: Tensor) -> Tensor:
    return value.view(-1, *[1] * (x.dim() - 2))
