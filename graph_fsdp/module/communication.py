"""FSDP2's methods for collectives of the user's own, on a compiled model: of all its buckets.

FSDP2 sets them per module; here one object is for the model, and a unit may only be given the same. With one set,
graphs are captured anew in which a bucket is gathered (or reduced) in one message; setting another object needs no new
graphs. All ranks have to set the same: they compare.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.runtime.comm.custom_collectives import Comm, ProcessGroupCollective


def set_custom_all_gather(self: Any, comm: Comm | None) -> None:
    """Gather buckets with ``comm``, an ``AllGather`` of FSDP2: ``allocate`` and ``__call__``. None: with the process
    group's own again. Raises TypeError on an object that is none, UnsupportedError with ``regions="whole"``."""
    _set(_of_the_model(self, "all_gather", comm), "set_custom_all_gather", "all_gather", comm)


def set_custom_reduce_scatter(self: Any, comm: Comm | None) -> None:
    """Reduce the gradients of buckets with ``comm``, a ``ReduceScatter`` of FSDP2; likewise. Gradients are views of
    what its ``allocate`` returns."""
    _set(_of_the_model(self, "reduce_scatter", comm), "set_custom_reduce_scatter", "reduce_scatter", comm)


def set_allocate_memory_from_process_group_for_comm(self: Any, enable: bool) -> None:
    """Take the buffers of both collectives from the process group's allocator, where it has one (NCCL does, gloo
    does not). Raises ValueError where a custom collective is set: it allocates itself."""
    engine = self.__dict__["_graph_fsdp"]
    for name in ("all_gather", "reduce_scatter"):
        if not isinstance(getattr(engine.comms, name), ProcessGroupCollective | None):
            raise ValueError(
                f"set_allocate_memory_from_process_group_for_comm: set_custom_{name} was called, and that object "
                f"allocates its own memory; call set_custom_{name}(None) first"
            )
    mesh = engine.storage.mesh
    if mesh is None or mesh.shard_dim is None:
        _warn("set_allocate_memory_from_process_group_for_comm")
        return
    group: dist.ProcessGroup = mesh.mesh.get_group(mesh.shard_dim)
    method = "set_allocate_memory_from_process_group_for_comm"
    collectives = {"all_gather": compat.all_gather_single, "reduce_scatter": compat.reduce_scatter_single}
    for name, collective in collectives.items():
        _set(engine, method, name, ProcessGroupCollective(group, collective) if enable else None)


def set_symm_mem_for_comm(self: Any, backend: str = "NCCL") -> None:
    """Not available: raises UnsupportedError. A rendezvous over symmetric memory is bound to one buffer, and gathers
    here share the slots that a graph's plan gives them."""
    raise UnsupportedError(
        "set_symm_mem_for_comm() registers a staging buffer for each collective, and gathers here land in slots that "
        "they share; set_allocate_memory_from_process_group_for_comm(True) takes buffers from NCCL's own allocator"
    )


def _of_the_model(module: Any, name: str, comm: Comm | None) -> Any:
    engine, unit = module.__dict__["_graph_fsdp"], module.__dict__["_graph_fsdp_unit"]
    if unit and getattr(engine.comms, name) is not comm:
        raise UnsupportedError(
            f"set_custom_{name} was called on the unit {unit!r} with another object than the model has; call it on the "
            "model, for all its buckets"
        )
    return engine


def _set(engine: Any, method: str, name: str, comm: Any) -> None:
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(
            f"{method}: comm must have allocate(size, *, dtype, device) and be callable with (output_tensor, "
            f"input_tensor, group, …), got {comm!r}; derive it from torch's AllGather or ReduceScatter"
        )
    if engine.whole:
        raise UnsupportedError(
            f"{method}: with regions='whole' the compiler runs the collectives, and knows the process group's only; "
            "compile the model without regions='whole'"
        )
    if engine.spec.world_size == 1:
        _warn(method)
    setattr(engine.comms, name, comm)
    engine.settings = dataclasses.replace(engine.settings, **{f"custom_{name}": comm is not None})


def _warn(method: str) -> None:
    warnings.warn(f"{method} changes nothing: this model's parameters are not sharded, so none are gathered",
                  stacklevel=3)  # fmt: skip


METHODS: dict[str, Callable[..., None]] = {
    "set_custom_all_gather": set_custom_all_gather,
    "set_custom_reduce_scatter": set_custom_reduce_scatter,
    "set_allocate_memory_from_process_group_for_comm": set_allocate_memory_from_process_group_for_comm,
    "set_symm_mem_for_comm": set_symm_mem_for_comm,
}
