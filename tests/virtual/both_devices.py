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
    """A model in training on a device; each step has batches of its own. ``seen``: what else it has computed."""

    def __init__(self, shard: Shard, make: Callable[[], nn.Module], make_batch: Callable[..., Tensor], device: str):
        torch.manual_seed(0)
        self.model, self.make_batch, self.device = shard(make().to(device)), make_batch, device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)
        self.generator = torch.Generator().manual_seed(0)
        self.seen: list[Tensor] = []

    def batch(self) -> Tensor:
        return self.make_batch(self.generator).to(self.device)

    def loss(self) -> Tensor:
        return self.model(self.batch()).float().square().mean()

    def step(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> list[Tensor]:
        """The parameters' shards, and those of the optimizer's state, as they are."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [local(value) for value in (*self.model.parameters(), *states) if isinstance(value, Tensor)]

    def values(self, steps: int) -> list[Tensor]:
        """The losses of steps, and the parameters' shards after them."""
        losses = [self.step() for _ in range(steps)]
        if self.device != "cpu":
            torch.accelerator.synchronize()  # a program may have used streams of its own
        shards = [local(p) for p in self.model.parameters()]
        return [value.detach().cpu().clone() for value in (*losses, *self.seen, *shards)]


def local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


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
