"""FSDP2's methods for collectives of the user's own, on a compiled model: of all its buckets.

FSDP2 sets them per module; here one object is for the model, and a unit may only be given the same. With one set,
graphs are captured anew in which a bucket is gathered (or reduced) in one message; setting another object needs no new
graphs. All ranks have to set the same: they compare.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.module.unit_methods import change, place
from graph_fsdp.runtime.comm.collectives import ProcessGroupCollective

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


class CommunicationMethods:
    """Mixed into the classes of models and units (``module.py``)."""

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather buckets with ``comm``, an ``AllGather`` of FSDP2: ``allocate`` and ``__call__``. None: with the
        process group's own again. Raises TypeError on an object that is none, UnsupportedError with
        ``regions="whole"``."""
        _set_custom(self, "all_gather", comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce the gradients of buckets with ``comm``, a ``ReduceScatter`` of FSDP2; likewise. Gradients are views of
        what its ``allocate`` returns."""
        _set_custom(self, "reduce_scatter", comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take the buffers of both collectives from the process group's allocator, where it has one (NCCL does, gloo
        does not). Raises ValueError where a custom collective is set: it allocates itself."""
        engine, _ = place(self)
        method = "set_allocate_memory_from_process_group_for_comm"
        own = {"all_gather": compat.all_gather_single, "reduce_scatter": compat.reduce_scatter_single}
        for name in own:
            if not isinstance(getattr(engine.comms, name), ProcessGroupCollective | None):
                raise ValueError(
                    f"{method}: set_custom_{name} was called, and that object allocates its own memory; call "
                    f"set_custom_{name}(None) first"
                )
        mesh = engine.storage.mesh
        if mesh is None or mesh.shard_dim is None:
            _warn(method)
            return
        group = mesh.mesh.get_group(mesh.shard_dim)
        for name, collective in own.items():
            _set(engine, method, name, ProcessGroupCollective(group, collective) if enable else None)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not available: raises UnsupportedError. A rendezvous over symmetric memory is bound to one buffer, and
        gathers here share the slots that a graph's plan gives them."""
        raise UnsupportedError(
            "set_symm_mem_for_comm() registers a staging buffer for each collective, and gathers here land in slots "
            "that they share; set_allocate_memory_from_process_group_for_comm(True) takes buffers from NCCL's own "
            "allocator"
        )


def _set_custom(module: object, name: str, comm: Any) -> None:
    engine, unit = place(module)
    if unit and getattr(engine.comms, name) is not comm:
        raise UnsupportedError(
            f"set_custom_{name} was called on the unit {unit!r} with another object than the model has; call it on the "
            "model, for all its buckets"
        )
    _set(engine, f"set_custom_{name}", name, comm)


def _set(engine: Engine, method: str, name: str, comm: Any) -> None:
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
    change(engine, **{f"custom_{name}": comm is not None})


def _warn(method: str) -> None:
    what = "this model's parameters are not sharded, so none are gathered"
    warnings.warn(f"{method} changes nothing: {what}", stacklevel=3)
