"""Private APIs of torch_xla that show what XLA compiled.

| name | torch_xla | fallback |
|---|---|---|
| ``_XLAC._get_xla_tensors_hlo`` | 2.0 on | none: an error |
| ``XLA_DUMP_POST_OPTIMIZATIONS`` | 2.0 on | the text is not optimized: an error |
| ``_XLAC._get_xla_op_sharding``, ``_XLAC._xla_annotate_custom_sharding`` | 2.1, 2.3 on | none |
| ``_XLAC._xla_sync_multi`` | 1.13 on | none |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_DUMP = "XLA_DUMP_POST_OPTIMIZATIONS"


def _c() -> Any:
    import torch_xla

    return torch_xla._XLAC


def fresh_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Zeros of the same shapes, dtypes, devices and shardings, with device data of their own; what is no tensor stays
    as it is."""
    import torch_xla.runtime as xr

    c, spmd = _c(), bool(xr.is_spmd())
    fresh: list[Any] = []
    for value in inputs:
        if not isinstance(value, Tensor):
            fresh.append(value)
            continue
        zeros = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        sharding = c._get_xla_op_sharding(value) if spmd else None
        if sharding is not None:
            c._xla_annotate_custom_sharding(zeros, sharding)
        fresh.append(zeros)
    tensors = [value for value in fresh if isinstance(value, Tensor)]
    if tensors:
        c._xla_sync_multi(tensors, [] if spmd else [str(tensors[0].device)], wait=True, sync_xla_data=True)
    return fresh


def optimized_text(function: Callable[..., Any], inputs: Sequence[Any]) -> str:
    """XLA's optimized program for what ``function`` returns.

    torch_xla reads the variable that asks for it once in a process, when any HLO text is asked for first.
    """
    os.environ[_DUMP] = "1"
    outputs = function(*inputs)
    flat = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    tensors = [value for value in flat if isinstance(value, Tensor)]
    text = str(_c()._get_xla_tensors_hlo(tensors))
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise RuntimeError(
            "torch_xla gave the HLO as it was before XLA's passes, because HLO text was asked for in this process "
            f"before; start the process with {_DUMP}=1"
        )
    return text
