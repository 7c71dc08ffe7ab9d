"""Models of diffusers with random values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import nn

from third_party.case import Case, Inputs, mean_square

_GROUPS = {"norm_num_groups": 4}


def noisy() -> Inputs:
    return {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.randint(100, (2,))}


def prompted() -> Inputs:
    return {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.randint(100, (2,)),
        "encoder_hidden_states": torch.randn(2, 6, 16),
    }


def labelled() -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.randint(100, (2,)),
        "class_labels": torch.randint(4, (2,)),
    }


def packed() -> Inputs:
    return {
        "hidden_states": torch.randn(2, 16, 8),
        "encoder_hidden_states": torch.randn(2, 6, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.rand(2),
        "img_ids": torch.randint(4, (16, 3)).float(),
        "txt_ids": torch.zeros(6, 3),
    }


def image() -> Inputs:
    return {"sample": torch.randn(2, 3, 16, 16)}


MODELS: dict[str, tuple[dict[str, Any], Callable[[], Inputs]]] = {
    "UNet2DModel": (
        {
            "sample_size": 16,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
            **_GROUPS,
        },
        noisy,
    ),
    "UNet2DConditionModel": (
        {
            "sample_size": 16,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 2,
            **_GROUPS,
        },
        prompted,
    ),
    "DiTTransformer2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 4,
            "norm_num_groups": 4,
        },
        labelled,
    ),
    "FluxTransformer2DModel": (
        {
            "in_channels": 8,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        packed,
    ),
    "AutoencoderKL": (
        {
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "latent_channels": 4,
            "sample_size": 16,
            **_GROUPS,
        },
        image,
    ),
}


def build(name: str, settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**settings)
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # of labels
            module.dropout_prob = 0.0
    with torch.no_grad():
        for parameter in model.parameters():  # some begin as zeros, and nothing before them would have a gradient
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def cases() -> list[Case]:
    return [
        Case("diffusers", name, functools.partial(build, name, settings), inputs, mean_square)
        for name, (settings, inputs) in MODELS.items()
    ]
