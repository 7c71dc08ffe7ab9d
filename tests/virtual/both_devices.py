"""Training on the virtual device and on the CPU, by FSDP2 and by ours, as one of four ranks that are alike."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import MLP
from reference import fsdp2
from simulated_group import simulated_group
from simulated_link import INSTANT, Link
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from virtual.group import VirtualGroup, virtual_group
from virtual.machine import Machine

import graph_fsdp

RANKS, LINK = 4, Link(45e9, 10e-6)
Shard = Callable[[nn.Module], nn.Module]
KINDS = ("all_gather", "reduce_scatter")
mlp = functools.partial(MLP, depth=4)


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


def rows(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 16, generator=generator)


@functools.cache
def numbers_of_fsdp2(make: Any = mlp, batch: Any = rows, steps: int = 3) -> list[Tensor]:
    """On the CPU, which are ours bit for bit, and for which nothing is compiled."""
    found: list[Tensor] = on_cpu(lambda device: Training(fsdp2, make, batch, device).values(steps))
    return found


def same_numbers(shard: Any, make: Any = mlp, batch: Any = rows, steps: int = 3, *, alike: bool = False) -> Machine:
    """Trains on the virtual device, which raises where it finds a race, and on the CPU: the same way, or, where that is
    ``alike``, by FSDP2."""
    machine = Machine("h100", traced=True)

    def run(device: str) -> list[Tensor]:
        return Training(shard, make, batch, device).values(steps)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = on_virtual(machine, run)
        expected = numbers_of_fsdp2(make, batch, steps) if alike else on_cpu(run)
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(found, expected, strict=True))
    return machine


def overlapped(machine: Machine) -> float:
    """Seconds in which kernels of the default stream run beside collectives."""
    links = [op for op in machine.operations or () if op.operator in KINDS]
    kernels = [op for op in machine.operations or () if op.stream == 0 and op.operator not in KINDS]
    return sum(max(0.0, min(a.end, b.end) - max(a.begin, b.begin)) for a in links for b in kernels)


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Process groups keep nothing alive."""
    VirtualGroup.keeps_tensors = False
    try:
        yield
    finally:
        VirtualGroup.keeps_tensors = True
