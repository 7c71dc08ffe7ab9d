"""Architectures of timm: the smallest of a family, on images as small as it takes."""

from __future__ import annotations

import functools
from typing import Any

import timm
import torch
from torch import nn

from third_party.case import Case, Inputs, mean_square

# Side of an image, and what makes a model smaller.
ARCHITECTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet10t": (32, {}),
    "resnetv2_50": (32, {"layers": (1, 1, 1, 1)}),
    "regnetx_002": (32, {}),
    "densenet121": (32, {"block_config": (2, 2), "growth_rate": 8}),
    "ese_vovnet19b_slim_dw": (32, {}),
    "mobilenetv2_035": (32, {}),
    "mobilenetv3_small_050": (32, {}),
    "mobilenetv4_conv_small_035": (32, {}),
    "efficientnet_lite0": (32, {}),
    "tinynet_e": (32, {}),
    "lcnet_035": (32, {}),
    "ghostnet_050": (32, {}),
    "repvgg_a0": (32, {}),
    "convnext_atto": (32, {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)}),
    "convnextv2_atto": (32, {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 48}),
    "deit_tiny_distilled_patch16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 48}),
    "beit_base_patch16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "depth": 2, "embed_dim": 48}),
    "swin_tiny_patch4_window7_224": (
        32,
        {"img_size": 32, "window_size": 4, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 4)},
    ),
    "swinv2_tiny_window8_256": (
        32,
        {"img_size": 32, "window_size": 4, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 4)},
    ),
    "cait_xxs24_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 2}),
    "xcit_nano_12_p16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 48}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "resmlp_12_224": (32, {"img_size": 32}),
    "gmlp_ti16_224": (32, {"img_size": 32}),
    "poolformer_s12": (32, {}),
    "levit_128s": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "coat_lite_tiny": (32, {"img_size": 32}),
}


def build(name: str, settings: dict[str, Any]) -> nn.Module:
    """In float64: with the values that timm draws, another rounding of the input to float32 changes a gradient of
    MobileNetV2 by more than its size after one step."""
    return timm.create_model(name, num_classes=4, drop_rate=0.0, **settings).double()  # type: ignore[no-any-return]


def image(side: int) -> Inputs:
    """Eight of them. The last layers of many architectures see one pixel of each: batch normalization of two values
    gives signs, which another rounding turns around."""
    return {"x": torch.randn(8, 3, side, side, dtype=torch.float64)}


def cases() -> list[Case]:
    return [
        Case("timm", name, functools.partial(build, name, settings), functools.partial(image, side), mean_square)
        for name, (side, settings) in ARCHITECTURES.items()
    ]
