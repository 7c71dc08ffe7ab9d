"""Bytes that a training step reads and writes only to bring parameters and gradients into the layout of a collective
(pack) or out of it (unpack), casts included.

FSDP2 is counted while it runs: each operator that it packs and unpacks with is seen by a dispatch mode, and its
tensors are added up. Compiled blocks run eagerly for that step: the hooks around them copy the same. What the
collective itself copies is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

import graph_fsdp
from graph_fsdp.passes.ir.layout import copies


@dataclass
class Copies:
    """Bytes per step on one rank, read and written together."""

    pack: int = 0
    unpack: int = 0


def copies_of(model: nn.Module, step: Callable[[], None]) -> dict[str, int] | None:
    """Run ``step`` once and count; None for an implementation that this module cannot see into."""
    if not isinstance(model, FSDPModule):
        step()
        return None
    counted = _ours(model, step) if "_graph_fsdp" in model.__dict__ else _fsdp2(step)
    return asdict(counted) if counted is not None else None


def _ours(model: nn.Module, step: Callable[[], None]) -> Copies | None:
    """What the graphs of a step say; None where a compiler of whole graphs decides."""
    step()
    report = graph_fsdp.inspect(model)
    views = (report.forward, report.backward)
    if any(view.whole or view.graph is None for view in views):
        return None
    packed, unpacked = zip(*(copies(view.graph) for view in views if view.graph is not None), strict=True)
    return Copies(sum(packed), sum(unpacked))


def _fsdp2(step: Callable[[], None]) -> Copies:
    # A dispatch mode and compiled code do not go together.
    with torch.compiler.set_stance("force_eager"), _FSDP2Copies() as mode:
        step()
    return mode.copies


class _FSDP2Copies(TorchDispatchMode):
    """The operators of ``torch.distributed.fsdp._fully_shard._fsdp_collectives``, and the casts beside them, which it
    makes with ``_foreach_copy_``: neither the models nor AdamW use that."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if name == "fsdp::all_gather_copy_in":  # shards → this rank's part of the gathered buffer
            self.copies.pack += _bytes(args[0]) + _bytes([result[0]])
        elif name == "aten::_foreach_copy_":  # to, from
            self.copies.pack += _bytes(args[0]) + _bytes(args[1])
        elif name == "fsdp::chunk_cat":  # gradients → the buffer to be reduced, in its dtype
            self.copies.pack += _bytes(args[0]) + _bytes([kwargs["out"]])
        elif name == "fsdp::split_with_sizes_copy":  # gathered buffer → parameters
            self.copies.unpack += _bytes([args[0]]) + _bytes(kwargs["out"])
        return result


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
