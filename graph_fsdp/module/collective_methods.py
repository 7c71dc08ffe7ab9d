"""FSDP2's methods on collectives are here: what runs them, in which process group, and the memory that they have.

Custom collectives are a model's: FSDP2 sets them per module, and here a unit may only be given the same object. With
one set, a bucket is one message; another object needs no new graphs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.module.unit_methods import change, check_bool, check_cut, check_sharded, of_whole_model, place
from graph_fsdp.runtime.slots import Allocate, SlotMemory, by_device

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


class CollectiveMethods:
    """Adds these methods to the classes of models and units. ``recurse`` is that of ``unit_methods.py``."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce gradients in a process group of their own, of the same ranks; False: in the group that gathers, again.
        Call it on the model, on all ranks, which make the group together. Gathers and reductions then run side by side
        on NCCL, which runs the collectives of one group one after the other. It takes the memory of another
        communicator. Raises RankDisagreement where another rank does something else instead."""
        check_bool(enable=enable)
        engine = of_whole_model(self, "set_separate_reduce_scatter_group", "the order of all collectives", recurse)
        check_sharded(engine, "set_separate_reduce_scatter_group")
        mesh = engine.storage.mesh
        assert mesh is not None, "gradients are reduced"
        if enable and not engine.own_reduce_group:
            engine.schedules.begin("set_separate_reduce_scatter_group()", "call")
            engine.own_reduce_group = mesh.subgroup(mesh.spec.world_size, "reductions").group_name
            if engine.cost is not None:
                engine.cost.groups[engine.own_reduce_group] = engine.cost.groups[mesh.spec.group]
        change(engine, own_reduce_group=enable)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather buckets with ``comm``, an ``AllGather`` of FSDP2 (``allocate``, ``__call__``), also for ``unshard()``;
        None: with the process group's own again, by which ``graph_fsdp.unsharded`` always goes. Raises TypeError on an
        object that is none, UnsupportedError with ``regions="whole"``."""
        _set_custom(self, "all_gather", comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce the gradients of buckets with ``comm``, a ``ReduceScatter`` of FSDP2; likewise. Gradients are views of
        what its ``allocate`` returns."""
        _set_custom(self, "reduce_scatter", comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take the buffers of collectives from the process group's allocator, where it has one (NCCL does, gloo does
        not): slots, which then stay allocated between runs; what is kept for backward; and a reduction's, but not
        gradients that are sent from where they were written. Gathers land in them, and nothing is copied again. Raises
        ValueError where a custom collective is set: it allocates itself. It ends ``set_symm_mem_for_comm``."""
        check_bool(enable=enable)
        method, kind = "set_allocate_memory_from_process_group_for_comm", "group" if enable else ""
        _keep_slots(self, method, kind, lambda _, groups: functools.partial(compat.allocate_from_group, groups[0]))

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Keep slots in torch's symmetric memory, which ranks allocate together when they first run: NCCL then gathers
        by copy engines or symmetric kernels. Reductions, and what is kept for backward, have ordinary memory. Raises
        ValueError as above, UnsupportedError where there is no such memory."""

        def allocator(engine: Engine, groups: list[Any]) -> Allocate:
            why = compat.why_no_symmetric_memory(groups[0], engine.storage.device, backend)
            if engine.cuda_graphs is not None:
                why = "slots are those of CUDA graphs"
            if why:
                raise UnsupportedError(f"set_symm_mem_for_comm({backend!r}): {why}; leave it out: numbers are the same")
            return compat.symmetric_memory(groups, backend)

        _keep_slots(self, "set_symm_mem_for_comm", "symmetric", allocator)


def _set_custom(module: object, name: str, comm: Any) -> None:
    (engine, unit), method = place(module), f"set_custom_{name}"
    if unit and getattr(engine.comms, name) is not comm:
        raise UnsupportedError(
            f"{method} was called on the unit {unit!r} with another object than the model has; call it on the "
            "model, for all its buckets"
        )
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(
            f"{method}: comm must have allocate(size, *, dtype, device) and be callable with (output_tensor, "
            f"input_tensor, group, …), got {comm!r}; derive it from torch's AllGather or ReduceScatter"
        )
    check_cut(engine, method)
    quantized = next((p for p in engine.spec.parameters.values() if p.sent_as), None)
    if name == "reduce_scatter" and comm is not None and quantized is not None:
        raise UnsupportedError(
            f"{method}: mp_policy's reduce_dtype has the gradient of {quantized.name!r} sent as {quantized.sent_as} by "
            "an all-to-all, of which no ReduceScatter is a part; leave one of the two out"
        )
    if engine.spec.mesh.world_size == 1:
        warnings.warn(f"{method} changes nothing: this model's parameters are not sharded", stacklevel=3)
    setattr(engine.comms, name, comm)
    change(engine, **{f"custom_{name}": comm is not None})


def _keep_slots(module: object, method: str, kind: str, allocator: Callable[..., Allocate]) -> None:
    """Keep slots from the next forward on in memory of ``kind``, for gathers in these groups; "": of each run."""
    engine, _ = place(module)
    for name in ("all_gather", "reduce_scatter"):
        if getattr(engine.comms, name) is not None:
            raise ValueError(f"{method}: set_custom_{name} was called, and that object allocates: undo that first")
    mesh = engine.storage.mesh
    if mesh is None or mesh.shard_dim is None:
        warnings.warn(f"{method} changes nothing: this model's parameters are not sharded", stacklevel=3)
        return
    check_cut(engine, method)
    if engine.spec.own_meshes:
        raise UnsupportedError(f"{method}() registers memory with the groups of one mesh, and parameters have others")
    groups = [compat.resolve_group(name) for name in (engine.spec.mesh.group, engine.spec.reshard_group) if name]
    made = SlotMemory(engine.storage.device, engine.counter, allocator(engine, groups))
    made.others = by_device if kind == "symmetric" else made.allocate
    for memory in engine.registered.values():
        memory.clear()
    engine.registered.setdefault(kind, made)
    change(engine, registered_memory=kind)
