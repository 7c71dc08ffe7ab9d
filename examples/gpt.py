"""A GPT in the manner of nanoGPT: pre-norm blocks, learned positions, the loss computed inside `forward`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class GPTConfig:
    vocab: int = 256
    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 64


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(self._init)
        # With few steps, bytes that start far apart are learnt much sooner than at the usual 0.02.
        nn.init.normal_(self.tokens.weight, std=0.2)
        # The residual stream sums 2 * layers branches: small last projections keep it from growing.
        for block in self.blocks:
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * config.layers) ** 0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte; `inputs` and `targets` are int64 of shape (batch, length)."""
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        # float32 whatever the parameters' dtype: a sum over the vocabulary loses too much in bfloat16.
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def counting(draws: torch.Generator, batch: int, length: int, vocab: int = 256) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each int64 of (batch, length): sequences that count up in steps of 1 to 4, modulo vocab."""
    start = torch.randint(vocab, (batch, 1), generator=draws)
    step = torch.randint(1, 5, (batch, 1), generator=draws)
    tokens = (start + step * torch.arange(length + 1)) % vocab
    return tokens[:, :-1], tokens[:, 1:]
