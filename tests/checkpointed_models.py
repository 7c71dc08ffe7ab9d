"""Small models traced with ``activation_checkpointing``, and what their graphs save and compute again."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT
from printed import label, sequence
from torch import Tensor, nn

from graph_fsdp.planning import Traced, trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(16, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(F.gelu(x)).square()


def traced(value: Any, model: Any = Net, inputs: Any = None, **options: Any) -> Traced:
    """What is asked for again with the same arguments is traced once."""
    if inputs is None and not options and value in (None, "unit", "selective"):
        return _known(value, model)
    return _traced(value, model, inputs, **options)


@functools.cache
def _known(value: str | None, model: Any) -> Traced:
    return _traced(value, model)


def _traced(value: Any, model: Any, inputs: Any = None, **options: Any) -> Traced:
    inputs = torch.ones(32, 16, requires_grad=True) if inputs is None else inputs
    options = {"backend": "eager", "reshard_after_forward": True, **options}
    return trace(model, (inputs,), world_size=2, activation_checkpointing=value, **options)


@functools.cache
def gpt(value: Any) -> Traced:
    return traced(value, lambda: GPT(depth=2, dropout=0.1), torch.zeros(32, 8, dtype=torch.int64))


def saved(found: Traced) -> list[str]:
    """What forward computes for backward, without inputs."""
    values = found.forward.output.args[0][found.context.forward_outputs :]  # type: ignore[index]
    return [label(v) for v in values if v.op == "call_function"]  # type: ignore[arg-type, union-attr]


def backward_order(found: Traced) -> str:
    """Backward's communication, and between it the operators that the model consists of, in order."""
    return sequence(found.report.backward, "mm", "gelu", "gelu_backward", "add")
