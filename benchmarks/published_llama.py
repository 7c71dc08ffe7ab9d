"""A Llama-3.1-8B of the operators that torchtitan's was at the end of 2024: rotary embeddings as complex numbers, keys
and values repeated to as many heads as the queries have, norms and loss in float32; and what its "selective op"
checkpointing saves for backward, as a pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph_fsdp.compat import CheckpointPolicy
from graph_fsdp.passes import Graph, PassContext
from graph_fsdp.passes.transforms.activation_checkpointing import CheckpointActivations
from graph_fsdp.passes.transforms.recompute import tag

aten = torch.ops.aten
# What torchtitan's policy names.
NAMED = (aten.mm, aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu)


@dataclass(frozen=True)
class Sizes:
    """The published configuration of Llama-3.1-8B."""

    layers: int = 32
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128256
    length: int = 8192


# As published.
MODELS = {
    "Llama-3-8B": Sizes(),
    "Llama-3-70B": Sizes(layers=80, width=8192, inner=28672, heads=64),
    "Llama-2-13B": Sizes(40, 5120, 13824, heads=40, key_heads=40, vocabulary=32000, length=4096),
    "Llama-2-70B": Sizes(80, 8192, 28672, heads=64, vocabulary=32000, length=4096),
}


class EveryOtherProduct(CheckpointActivations):
    """Saves of a block the results of attention and of its first, third, fifth and seventh matrix multiplication."""

    def __init__(self) -> None:
        super().__init__(NAMED)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        said = super().run(graph, context)
        seen: Counter[int] = Counter()
        for node in graph.fx_graph.nodes:
            saved = node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE and "ac_graph_id" in node.meta
            if node.target is aten.mm.default and saved:
                seen[node.meta["ac_graph_id"]] += 1
                if seen[node.meta["ac_graph_id"]] % 2 == 0:
                    tag(node, CheckpointPolicy.MUST_RECOMPUTE)
        return said


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * angles[None, :, None, :]).flatten(3).type_as(x)


def _repeated(x: Tensor, times: int) -> Tensor:
    batch, length, heads, width = x.shape
    return x[:, :, :, None, :].expand(batch, length, heads, times, width).reshape(batch, length, heads * times, width)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.head = sizes.width, sizes.width // sizes.heads
        self.repeats = sizes.heads // sizes.key_heads
        self.attention_norm, self.mlp_norm = Norm(width), Norm(width)
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, sizes.key_heads * self.head, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, sizes.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.inner, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), angles)
        y = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))

    def attend(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (w(x).view(*x.shape[:2], -1, self.head) for w in (self.wq, self.wk, self.wv))
        q, k = _rotated(q, angles), _rotated(k, angles)
        k, v = _repeated(k, self.repeats), _repeated(v, self.repeats)
        result = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return self.wo(result.transpose(1, 2).contiguous().view(x.shape))


class Head(nn.Module):
    """The last norm and the output."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = Norm(sizes.width)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(x))
        return logits


class Loss(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class PublishedLlama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.head, self.loss = Head(sizes), Loss()
        half = sizes.width // sizes.heads // 2
        self.register_buffer("angles", torch.zeros(sizes.length, half, dtype=torch.complex64), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.angles[: tokens.shape[1]])
        loss: Tensor = self.loss(self.head(x), labels)
        return loss


def llama_3_8b() -> tuple[PublishedLlama, tuple[Tensor, Tensor]]:
    """The model and one sequence, for ``graph-fsdp plan benchmarks/published_llama.py:llama_3_8b``."""
    sizes = MODELS["Llama-3-8B"]
    tokens = torch.zeros(1, sizes.length, dtype=torch.long)
    return PublishedLlama(sizes), (tokens, tokens)
