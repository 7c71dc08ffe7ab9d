"""What the tests of ``graph_fsdp.monitor`` share."""

from __future__ import annotations

from typing import Any

import torch
from models import MLP
from torch import nn

import graph_fsdp

BATCH = torch.ones(4, 16)


class Seen:
    """Keeps what a function of a dict and a step was given."""

    def __init__(self) -> None:
        self.values: list[tuple[int, dict[str, float]]] = []

    def __call__(self, values: dict[str, float], step: int) -> None:
        self.values.append((step, values))

    def of(self, name: str) -> list[float | None]:
        return [values.get(f"graph_fsdp/{name}") for _, values in self.values]


def compiled(model: nn.Module | None = None, **options: Any) -> Any:
    return graph_fsdp.compile(model or MLP(), **{"backend": "eager", **options})


def step(model: nn.Module, *optimizers: torch.optim.Optimizer, batch: torch.Tensor = BATCH) -> None:
    model(batch).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)
