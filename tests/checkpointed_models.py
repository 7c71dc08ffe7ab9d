"""Small models traced with ``activation_checkpointing``, and what their graphs save and compute again."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT
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
    inputs = torch.ones(32, 16, requires_grad=True) if inputs is None else inputs
    options = {"backend": "eager", "reshard_after_forward": True, **options}
    return trace(model, (inputs,), world_size=2, activation_checkpointing=value, **options)


@functools.cache
def gpt(value: Any) -> Traced:
    return traced(value, lambda: GPT(depth=3, dropout=0.1), torch.zeros(32, 8, dtype=torch.int64))


def saved(found: Traced) -> list[str]:
    """What forward computes for backward, without inputs."""
    values = found.forward.output.args[0][found.context.forward_outputs :]  # type: ignore[index]
    return [str(v) for v in values if v.op == "call_function"]  # type: ignore[union-attr]


def calls(found: Traced, *words: str) -> str:
    """Backward's calls of operators with these words in their names, in order."""
    lines = (line.strip() for line in found.report.backward.stages["free"].body.splitlines())
    return "\n".join(line.split("(")[0] for line in lines if any(word in line.split("(")[0] for word in words))


COMPUTE = ("aten.mm.", "aten.gelu", "aten.add", "all_gather", "reduce_scatter", "dialect.free", "graph_fsdp.free")
