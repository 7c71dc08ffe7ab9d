"""A backend turns a compute region, or a whole graph, into a function. Eager PyTorch runs it as it is, and for XLA,
which compiles each graph whole, as one program of all of its devices, it is only prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.passes.analysis.kernels import packets
from graph_fsdp.runtime.regions.regions import Compiled, Region, RegionKey, run_as_graph
from graph_fsdp.runtime.xla.host_fallbacks import OnHostFallback
from graph_fsdp.runtime.xla.random import number_random_operators

aten = torch.ops.aten


class Backend:
    """Compiles regions, and prepares the joint graph for that."""

    name: str
    compiles_whole = False  # whether there is a compile_whole
    captures_regions = False  # whether compiled regions can become CUDA graphs
    keeps_mutations = True  # whether an inference graph writes to its inputs itself

    def compile_region(self, region: Region, kind: str) -> Compiled:
        """Return a function from a list of inputs, which it may clear, to the outputs. ``kind`` is the phase."""
        raise NotImplementedError(f"backend {self.name!r} compiles graphs whole")

    def compile_regions(self, regions: Mapping[RegionKey, Region]) -> dict[RegionKey, Compiled]:
        """Compile all regions that are new to a program, of which no two are equal."""
        return {key: self.compile_region(region, key.kind) for key, region in regions.items()}

    def compile_whole(self, module: fx.GraphModule, kind: str) -> Compiled:
        """Return a function of a graph's inputs that runs all of it in its order, functional collectives included."""
        raise NotImplementedError(f"backend {self.name!r} compiles regions alone")

    def programs_folder(self) -> Path | None:
        """Return the folder in which programs are kept where the user names none; None for nowhere."""
        return None

    def decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        """Return operator → decomposition, for AOTAutograd; None keeps the operators that eager PyTorch runs."""
        return None

    def prepare(self, module: fx.GraphModule) -> fx.GraphModule:
        """Rewrite the whole graph before it is partitioned (joint graph) or bucketed (inference graph)."""
        return module


class EagerBackend(Backend):
    """Runs the FX graph as it is, operator by operator, for debugging and for bitwise comparison."""

    name = "eager"
    captures_regions = True

    def compile_region(self, region: Region, kind: str) -> Compiled:
        return run_as_graph(region.module)


class XlaBackend(Backend):
    """Prepares graphs for XLA. They are not cut, so there are no regions: ``runtime/xla`` makes the programs."""

    name = "xla"
    compiles_whole = True
    keeps_mutations = False  # what is written leaves the part of the program that each device runs by itself

    def __init__(self, on_host_fallback: OnHostFallback = "error") -> None:
        self.on_host_fallback = on_host_fallback

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Decompose operators whose lowering in torch_xla is missing, or other than PyTorch's on CPU and CUDA
        (BatchNorm's running variance is biased there, ELU's gradient is wrong, ``copy`` writes to its input,
        ``as_strided_scatter`` takes strides for an order of dimensions, and a reduction over no dimension reduces none,
        where PyTorch's is over all)."""
        reductions = {operator: _over_all_dimensions(operator) for operator in _REDUCTIONS}
        ours = {aten.copy.default: _copy, aten.as_strided_scatter.default: _as_strided_scatter}
        return {**compat.get_decompositions(list(_DECOMPOSED)), **reductions, **ours}

    def prepare(self, module: fx.GraphModule) -> fx.GraphModule:
        return number_random_operators(module)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return what ``x.copy_(source)`` leaves in ``x``."""
    return source.to(x.device, x.dtype).expand(x.shape).clone()


def _as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    if not x.is_contiguous():
        return NotImplemented
    places = torch.arange(x.numel(), device=x.device).as_strided(size, stride, storage_offset or 0)
    return x.reshape(-1).index_put((places.reshape(-1),), source.reshape(-1)).view(x.shape)


def _over_all_dimensions(operator: compat.OpOverload[..., Any]) -> Callable[..., Any]:
    def reduced(x: Tensor, dim: Sequence[int] | None = (), *args: Any, **kwargs: Any) -> Any:
        if dim is None or len(dim) or not x.dim():
            return NotImplemented  # it stays as it is
        return operator(x, list(range(x.dim())), *args, **kwargs)

    return reduced


_REDUCTIONS = (
    *(aten.amax.default, aten.amin.default, aten.sum.dim_IntList, aten.mean.dim),
    *(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction),
)
_DECOMPOSED = packets(
    aten,
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm"
    " _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training"
    " native_batch_norm_backward _batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update"
    " batch_norm_backward native_dropout native_dropout_backward gelu_backward elu_backward norm linalg_vector_norm"
    " embedding_dense_backward nansum count_nonzero",
)
