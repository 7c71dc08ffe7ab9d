"""A Llama in PyTorch's own words: the checks run where transformers is not installed, and trace it in half the time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import Workload


class LlamaWorkload(Workload):
    """A Llama of these sizes, with a key and value head for four query heads; it returns its loss."""

    def _llama(self) -> nn.Module:
        return Llama(self)


class Llama(nn.Module):
    def __init__(self, sizes: Workload) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.model.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.model.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.lm_head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.model.embed_tokens(input_ids)
        turns = turns_of(input_ids.shape[1], self.model.layers[0].head_width, x)
        for layer in self.model.layers:
            x = layer(x, *turns)
        logits = self.lm_head(self.model.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, sizes: Workload) -> None:
        super().__init__()
        self.heads, self.head_width = sizes.heads, sizes.width // sizes.heads
        self.shared = max(1, sizes.heads // 4)
        width, inner = sizes.width, 7 * sizes.width // 2  # as Llama-3-8B
        self.norm_1, self.norm_2 = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, self.shared * self.head_width, bias=False) for _ in range(2))
        self.mlp = MLP(width, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normal = self.norm_1(x)
        query, key, value = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.query(normal), self.key(normal), self.value(normal))
        )
        query, key = turned(query, cos, sin), turned(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def turns_of(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, (length, width), in the dtype of activations."""
    places = torch.arange(length, device=like.device, dtype=torch.float32)
    rates = 5e5 ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angles = torch.outer(places, rates).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
