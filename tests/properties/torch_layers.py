"""Modules of torch that compute as a whole: recurrences over sequences, tables with options, an encoder layer, computed
weights. As ``random_layers.py`` says of its own, but for those of ``OVER_ROWS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Sequence(nn.Module):
    """Along each row, which is a sequence of one feature, by torch's whole recurrent modules."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        cls: Any = (nn.LSTM, nn.GRU, nn.RNN)[size % 3]
        options: dict[str, Any] = {"num_layers": 1 + size // 4, "bidirectional": size % 2 == 0, "bias": size != 5}
        if size == 6:
            options["proj_size"] = 1
        self.recurrence = cls(1, 2, batch_first=True, **options)
        self.down = nn.Linear((1 if size == 6 else 2) * (1 + (size % 2 == 0)), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.recurrence(x.unsqueeze(2))[0]).squeeze(2)


class Bag(nn.Module):
    """Sums, means or maxima of rows chosen by the data, with weights that have gradients."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.mode, self.offsets = ("sum", "mean", "max")[size % 3], size > 4
        self.table = nn.EmbeddingBag(size, width, mode=self.mode, padding_idx=0 if size == 4 else None)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.stack([x.argmax(1), x.argmin(1) + 1], 1) % self.table.num_embeddings
        weights = torch.sigmoid(x[:, :1]).expand(-1, 2).to(self.table.weight.dtype) if self.mode == "sum" else None
        if self.offsets:
            offsets = torch.arange(0, chosen.numel(), 2)
            weights = None if weights is None else weights.flatten()
            return x + self.table(chosen.flatten(), offsets, per_sample_weights=weights).to(x.dtype)
        return x + self.table(chosen, per_sample_weights=weights).to(x.dtype)


class Frequent(nn.Module):
    """Rows chosen by the data, whose gradients are divided by how often they are chosen in a rank's batch."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width, padding_idx=0 if size % 2 else None, scale_grad_by_freq=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.argmax(1) % self.table.num_embeddings).to(x.dtype)


class Encoder(nn.Module):
    """A transformer's layer along each row. It takes torch's fast path in evaluation, where there is one."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        cls = nn.TransformerDecoderLayer if size % 3 == 0 else nn.TransformerEncoderLayer
        options: dict[str, Any] = {"norm_first": size % 2 == 0, "bias": size != 5, "dropout": 0.0, "batch_first": True}
        self.layer = cls(2, 1 + size % 2, size, **options)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([x, torch.sin(x)], dim=2)
        return (self.layer(y, y) if isinstance(self.layer, nn.TransformerDecoderLayer) else self.layer(y)).sum(2)


class Watching(nn.Module):
    """Attention that returns its weights, with keys and values of other widths and a bias of their own."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": size % 3 != 0, "add_bias_kv": size % 2 == 0, "add_zero_attn": size == 3}
        self.attention = nn.MultiheadAttention(2, 1, kdim=1, vdim=1, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(torch.stack([x, -x], dim=2), x.unsqueeze(2), x.unsqueeze(2), need_weights=True)
        return y.sum(2) + weights.square().sum(2)


class Iterated(nn.Module):
    """A weight that is divided by its largest singular value, which buffers follow while it trains."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        linear = nn.Linear(width, width, bias=size % 2 == 0)
        self.linear = parametrizations.spectral_norm(linear, n_power_iterations=1 + size % 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Orthogonal(nn.Module):
    """A weight that is kept orthogonal by each of torch's maps."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        name = ("matrix_exp", "cayley", "householder")[size % 3]
        linear = nn.Linear(width, width, bias=size % 2 == 0)
        self.linear = parametrizations.orthogonal(linear, orthogonal_map=name, use_trivialization=size < 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


OF_TORCH: dict[str, Callable[[int, int], nn.Module]] = {
    "sequence": Sequence,
    "bag": Bag,
    "frequent": Frequent,
    "encoder": Encoder,
    "watching": Watching,
    "iterated": Iterated,
    "orthogonal": Orthogonal,
}
OVER_ROWS = {"frequent"}
WRITE_BUFFERS = {"iterated"}
# Torch computes these in the type of their buffers, or not in bfloat16.
NOT_CAST = {"iterated", "orthogonal", "bag"}
