"""Architectures of transformers with random values. A configuration names only what makes it small."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from third_party.case import Case, Inputs, mean_square, own_loss
from third_party.transformers_configurations import CAUSAL, MASKED, OTHERS, SEQUENCE_TO_SEQUENCE, VOCABULARY

ROWS, LENGTH, SIDE, CLASSES = 2, 16, 32, 4


def without_dropout(config: Any) -> Any:
    """``config`` with all probabilities of leaving something out 0, those of its parts too: implementations need not
    draw random numbers in the same order."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name in ("mask_time_prob", "mask_feature_prob")):
            setattr(config, name, 0.0)
    return config


def build(model: str, settings: dict[str, Any], drops: bool = False) -> nn.Module:
    cls = getattr(transformers, model)
    config = cls.config_class(**settings)
    return cls(config if drops else without_dropout(config))


def tokens() -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (ROWS, LENGTH))


def text() -> Inputs:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def long_text() -> Inputs:
    """More than an attention window."""
    return {"input_ids": (ids := torch.randint(5, VOCABULARY, (1, 32))), "labels": ids}


def image() -> Inputs:
    return {"pixel_values": torch.randn(ROWS, 3, SIDE, SIDE), "labels": torch.randint(CLASSES, (ROWS,))}


def segmented() -> Inputs:
    return {**image(), "labels": torch.randint(CLASSES, (ROWS, SIDE, SIDE))}


def detected() -> Inputs:
    return {"pixel_values": torch.randn(ROWS, 3, SIDE, SIDE)}


def prompted() -> Inputs:
    return {
        "pixel_values": torch.randn(1, 3, SIDE, SIDE),
        "input_points": torch.rand(1, 1, 2, 2) * SIDE,
        "multimask_output": False,
    }


def spectrum() -> Inputs:
    return {"input_features": torch.randn(ROWS, 8, 32), "labels": tokens()}


def sound() -> Inputs:
    return {"input_values": torch.randn(ROWS, 400), "labels": torch.randint(5, VOCABULARY, (ROWS, 3))}


def image_and_text() -> Inputs:
    return {"input_ids": tokens(), "pixel_values": torch.randn(ROWS, 3, SIDE, SIDE), "return_loss": True}


def images_in_text(places: int, image_id: int) -> Inputs:
    ids = tokens()
    ids[:, 1 : 1 + places] = image_id
    return {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, SIDE, SIDE), "labels": ids}


def patches_in_text() -> Inputs:
    """Of Qwen2-VL: two images of 4 by 4 patches each, of which text sees 2 by 2."""
    ids = tokens()
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 1, 3, 2
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == 3).long(),
        "pixel_values": torch.randn(ROWS * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
        "labels": ids,
    }


INPUTS: dict[str, Callable[[], Inputs]] = {
    "text": text,
    "long_text": long_text,
    "image": image,
    "segmented": segmented,
    "detected": detected,
    "prompted": prompted,
    "spectrum": spectrum,
    "sound": sound,
    "image_and_text": image_and_text,
    "images_in_text": functools.partial(images_in_text, 4, 3),
    "patches_in_text": patches_in_text,
}


def cases() -> list[Case]:
    of_text = {**CAUSAL, **MASKED, **SEQUENCE_TO_SEQUENCE}
    found = [(name, settings, "text", False) for name, settings in of_text.items()]
    found += [(name, settings, inputs, False) for name, (inputs, settings) in OTHERS.items()]
    found.append(
        ("M2M100ForConditionalGeneration", SEQUENCE_TO_SEQUENCE["M2M100ForConditionalGeneration"], "text", True)
    )
    return [
        Case(
            "transformers",
            f"{name}, layers dropped" if drops else name,
            functools.partial(build, name, {**settings, **({"dropout": 0.0} if drops else {})}, drops),
            INPUTS[inputs],
            mean_square if inputs in ("detected", "prompted") else own_loss,
        )
        for name, settings, inputs, drops in found
    ]
