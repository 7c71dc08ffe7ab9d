"""Placements say how parameters are sharded: by ``shard_placement_fn`` (with FSDP2's rules), and where they are
tensor-parallel already, as DTensors over other dimensions of the same mesh.

[Note: tensor parallelism]
As in FSDP2, each rank's local part is sharded over the data-parallel mesh: passes and collectives know nothing else,
and every ``shape`` of a ParameterSpec is that of the part. Around it:

- The *shard* is a DTensor over both meshes, data-parallel dimensions first. Where both shard one dimension of the
  parameter its placement is strided: the part of a tensor-parallel rank is cut again.
- The *placeholder* is a DTensor over the tensor-parallel mesh, as the model's forward expects it.
- In the captured graph the gathered part becomes such a DTensor again (``as_model_uses_it``), and AOTAutograd leaves
  local tensors and tensor parallelism's own collectives, in the order of the model. A gradient that is partial over the
  tensor-parallel ranks is reduced over them first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from graph_fsdp import compat
from graph_fsdp.errors import AlreadyShardedError, UnsupportedError
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.passes.ir.settings import check_signature

# ``Shard(dim)``, None, or torch's ``ShardPlacementResult(placement, mesh_info)``, which torch documents since 2.13.
ShardPlacementFn: TypeAlias = Callable[[nn.Parameter], Any]


def asked_placements(
    placement_fn: ShardPlacementFn | None,
    names: Mapping[nn.Parameter, Sequence[str]],
    ignored: Collection[nn.Parameter],
) -> tuple[dict[str, Any], dict[str, DataParallelMesh]]:
    """Return what the function says of each parameter, by canonical name: its placement, and its mesh where it has one
    of its own. The function is asked once per parameter, also where nothing is sharded (one process, replicas)."""
    if placement_fn is None:
        return {}, {}
    if not callable(placement_fn):
        raise TypeError(
            "shard_placement_fn must be a function of a parameter that returns Shard(dim) or None, got "
            f"{placement_fn!r}"
        )
    advice = "pass a function of a parameter that returns Shard(dim) or None"
    check_signature("shard_placement_fn", placement_fn, advice, "parameter")
    said = {name: placement_fn(p) for p, (name, *_) in names.items() if p not in ignored}
    meshes = {}
    for name, answer in said.items():
        if type(answer).__name__ == "ShardPlacementResult":
            said[name], info = answer.placement, answer.mesh_info
            dims = (getattr(info, "shard_mesh_dim", None), getattr(info, "replicate_mesh_dim", None))
            meshes[name] = DataParallelMesh(info.mesh, *dims)
    return said, meshes


def shard_dims(
    placements: Mapping[str, Any], names: Mapping[nn.Parameter, Sequence[str]], mesh: DataParallelMesh | None
) -> dict[str, int]:
    """Return canonical name → dimension, of the parameters that are not sharded on the first.

    Raises:
        TypeError, ValueError: the answer for a parameter says no dimension on which it can be sharded.
    """
    found = {}
    for p, (name, *_) in names.items():
        if name in placements:
            own = mesh.of_parameter(name) if mesh is not None else None
            dim = _dimension(placements[name], name, p, own.spec.world_size if own is not None else 1)
            if dim and own is not None and own.shard_dim is not None:
                found[name] = dim
    return found


def _dimension(placement: Any, name: str, p: nn.Parameter, world_size: int) -> int:
    if placement is None:
        return 0
    said = f"shard_placement_fn returned {placement!r} for parameter {name!r} of shape {tuple(p.shape)}"
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


def check_tensor_parallel(
    names: Mapping[nn.Parameter, Sequence[str]], ignored: Collection[nn.Parameter], mesh: DataParallelMesh | None
) -> bool:
    """Say whether anything is tensor-parallel, and check that it can be sharded over ``mesh``.

    Raises:
        AlreadyShardedError: a parameter is a DTensor on a mesh that is no other dimension of the same one.
        UnsupportedError: one is, in a way that this version does not have.
    """
    found = False
    for p, (name, *_) in names.items():
        if not isinstance(p, DTensor) or p in ignored:
            continue
        found = True
        own = p.device_mesh
        described = f"parameter {name!r} is a DTensor with placements {p.placements} on {own}"
        pass_other = (
            "pass a model whose parameters are plain tensors, or tensor-parallel on one dimension of a mesh of which "
            "mesh=, or meshes= for this parameter, is another (mesh['tp'], mesh['dp'])"
        )
        if mesh is None:
            raise AlreadyShardedError(f"{described}, and there is no mesh to shard it over; {pass_other}")
        sharding = mesh.of_parameter(name).mesh
        if not _are_dimensions_of_one_mesh(sharding, own):
            raise AlreadyShardedError(f"{described}, which is not beside {sharding} in one mesh; {pass_other}")
        if any(placement.is_partial() for placement in p.placements) or len(p.placements) > 2:
            raise UnsupportedError(
                f"{described}; only DTensors on one or two dimensions that are not partial can be sharded"
            )
    return found


def _are_dimensions_of_one_mesh(one: DeviceMesh, other: DeviceMesh) -> bool:
    names = [*(one.mesh_dim_names or ()), *(other.mesh_dim_names or ())]
    if len(set(names)) < one.ndim + other.ndim:  # without names, or one twice
        return False
    try:
        compat.concatenate_meshes(one, other)
    except (RuntimeError, KeyError):
        return False
    return True


def shard_spec(p: DTensor, mesh: DataParallelMesh, shard_dim: int | None) -> tuple[DeviceMesh, list[Placement]]:
    """Return mesh and placements of a tensor-parallel parameter's shard; ``shard_dim`` as in
    ``DataParallelMesh.placements``."""
    placements, sizes = mesh.placements(shard_dim), zip(p.placements, p.device_mesh.shape, strict=True)
    ways = math.prod(size for placement, size in sizes if shard_dim is not None and placement.is_shard(shard_dim))
    if shard_dim is not None and ways > 1:
        strided = compat.StridedShard(shard_dim, split_factor=ways)
        placements = [placement if placement.is_replicate() else strided for placement in placements]
    return compat.concatenate_meshes(mesh.mesh, p.device_mesh), [*placements, *p.placements]


def as_model_uses_it(p: DTensor) -> Callable[[Tensor], DTensor]:
    """Return a function that makes a DTensor, like ``p``, of this rank's part of it."""
    mesh, placements, shape, stride = p.device_mesh, p.placements, p.shape, p.stride()

    def as_dtensor(part: Tensor) -> DTensor:
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)

    return as_dtensor


def part_of_rank(p: DTensor, whole: Tensor) -> Tensor:
    """Return a view of what ``p`` has on this rank of a plain tensor of its shape."""
    shape, first = compat.local_shape_and_offset(p)
    return whole[tuple(slice(at, at + size) for at, size in zip(first, shape, strict=True))]


def give_memory(placeholder: DTensor, part: Tensor) -> None:
    """Make the placeholder a DTensor of ``part``, of its dtype and on its device."""
    if (placeholder.dtype, placeholder.device) != (part.dtype, part.device):
        with torch.no_grad():
            other = as_model_uses_it(placeholder)(part)
        compat.exchange(placeholder, other.requires_grad_(placeholder.requires_grad))
    compat.set_local_tensor(placeholder, part)
