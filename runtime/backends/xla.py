"""``backend="xla"`` compiles each graph whole, as one program of all XLA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.runtime.backends.base import Backend
from graph_fsdp.runtime.xla.host_fallbacks import OnHostFallback
from graph_fsdp.runtime.xla.random import number_random_operators

aten = torch.ops.aten


class XlaBackend(Backend):
    """Prepares graphs for XLA. They are not cut, so there are no regions: ``runtime/xla`` makes the programs."""

    name = "xla"
    compiles_whole = True
    keeps_mutations = False  # what is written leaves the part of the program that each device runs by itself

    def __init__(self, on_host_fallback: OnHostFallback = "error") -> None:
        self.on_host_fallback = on_host_fallback

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Decompose operators whose lowering in torch_xla is missing, or other than PyTorch's on CPU and CUDA
        (BatchNorm's running variance is biased there)."""
        return dict(compat.get_decompositions(_DECOMPOSED))

    def prepare(self, module: fx.GraphModule) -> fx.GraphModule:
        return number_random_operators(module)


_DECOMPOSED: list[Any] = [
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten.native_batch_norm_backward,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.batch_norm_backward,
    aten.native_dropout,
    aten.native_dropout_backward,
    aten.gelu_backward,
    aten.embedding_dense_backward,
]
