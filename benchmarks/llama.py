"""Llamas of transformers, in sizes from Llama-3-8B's to one that a test has time for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# As LlamaConfig names them. LAYERS and LENGTHS: of the model, and tokens of a sequence, unless told.
SIZES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "small": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}
LAYERS = {"8b": 32, "small": 4, "tiny": 2}
LENGTHS = {"8b": 8192, "small": 256, "tiny": 32}


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """For transformers. Its own "sdpa" makes a mask of length x length where it is traced, as a whole model is (torch
    before 2.14), and none where only blocks are: another kernel, and no comparison."""
    scale, grouped = options.get("scaling"), query.shape[1] != key.shape[1]
    result = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return result.transpose(1, 2).contiguous(), None


def llama(size: str, layers: int, length: int, device: torch.device) -> nn.Module:
    """In float32, made on the device; equal values at each call."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("causal", causal_attention)
    config = LlamaConfig(
        **SIZES[size],
        num_hidden_layers=layers,
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation="causal",
    )
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM(config)
