"""Two ranks, and the gradients of both beside plain PyTorch's on both batches: what checks start on ranks.

    python -m torch.distributed.run --nproc-per-node 2 two_ranks.py DEVICE BACKEND

Both use the same device where there is one only.
"""

from __future__ import annotations

import copy
import faulthandler
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graph_fsdp


def main(device: str, backend: str) -> None:
    faulthandler.enable()
    dist.init_process_group(backend)
    if device != "cpu":
        torch.accelerator.set_device_index(dist.get_rank() % torch.accelerator.device_count())
    mesh = init_device_mesh(device, (2,))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 8)).to(device)
    model = graph_fsdp.compile(copy.deepcopy(plain), mesh, auto_wrap_policy={nn.Linear}, backend="eager")
    batch = torch.arange(2 * 4 * 24, dtype=torch.float32, device=device).view(2, 4, 24) / 100
    for _ in range(2):
        model(batch[dist.get_rank()]).square().mean().backward()
        plain(batch.flatten(0, 1)).square().mean().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(found.grad, DTensor) and expected.grad is not None
        # Not the whole: gloo's gather of DTensors crashes on CUDA (pytorch/pytorch#152645).
        torch.testing.assert_close(found.grad.to_local(), expected.grad.chunk(2)[dist.get_rank()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
