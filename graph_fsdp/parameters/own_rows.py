"""A state dict of whole tensors becomes one of each rank's own rows, and one of another rank's rows is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp.errors import CheckpointError
from graph_fsdp.parameters.placements import part_of_rank
from graph_fsdp.parameters.shards import Storage


def own_rows(module: nn.Module, storage: Any, state_dict: Mapping[str, Any], prefix: str) -> dict[str, DTensor]:
    """Return a DTensor of this rank's rows for each whole tensor in ``state_dict`` of a parameter that is sharded.

    Raises:
        CheckpointError: a DTensor of ``state_dict`` has the rows of another rank.
    """
    if not isinstance(storage, Storage):
        return {}
    held = {id(p.shard): p for p in storage.parameters.values()}
    rows: dict[str, DTensor] = {}
    for name, registered in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        p = held.get(id(registered))
        value: Any = state_dict.get(name)
        if p is None or not isinstance(registered, DTensor) or not isinstance(value, Tensor) or value.is_meta:
            continue
        if isinstance(value, DTensor):
            refuse_rows_of_another_rank(f"state_dict[{name!r}]", value, registered)
        elif value.shape == registered.shape:
            if isinstance(p.placeholder, DTensor):  # the part of this tensor-parallel rank
                value = part_of_rank(p.placeholder, value)
            rows[name] = storage.shard_of(p, value)
    return rows


def refuse_rows_of_another_rank(name: str, value: DTensor, parameter: DTensor) -> None:
    """Refuse a DTensor that was pickled on another rank of the same ranks, where it has other rows of the parameter.

    A DTensor that is unpickled keeps the coordinate of the rank that it was pickled on. Where the mesh replicates,
    another rank has the same rows.
    """
    mesh = value.device_mesh
    if mesh is parameter.device_mesh or mesh != parameter.device_mesh:
        return
    theirs, ours = mesh.get_coordinate(), parameter.device_mesh.get_coordinate()
    if theirs is None or ours is None:
        return
    if any(a != b and not how.is_replicate() for a, b, how in zip(theirs, ours, value.placements, strict=True)):
        raise CheckpointError(
            f"{name} has the rows of rank {mesh.mesh[tuple(theirs)].item()}, which has saved it, and this is rank "
            f"{mesh.mesh[tuple(ours)].item()}: a state_dict() has the shards of its own rank. Save whole tensors "
            "(torch.distributed.checkpoint.state_dict.get_state_dict on all ranks, with "
            "StateDictOptions(full_state_dict=True, cpu_offload=True)), a file of each rank, or use "
            "graph_fsdp.checkpoint.save"
        )
