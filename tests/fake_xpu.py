"""A torch without XPU, in which tensors can be on one: for tracing, in a process of its own.

``build(folder)`` makes a library of ``fake_xpu.cpp``; ``load(library)`` makes the device known to this process, and
answers what ``torch.xpu`` would be asked of a Data Center GPU Max 1550. Autograd asks a device for its streams even
when it traces, so that fake tensors alone do not do.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = shutil.which("g++") or shutil.which("clang++")
NAME, MEMORY = "Intel(R) Data Center GPU Max 1550", 64 * 1024**3


def build(folder: Path) -> Path:
    assert COMPILER is not None
    root = Path(torch.__file__).parent
    library = folder / "fake_xpu.so"
    command = [COMPILER, "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    command += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", f"-L{root / 'lib'}"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-lc10", "-ltorch_cpu"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return library


def load(library: str) -> None:
    """Before anything is computed, which would find the devices that there are."""
    ctypes.CDLL(library)
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
