"""The random states of a rank: torch's, of the CPU and of the device, Python's, and NumPy's if it is used."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import nn


def random_state(model: nn.Module) -> dict[str, Any]:
    """Return this rank's random states as tensors, and as tuples of tensors and numbers."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": (version, torch.tensor(numbers), gauss)}
    device = device_of(model)
    if device is not None:
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.tensor(keys.tolist()), *rest)
    return state


def set_random_state(model: nn.Module, state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    device = device_of(model)
    if device is not None and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy(), *rest))


def device_of(model: nn.Module) -> torch.device | None:
    """Return the accelerator that the model is on."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    accelerator = torch.accelerator.current_accelerator()
    return device if accelerator is not None and device.type == accelerator.type else None
