"""Training on the virtual device and on the CPU, by FSDP2 and by ours, as one of four ranks that are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from simulated_group import simulated_group
from simulated_link import INSTANT, Link
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from virtual.group import virtual_group
from virtual.machine import Machine

import graph_fsdp

RANKS, LINK = 4, Link(45e9, 10e-6)
Shard = Callable[[nn.Module], nn.Module]


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    return fully_shard(model, **options)


def ours(model: nn.Module, **options: Any) -> nn.Module:
    return graph_fsdp.compile(model, backend="eager", **options)


class Training:
    """A model in training on a device; each step has a batch of its own."""

    def __init__(self, shard: Shard, make: Callable[[], nn.Module], make_batch: Callable[..., Tensor], device: str):
        torch.manual_seed(0)
        self.model, self.make_batch, self.device = shard(make().to(device)), make_batch, device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)
        self.generator = torch.Generator().manual_seed(0)

    def step(self) -> Tensor:
        loss = self.model(self.make_batch(self.generator).to(self.device)).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def values(self, steps: int) -> list[Tensor]:
        """The losses of steps, and the parameters' shards after them."""
        losses = [self.step() for _ in range(steps)]
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return [value.detach().cpu() for value in (*losses, *shards)]


def on_virtual(machine: Machine, run: Callable[[str], Any]) -> Any:
    torch._dynamo.reset()
    with machine, virtual_group(RANKS, LINK):
        found = run("virtual")
        torch.accelerator.synchronize()
        return found


def on_cpu(run: Callable[[str], Any]) -> Any:
    torch._dynamo.reset()
    with simulated_group(RANKS, INSTANT):
        return run("cpu")
