"""Make the programs of a model ahead of its first start, on a machine that has neither its ranks nor its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from graph_fsdp.passes.ir.settings import check_path
from graph_fsdp.planning.dimensions import Dimensions, Parallelize
from graph_fsdp.planning.tracing import trace
from graph_fsdp.programs.folder import Folder


def precompile(
    model_fn: Callable[[], nn.Module],
    inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    mesh_shape: Mapping[str, int] | Sequence[int] | Dimensions,
    path: str | PathLike[str],
    parallelize: Parallelize | None = None,
    device: str | torch.device | None = None,
    kernels: bool = True,
    **compile_options: Any,
) -> None:
    """Keep the programs of a model for ranks that are not there: a start with ``compile(..., programs=path)`` finds
    them, and neither differentiates nor partitions the model nor runs passes on it, nor builds kernels.

    Allocates no parameter, shard or activation. Under ``torch.no_grad()`` it keeps those of evaluation. Each shape of
    inputs has programs of its own. Kernels go into Inductor's cache (``TORCHINDUCTOR_CACHE_DIR``), which the start has
    to share; those for a CPU are built for as many threads as this process has (``OMP_NUM_THREADS``), and a rank that
    has another number builds its own. The start must have the same versions of torch and of this package, the same
    kind of device and the same options, or it compiles as ever and its log says what differs.

    Args:
        model_fn: builds the model. Called under ``torch.device("meta")``, so that it allocates nothing.
        inputs: positional, or a mapping of keyword arguments; tensors count by shape and dtype, on any device.
        mesh_shape: ``(ranks that shard,)``, ``(replicas, ranks that shard)``, or names, as of
            :func:`graph_fsdp.planning.trace`.
        path: of the folder of programs; made where there is none.
        parallelize: divides the model over other dimensions, as of :func:`graph_fsdp.planning.trace`.
        device: that the programs are for. A GPU's need a GPU of its kind on this machine.
        kernels: False leaves them to the first start, as where graphs are compiled whole (``regions="whole"``).
        compile_options: of :func:`graph_fsdp.compile`, as the start passes them.

    Raises:
        TypeError, ValueError: an argument has a value that cannot be.
        UnsupportedError: the programs of this model cannot be kept; the message says what they depend on.
        All that :func:`graph_fsdp.planning.trace` raises.
    """
    if not isinstance(inputs, (tuple, list, Mapping)):
        raise TypeError(
            f"inputs must be a tuple of positional inputs or a mapping of keyword inputs, got {type(inputs).__name__}"
        )
    check_path("path", path)
    if not isinstance(kernels, bool):
        raise TypeError(f"kernels must be True, to build them, or False, got {kernels!r}")
    if "programs" in compile_options:
        raise TypeError("programs: precompile keeps them in path; leave programs out")
    Folder.named("path", path, "name another one")
    traced = trace(
        model_fn,
        inputs,
        mesh_shape=mesh_shape,
        parallelize=parallelize,
        device=device,
        programs=path,
        **compile_options,
    )
    if kernels:
        traced.build_kernels()
