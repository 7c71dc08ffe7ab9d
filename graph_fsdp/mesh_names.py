"""Which dimensions of a mesh are for data parallelism, where their names say so.

| names | use |
|---|---|
| ``shard``, ``dp_shard``, ``fsdp`` | shards |
| ``replicate``, ``dp_replicate`` | replicates |
| ``tp``, ``tensor``, ``model``, ``pp``, ``ep`` | none here: its ranks are not for data parallelism |

These are torchtitan's names, those of torch's tutorials, and those of torch_xla's FSDPv2. A dimension of any other name
is taken as FSDP2 takes it, by its place, except that one of size 1 is for nothing beside a dimension of the first two
rows.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from graph_fsdp.errors import MeshError

SHARD_NAMES = frozenset({"shard", "dp_shard", "fsdp"})
REPLICATE_NAMES = frozenset({"replicate", "dp_replicate"})
OTHER_NAMES = frozenset({"tp", "tensor", "model", "pp", "ep"})


def data_parallel_slice(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh without the dimensions that are not for data parallelism: one dimension, or two of which the first
    replicates and the second shards. A mesh of one dimension is what it is, whatever its name.

    Raises:
        MeshError: the names do not say which dimensions those are.
    """
    names = mesh.mesh_dim_names
    if mesh.ndim == 1 or names is None:
        return _checked(mesh)
    sizes = dict(zip(names, mesh.shape, strict=True))
    kept = [name for name in names if name not in OTHER_NAMES]
    known = [name for name in kept if name in SHARD_NAMES | REPLICATE_NAMES]
    if known:
        kept = [name for name in kept if name in known or sizes[name] > 1]
    described = f"mesh has the dimensions {', '.join(f'{name!r} of size {size}' for name, size in sizes.items())}"
    if not kept:
        raise MeshError(f"{described}, and none of them is for data parallelism; pass a mesh with one that is")
    roles = ["shard" if name in SHARD_NAMES else "replicate" if name in REPLICATE_NAMES else "" for name in kept]
    by_place = dict(zip(("replicate", "shard"), roles, strict=True)) if len(kept) == 2 else {}
    if any(role not in ("", place) for place, role in by_place.items()):
        raise MeshError(
            f"{described}, and of two the first replicates and the second shards, which is not what the names "
            f"{kept[0]!r} and {kept[1]!r} say; pass a mesh with the dimensions in that order, or a slice with one of "
            "them: mesh['…']"
        )
    return _checked(mesh if len(kept) == mesh.ndim else mesh[tuple(kept)])


def _checked(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim in (1, 2):
        return mesh
    names = mesh.mesh_dim_names[:2] if mesh.mesh_dim_names and mesh.ndim > 2 else ()
    example = f", e.g. mesh[{', '.join(map(repr, names))}]" if names else ""
    raise MeshError(
        f"mesh has {mesh.ndim} dimensions of sizes {tuple(mesh.shape)}, and data parallelism takes one (to shard) "
        "or two (to replicate, then to shard); pass a slice of the mesh with the dimensions that are for it"
        + (example or ": make the mesh with mesh_dim_names, then mesh['a', 'b']")
    )
