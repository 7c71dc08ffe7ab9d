"""Decoders of x-transformers, each with something that others do not have, and one with an encoder."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper, XTransformer

from third_party.case import Case, Inputs

VOCABULARY, LENGTH = 64, 32

DECODERS: dict[str, dict[str, Any]] = {
    "rotary positions": {"rotary_pos_emb": True, "attn_flash": True},
    "ALiBi": {"alibi_pos_bias": True},
    "relative positions": {"rel_pos_bias": True},
    "data-dependent ALiBi": {"attn_data_dependent_alibi": True},
    "talking heads": {"attn_pre_talking_heads": True},
    "sparse attention": {"attn_sparse_topk": 4},
    "memory of keys and values": {"attn_num_mem_kv": 4},
    "gated residuals": {"gate_residual": True},
    "hyper-connections": {"num_residual_streams": 2},
    "skips of a U-Net": {"unet_skips": True},
}


def build(settings: dict[str, Any]) -> nn.Module:
    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **settings)
    return AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers))


def both() -> nn.Module:
    sizes = {"num_tokens": VOCABULARY, "depth": 1, "heads": 2, "max_seq_len": LENGTH}
    return XTransformer(dim=32, **{f"{part}_{name}": value for part in ("enc", "dec") for name, value in sizes.items()})


def tokens(*names: str) -> Inputs:
    return {name: torch.randint(VOCABULARY, (2, 17)) for name in names}


def itself(loss: Tensor) -> Tensor:
    return loss


def cases() -> list[Case]:
    decoders = [
        Case("x_transformers", name, functools.partial(build, settings), functools.partial(tokens, "x"), itself)
        for name, settings in DECODERS.items()
    ]
    return [*decoders, Case("x_transformers", "XTransformer", both, functools.partial(tokens, "src", "tgt"), itself)]
