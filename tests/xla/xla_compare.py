"""A model's training through ``backend="xla"`` beside a copy's on the CPU, without any sharding: ``compare``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from models import VOCABULARY
from torch import Tensor, nn
from xla_launch import DEVICES

STEPS = 6
ROWS = 8  # of all devices
BOUND = 1e-5


def mesh(*shape: int) -> Any:
    """Of all devices of this process, by the size of each axis."""
    import numpy
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        xr.use_spmd()
    names = ("replicate", "fsdp")[-len(shape) :]
    return xs.Mesh(numpy.arange(math.prod(shape)), shape, names)


class WithLoss(nn.Module):
    """The loss is in the model: a scalar, of which the mean over devices leaves."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x).flatten(0, -2), target.flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def text(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(VOCABULARY, (ROWS, 8), generator=torch.Generator().manual_seed(step))
    return x, (5 * x + 3) % VOCABULARY


def vectors(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 16, generator=generator), torch.randint(5, (ROWS,), generator=generator)


Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def trained(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], optimizer: Optimizers = adamw, accumulate: int = 1
) -> list[float]:
    """Losses of a training on wherever the batches are."""
    import torch_xla

    step = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for index, batch in enumerate(batches):
        loss = model(*batch)
        loss.backward()
        if (index + 1) % accumulate == 0:
            step.step()
            step.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def compare(
    model: nn.Module,
    data: Callable[[int], tuple[Tensor, Tensor]] = text,
    *,
    steps: int = STEPS,
    optimizer: Optimizers = adamw,
    accumulate: int = 1,
    shape: tuple[int, ...] = (DEVICES,),
    axes: Any = None,
    bound: float = BOUND,
    **options: Any,
) -> Any:
    """Train ``model`` with its loss on all devices of ``axes``, a mesh, or one of ``shape``, and a copy of it on the
    CPU; the compiled model."""
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    reference, axes = WithLoss(copy.deepcopy(model)), mesh(*shape) if axes is None else axes
    batches = [data(step) for step in range(steps)]
    expected = trained(reference, batches, optimizer, accumulate)
    compiled = graph_fsdp.compile(WithLoss(model), axes, backend="xla", **options)
    found = trained(compiled, [shard_batch(batch, axes) for batch in batches], optimizer, accumulate)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < bound, (found, expected)
    initial = dict(reference.named_parameters())
    for name, p in compiled.named_parameters():
        distance = (p.detach().cpu() - initial[name].detach()).abs().max().item() if p.numel() else 0.0
        assert distance < bound * max(1.0, initial[name].abs().max().item()), (name, distance)
    return compiled
