"""A torch without XPU, in which tensors can be on one: for tracing, in a process of its own.

``build()`` makes a library of ``fake_xpu.cpp``; ``load(path)`` makes the device known to this process, and
answers what ``torch.xpu`` would be asked of a Data Center GPU Max 1550. Autograd asks a device for its streams even
when it traces, so that fake tensors alone do not do.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import torch
from virtual import library

SOURCE = Path(__file__).with_suffix(".cpp")
NAME, MEMORY = "Intel(R) Data Center GPU Max 1550", 64 * 1024**3


def build() -> Path:
    return library.build(SOURCE)


def load(path: str) -> None:
    """Before anything is computed, which would find the devices that there are."""
    ctypes.CDLL(path)
    answers = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: SimpleNamespace(name=NAME, total_memory=MEMORY),
        "get_rng_state": lambda device=None: torch.zeros(8, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    for name, answer in answers.items():
        setattr(torch.xpu, name, answer)
