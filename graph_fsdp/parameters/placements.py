"""``shard_placement_fn``: which dimension of each parameter is sharded. The rules are FSDP2's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.tensor import Shard

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.mesh import DataParallelMesh

ShardPlacementFn: TypeAlias = Callable[[nn.Parameter], Shard | None]


def shard_dims(
    placement_fn: ShardPlacementFn | None,
    names: Mapping[nn.Parameter, Sequence[str]],
    ignored: Collection[nn.Parameter],
    mesh: DataParallelMesh | None,
) -> dict[str, int]:
    """Canonical name → dimension, of the parameters that are sharded on another one than the first. Asked once per
    parameter, whatever the number of ranks; where nothing is sharded (one process, replicas) the answer changes
    nothing.

    Raises:
        TypeError, ValueError, UnsupportedError: the function, or its answer for a parameter, says no dimension on
            which the parameter can be sharded.
    """
    if placement_fn is None:
        return {}
    if not callable(placement_fn):
        raise TypeError(
            "shard_placement_fn must be a function of a parameter that returns Shard(dim) or None, got "
            f"{placement_fn!r}"
        )
    sharded = mesh is not None and mesh.shard_dim is not None
    found = {}
    for p, (name, *_) in names.items():
        if p not in ignored:
            dim = _dimension(placement_fn(p), name, p, mesh.world_size if mesh is not None else 1)
            if dim and sharded:
                found[name] = dim
    return found


def _dimension(placement: Any, name: str, p: nn.Parameter, world_size: int) -> int:
    if placement is None:
        return 0
    said = f"shard_placement_fn returned {placement!r} for parameter {name!r} of shape {tuple(p.shape)}"
    if type(placement).__name__ == "ShardPlacementResult":
        raise UnsupportedError(
            f"{said}: a mesh for a single parameter is not available; return its placement, Shard(dim) or None"
        )
    if type(placement) is not Shard:  # and not a strided one
        raise TypeError(f"{said}; return torch.distributed.tensor.Shard(dim), or None for dimension 0")
    dim = placement.dim + p.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < p.dim():
        raise ValueError(f"{said}, which has {p.dim()} dimensions; return one of them, or None")
    rows = compat.local_part(p).shape[dim]
    if dim and rows % world_size:
        raise ValueError(
            f"{said}: {rows} is not divisible by the {world_size} ranks that shard, which only dimension 0 "
            "need not be; return Shard(0), None or another dimension"
        )
    return dim
