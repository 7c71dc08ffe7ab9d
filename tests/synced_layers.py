"""``nn.SyncBatchNorm`` that trains on the CPU, too, as torch's does on accelerators alone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import batchnorm


class SyncBatchNorm(nn.SyncBatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training or x.device.type != "cpu" or dist.get_world_size() == 1:
            return super().forward(x)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        group: Any = dist.group.WORLD
        kept = self.running_mean, self.running_var
        given = (*kept, self.eps, self.momentum, group, dist.get_world_size())
        found: Tensor = batchnorm.sync_batch_norm.apply(x, self.weight, self.bias, *given)
        return found


def synced(model: nn.Module) -> nn.Module:
    """The model with these layers in the place of those of BatchNorm, as ``convert_sync_batchnorm`` has torch's."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for layer in model.modules():
        if type(layer) is nn.SyncBatchNorm:
            layer.__class__ = SyncBatchNorm
    return model
