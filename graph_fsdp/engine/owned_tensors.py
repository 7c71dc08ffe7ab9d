"""Check ``cuda_graphs=True`` against the other options, and list the tensors that a model owns."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp.errors import MeshError, UnsupportedError
from graph_fsdp.options import CompileOptions
from graph_fsdp.parameters.shards import Storage
from graph_fsdp.passes import Graph, PassContext
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.runtime import GatheredBytes
from graph_fsdp.runtime.backends import BACKENDS
from graph_fsdp.runtime.cuda.capture import CAPTURES
from graph_fsdp.runtime.cuda.cuda_graphs import ModelGraphs, ProgramGraphs

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


def check_cuda_graphs(options: CompileOptions, device: torch.device) -> None:
    """Raise for options and devices that do not go with ``cuda_graphs=True``."""
    if not isinstance(options.cuda_graphs, bool):
        raise TypeError(f"cuda_graphs must be True or False, got {options.cuda_graphs!r}")
    if not BACKENDS[options.backend].captures_regions:
        able = ", ".join(repr(name) for name, b in sorted(BACKENDS.items()) if b.captures_regions)
        raise UnsupportedError(
            f"cuda_graphs=True: backend {options.backend!r} launches no kernels that could be captured; leave "
            f"cuda_graphs out, or pass backend={able}"
        )
    if device.type not in CAPTURES:
        raise MeshError(f"cuda_graphs=True needs a mesh of CUDA devices, this one is of {device.type}")
    if options.regions == "whole":
        raise UnsupportedError(
            "cuda_graphs=True captures what lies between collectives, and regions='whole' leaves nothing between them; "
            "leave one of the two out"
        )
    if options.dynamic:
        raise ValueError(
            "cuda_graphs=True needs fixed sizes, and dynamic=True makes graphs for all sizes; leave one of the two out"
        )
    if options.offloads:
        raise UnsupportedError(
            "cuda_graphs=True keeps what it reads at fixed addresses of the device, and offload_policy="
            "CPUOffloadPolicy() copies there anew in each run; leave one of the two out"
        )
    if options.checkpointing is not None and options.checkpointing.offload:
        raise UnsupportedError(
            "cuda_graphs=True writes activations where those of the last run lay, and activation_checkpointing with "
            "offload still copies them; leave one of the two out"
        )


def model_graphs(model: nn.Module, storage: Storage, counter: GatheredBytes) -> ModelGraphs:
    """Return what the CUDA graphs of a model share. Dynamo keeps it, so it keeps neither the model nor the storage."""
    model_reference, storage_reference, device = weakref.ref(model), weakref.ref(storage), storage.device

    def state() -> Iterator[Tensor]:
        now, shards = model_reference(), storage_reference()
        if now is None or shards is None:
            return
        yield from shards.buffers
        yield from now.buffers()
        for p in now.parameters():  # those that are not sharded
            if id(p) not in shards.by_placeholder and not isinstance(p, DTensor):
                yield p

    graphs = ModelGraphs(CAPTURES[device.type](device), device, counter, state)
    weakref.finalize(storage, graphs.close).atexit = False
    return graphs


def program_graphs(engine: Engine, graph: Graph, context: PassContext, index: int) -> ProgramGraphs | None:
    """Return the CUDA graphs of a graph's program; None without ``cuda_graphs=True``, and for a model that is whole.

    Raises:
        UnsupportedError: none of the regions of a forward graph can be captured: the option would do nothing.
    """
    if engine.cuda_graphs is None or context.settings.unsharded:
        return None
    user_outputs = context.forward_outputs if graph.phase == "forward" else len(operands(graph.output))
    before = engine.programs.get((index, "forward")) if graph.phase == "backward" else None
    graphs = ProgramGraphs(engine.cuda_graphs, graph, user_outputs, getattr(before, "graphs", None))
    reasons = graphs.choice.reasons
    if graph.phase == "forward" and reasons and not graphs.choice.captured:
        first, reason = next(iter(reasons.items()))
        raise UnsupportedError(
            f"cuda_graphs=True: no region of the forward graph can be captured: region_{first} {reason}; leave "
            "cuda_graphs out"
        )
    return graphs
