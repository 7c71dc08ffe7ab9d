"""Reformer, whose reversible layers compute their inputs again in the backward of an ``autograd.Function``."""

from __future__ import annotations

import torch
from reformer_pytorch import ReformerLM
from torch import nn

from third_party.case import Case, Inputs, mean_square

VOCABULARY, LENGTH = 64, 32


def build() -> nn.Module:
    return ReformerLM(
        num_tokens=VOCABULARY, dim=32, depth=2, max_seq_len=LENGTH, heads=2, bucket_size=8, n_hashes=2, causal=True
    )


def tokens() -> Inputs:
    return {"x": torch.randint(VOCABULARY, (2, LENGTH))}


def cases() -> list[Case]:
    return [Case("reformer_pytorch", "ReformerLM", build, tokens, mean_square)]
