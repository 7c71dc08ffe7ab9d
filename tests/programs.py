"""Starts of a model that may find a program of an earlier one, and models whose programs are not kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from marks import FAKE_GROUPS_REDUCE
from models import MLP, WIDTH
from torch import Tensor, nn

import graph_fsdp

ROWS = 4
DEPTH = 2


class Started:
    """What a model did in its first step, and what its report has of it."""

    def __init__(self, model: nn.Module, batch: Tensor, *, backward: bool = True) -> None:
        self.model = model
        self.outputs = model(batch)
        if backward:
            self.outputs.sum().backward()
        gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        self.gradients = gradients if FAKE_GROUPS_REDUCE else [torch.zeros_like(g) for g in gradients]
        self.report = graph_fsdp.inspect(model)

    @property
    def found(self) -> bool:
        return self.report.graphs[-1].remake is not None


def start(
    folder: Path | None, make: Callable[[], nn.Module] = lambda: MLP(DEPTH), batch: Tensor | None = None, **options: Any
) -> Started:
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"backend": "eager", "programs": folder or False} | options
    return Started(graph_fsdp.compile(make(), **options), torch.ones(ROWS, WIDTH) if batch is None else batch)


# Models whose programs are not kept


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@torch.library.custom_op("graph_fsdp_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 2)


class Custom(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(doubled(x))
