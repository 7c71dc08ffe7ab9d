"""Private APIs of torch_xla that show what XLA compiled.

| name | torch_xla | fallback |
|---|---|---|
| ``_XLAC._get_xla_tensors_hlo`` | 2.0 on | none: an error |
| ``XLA_DUMP_POST_OPTIMIZATIONS`` | 2.0 on | the text is not optimized: an error |
| ``_XLAC._get_xla_op_sharding`` | 2.1 on | none |
| ``_XLAC._xla_sync_multi`` | 1.13 on | none |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.compat.xla import xlac

_DUMP = "XLA_DUMP_POST_OPTIMIZATIONS"


@dataclass(frozen=True)
class Like:
    """What a program's input is, without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    sharding: Any
    spec: str


def descriptions(inputs: Sequence[Any]) -> list[Any]:
    """Of tensors; what is none stays as it is."""
    return [_described(value) if isinstance(value, Tensor) else value for value in inputs]


def _described(value: Tensor) -> Like:
    sharding = xlac()._get_xla_op_sharding(value) if compat_xla.is_spmd() else None
    return Like(value.shape, value.dtype, value.device, sharding, compat_xla.sharding_specs([value])[0])


def fresh_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Zeros like tensors, or like descriptions of them, with device data of their own; the rest stays as it is."""
    fresh: list[Any] = []
    for value in descriptions(inputs):  # of those among them that are descriptions already, themselves
        if isinstance(value, Like):
            zeros = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
            fresh.append(zeros if value.sharding is None else compat_xla.annotated(zeros, value.sharding))
        else:
            fresh.append(value)
    tensors = [value for value in fresh if isinstance(value, Tensor)]
    if tensors:
        devices = [] if compat_xla.is_spmd() else [str(tensors[0].device)]
        xlac()._xla_sync_multi(tensors, devices, wait=True, sync_xla_data=True)
    return fresh


def optimized_text(function: Callable[..., Any], inputs: Sequence[Any]) -> str:
    """XLA's optimized program for what ``function`` returns.

    torch_xla reads the variable that asks for it once in a process, when any HLO text is asked for first.
    """
    os.environ[_DUMP] = "1"
    outputs = function(*inputs)  # pending
    flat = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    tensors = [value for value in flat if isinstance(value, Tensor)]
    text = str(xlac()._get_xla_tensors_hlo(tensors))
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise RuntimeError(
            "torch_xla gave the HLO as it was before XLA's passes, because HLO text was asked for in this process "
            f"before; start the process with {_DUMP}=1"
        )
    return text
