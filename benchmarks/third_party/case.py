"""A model of a library, its inputs and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


def own_loss(output: Any) -> Tensor:
    """The loss that a model computes from ``labels``."""
    return output.loss


def mean_square(output: Any) -> Tensor:
    """Of all floating-point tensors that a model returns."""
    found = [value for value in _tensors(output) if value.is_floating_point() and value.requires_grad]
    return torch.stack([value.double().square().mean() for value in found]).sum()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


@dataclass(frozen=True)
class Case:
    """``inputs`` draws the keyword arguments of a call from torch's generator, another batch each time."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], Tensor] = own_loss
