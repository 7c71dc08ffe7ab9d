"""Guarded placeholders: whoever touches one outside of compiled code gets an error instead of missing memory.

A kernel that reads a placeholder would read address zero. Two kinds of code may try: with ``fullgraph=False``, what
Dynamo leaves to Python while the model's forward runs; and, at any time, code that kept a reference to a parameter
from before ``graph_fsdp.compile``. So placeholders are a Parameter subclass whose ``__torch_function__`` lets Dynamo
trace it like a plain tensor, answers questions on shape and type, and refuses everything else. With
``fullgraph=True`` they are plain Parameters while the forward runs: nothing but compiled code runs then, and Dynamo
need not trace through ``__torch_function__`` at every use.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graph_fsdp.errors import EmptyPlaceholderError
from graph_fsdp.passes import compat

# What reads no memory and returns no tensor.
_METADATA = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in (
            "shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_leaf", "is_cuda", "is_cpu", "is_xpu",
            "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "grad", "grad_fn",
            "output_nr", "_version",
        )),
        torch.Tensor.size, torch.Tensor.stride, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.element_size,
        torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_contiguous, torch.Tensor.nelement,
        torch.Tensor.storage_offset, torch.Tensor.__len__, torch.Tensor.__hash__, torch.Tensor.get_device,
        torch.is_floating_point, torch.is_complex, torch.numel,
    }
)  # fmt: skip


class GuardedPlaceholder(nn.Parameter):
    """A full-shape parameter without memory."""

    _graph_fsdp: tuple[str, Callable[[], bool]]  # its name, and whether the model's forward runs

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if compat.is_tracing() or func in _METADATA:
            with compat.without_torch_function():
                return func(*args, **(kwargs or {}))
        raise _touched(func, args, kwargs or {})


class GuardedTensorParallelPlaceholder(DTensor):
    """Likewise, of a tensor-parallel parameter."""

    _graph_fsdp: tuple[str, Callable[[], bool]]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with compat.without_torch_function():
                return func(*args, **(kwargs or {}))
        raise _touched(func, args, kwargs or {})


def guard(placeholder: nn.Parameter, name: str, forward_runs: Callable[[], bool]) -> None:
    """Make an ordinary placeholder a guarded one, in place: references to it stay valid."""
    vars(placeholder)["_graph_fsdp"] = (name, forward_runs)
    set_guarded(placeholder, True)


def set_guarded(placeholder: nn.Parameter, guarded: bool) -> None:
    """Switch a placeholder's guard on or off."""
    if isinstance(placeholder, DTensor):
        own: type[Any] = GuardedTensorParallelPlaceholder if guarded else DTensor
    else:
        own = GuardedPlaceholder if guarded else nn.Parameter
    placeholder.__class__ = own


def _touched(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> EmptyPlaceholderError:
    guarded = (GuardedPlaceholder, GuardedTensorParallelPlaceholder)
    found = [v for v in _flatten([*args, *kwargs.values()]) if isinstance(v, guarded)]
    names = [v._graph_fsdp[0] for v in found]
    owner = names[0].rpartition(".")[0] if names else ""
    module = f"module {owner!r}" if owner else "the model itself"
    torch_files = os.path.dirname(torch.__file__)
    own_files = os.path.dirname(__file__)
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith((torch_files, own_files))]
    where = f'{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: "{frames[-1].line}"' if frames else "?"
    if found and not found[0]._graph_fsdp[1]():
        return EmptyPlaceholderError(
            f"parameter {', '.join(map(repr, names))} of {module} is a reference from before graph_fsdp.compile and "
            f"has no memory any more\n  at {where}\n  Take it from the model again, and make optimizers after "
            "graph_fsdp.compile."
        )
    return EmptyPlaceholderError(
        f"parameter {', '.join(map(repr, names))} of {module} was used by "
        f"{getattr(func, '__name__', func)!r} in code that was not compiled, where the parameter is not gathered\n"
        f"  at {where}\n"
        "  A graph break made Python run this code; fullgraph=True tells where the break is. Remove the break, or move "
        "it out of the module and of any loop over modules."
    )


def _flatten(values: list[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat += _flatten(list(value)) if isinstance(value, (list, tuple)) else [value]
    return flat
