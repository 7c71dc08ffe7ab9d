"""A transformer that torch's tensor parallelism divides, in two ways, and its training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from reference import gradients_of, parameters_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import SGD, AdamW

import graph_fsdp

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 32, 16, 2, 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            f(x).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """An attention and a perceptron; or the latter alone."""

    def __init__(self, *, attention: bool) -> None:
        super().__init__()
        if attention:
            self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "attention"):
            x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Of one block; without attention where there is nothing to be seen in it, as tracing DTensors takes long."""

    def __init__(self, *, attention: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(attention=attention)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def with_matrices(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The blocks' matrices over ``mesh``; the rest stays plain."""
    for block in model.blocks:
        plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        if hasattr(block, "attention"):
            plan |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
            plan |= {"attention.out": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def with_sequences(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """All parameters over ``mesh``, activations between the matrices too, along the sequence."""
    whole = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)
    for block in model.blocks:
        plan = {"norm2": SequenceParallel(), "mlp": _whole_sequences(), "mlp.up": ColwiseParallel()}
        plan |= {"mlp.down": RowwiseParallel(output_layouts=Shard(1))}
        if hasattr(block, "attention"):
            plan |= {"norm1": SequenceParallel(), "attention": _whole_sequences()}
            plan |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
            plan |= {"attention.out": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(block, mesh, plan)
    return model


def _whole_sequences() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def ours(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    return graph_fsdp.compile(model, mesh, **{"backend": "eager", **options})


def batch(step: int, rank: int, ranks: int = 1) -> Tensor:
    """Tokens of data-parallel ``rank`` of so many; of all with the defaults."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (2 * ROWS, LENGTH + 1), generator=generator)
    return tokens.chunk(ranks)[rank]


def train(
    model: nn.Module, optimizer: str, steps: int, rank: int = 0, ranks: int = 1, clip: float | None = None
) -> Any:
    parameters = list(model.parameters())
    stepper = SGD(parameters, lr=0.1, momentum=0.9) if optimizer == "sgd" else AdamW(parameters, lr=1e-3)
    for step in range(steps):
        tokens = batch(step, rank, ranks)
        stepper.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        stepper.step()
    return {"gradients": gradients_of(model), "parameters": parameters_of(model)}
