"""A device mesh has one dimension that shards parameters, one that replicates the shards, or both.

| mesh | strategy | placements of a parameter |
|---|---|---|
| one dimension | fully sharded (FSDP) | ``Shard(0)`` |
| two dimensions, of any names | hybrid (HSDP): the first replicates, the second shards | ``Replicate(), Shard(0)`` |
| one dimension named ``replicate`` or ``dp_replicate`` | replicated (DDP, FSDP1's ``NO_SHARD``) | ``Replicate()`` |

Scalars are replicated over all dimensions, and ``shard_placement_fn`` may choose another ``Shard``. In a larger mesh,
names tell which dimensions are for data parallelism:

| names | use |
|---|---|
| ``shard``, ``dp_shard``, ``fsdp`` | shards |
| ``replicate``, ``dp_replicate`` | replicates |
| ``tp``, ``tensor``, ``model``, ``pp``, ``ep`` | none here: its ranks are not for data parallelism |

These are the names of torchtitan, torch's tutorials and torch_xla's FSDPv2. A dimension of any other name is taken by
its place, as by FSDP2; one of size 1 is left out beside a dimension of the first two rows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from graph_fsdp import compat
from graph_fsdp.errors import MeshError
from graph_fsdp.passes import GroupShape
from graph_fsdp.passes.ir.spec import MeshSpec
from graph_fsdp.runtime.ranks.agreement import is_shared, publish, receive
from graph_fsdp.runtime.ranks.lockstep import finish, lockstep_of

SHARD_NAMES = frozenset({"shard", "dp_shard", "fsdp"})
REPLICATE_NAMES = frozenset({"replicate", "dp_replicate"})
OTHER_NAMES = frozenset({"tp", "tensor", "model", "pp", "ep"})

# For all ranks to reach ``graph_fsdp.compile``: the first may be reading a checkpoint while the others wait.
START_TIMEOUT_SECONDS = 1800.0

_TORCHRUN = "torchrun --nproc-per-node N script.py"


class Mesh(Protocol):
    """A mesh shares a model: ``DataParallelMesh`` over ranks, ``XlaMesh`` (``xla/mesh.py``) over XLA devices."""

    @property
    def spec(self) -> MeshSpec:
        """Return what passes know of it as a model's mesh: its groups, and how many ranks they have."""

    def group_shapes(self) -> dict[str, GroupShape]:
        """Return group name → where its ranks lie, for the cost model."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks of the processes that agree on what they do: one, where one has all devices, or
        there is no store through which they could."""
        return (0,)

    @property
    def is_first(self) -> bool:
        """Say whether ``broadcast`` sends the values of this process."""
        return True

    def broadcast(self, value: Tensor) -> None:
        """Overwrite ``value``, contiguous, by that of the mesh's first rank; do nothing where one process has all."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a context in which no other rank of this process runs (XLA's replicas may be threads of one)."""
        return contextlib.nullcontext()


@dataclass(frozen=True)
class DataParallelMesh(Mesh):
    """Says which dimension of a mesh of one or two shards, and which replicates; None where none does. ``own``:
    parameter → its mesh, where that is another one."""

    mesh: DeviceMesh
    shard_dim: int | None
    replicate_dim: int | None
    own: Mapping[str, DataParallelMesh] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> DataParallelMesh:
        """Return the data-parallel part of ``mesh``. Raises MeshError unless that is one or two dimensions."""
        mesh = _data_parallel_slice(mesh)
        names = mesh.mesh_dim_names or ()
        if mesh.ndim == 2:
            _check_replicas(mesh)
            return cls(mesh, shard_dim=1, replicate_dim=0)
        if mesh.ndim == 1:
            replicates = bool(names) and names[0] in REPLICATE_NAMES
            return cls(mesh, None, replicate_dim=0) if replicates else cls(mesh, shard_dim=0, replicate_dim=None)
        example = f", e.g. mesh[{', '.join(map(repr, names[:2]))}]" if names and mesh.ndim > 2 else ""
        raise MeshError(
            f"mesh has {mesh.ndim} dimensions of sizes {tuple(mesh.shape)}, and data parallelism takes one (to shard) "
            "or two (to replicate, then to shard); pass a slice of the mesh with the dimensions that are for it"
            + (example or ": make the mesh with mesh_dim_names, then mesh['a', 'b']")
        )

    def of_parameter(self, name: str) -> DataParallelMesh:
        return self.own.get(name, self)

    @property
    def spec(self) -> MeshSpec:
        (group, ranks), (replicate_group, replicas) = map(self._group, (self.shard_dim, self.replicate_dim))
        return MeshSpec("", group, ranks, replicate_group, replicas)

    def _group(self, dim: int | None) -> tuple[str, int]:
        """Return the name of the group of a dimension, and how many ranks it has; "" and one for None."""
        return ("", 1) if dim is None else (self.mesh.get_group(dim).group_name, self.mesh.size(dim))

    @property
    def own_spec(self) -> MeshSpec:
        """Return the same under a name that all ranks have, of its dimensions or of their sizes: some parameters'."""
        return replace(self.spec, name=" x ".join(self.mesh.mesh_dim_names or map(str, self.mesh.shape)))

    @property
    def shard_rank(self) -> int:
        return 0 if self.shard_dim is None else self.mesh.get_local_rank(self.shard_dim)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.mesh.mesh.flatten().tolist())

    def subgroup(self, size: int, use: str = "gathers") -> dist.ProcessGroup:
        """Return a group of ``size`` consecutive ranks of the dimension that shards, this one among them (as FSDP2's
        ``_get_post_forward_mesh_info``). Every rank makes one, shared by all models of one ``use``: groups are never
        freed."""
        assert self.shard_dim is not None
        ranks = dist.get_process_group_ranks(self.mesh.get_group(self.shard_dim))
        begin = self.shard_rank - self.shard_rank % size
        members = tuple(ranks[begin : begin + size])
        return group_of(members, (self.ranks, use))

    def group_shapes(self) -> dict[str, GroupShape]:
        shapes = {} if self.shard_dim is not None else {"": GroupShape(1)}
        shapes |= shapes_of_groups(self.mesh)
        for mesh in self.own.values():
            shapes |= mesh.group_shapes()
        return shapes

    def placements(self, shard_dim: int | None) -> list[Placement]:
        """Return a parameter's placement per dimension of the mesh. ``shard_dim``: None for a scalar."""
        sharded = None if shard_dim is None else self.shard_dim
        return [Replicate() if dim != sharded else Shard(shard_dim or 0) for dim in range(self.mesh.ndim)]

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == self.ranks[0]

    def broadcast(self, value: Tensor) -> None:
        for dim in range(self.mesh.ndim):
            self._broadcast(value, dim)

    def scatter(self, shard: Tensor, full: Tensor | None) -> None:
        """Fill each rank's ``shard``, contiguous and of one shape, with its rows of the first rank's ``full``, which
        may have fewer rows than all shards. The first line of ranks shards it, and passes the shards on to the
        replicas."""
        if self.shard_dim is None:
            if full is not None:
                shard.copy_(full)
        elif all(i == 0 for dim, i in enumerate(self.mesh.get_coordinate() or ()) if dim != self.shard_dim):
            group = self.mesh.get_group(self.shard_dim)
            chunks = None
            if full is not None:
                chunks = [rows_of(full, i, shard.shape[0]) for i in range(self.spec.world_size)]
                shard.copy_(chunks[0])
            sent = [as_bytes(c) for c in chunks] if chunks else None
            work = dist.scatter(as_bytes(shard), sent, self._first_of(self.shard_dim), group, async_op=True)
            finish(work, shard.device)
        if self.replicate_dim is not None:
            self._broadcast(shard, self.replicate_dim)

    def _broadcast(self, value: Tensor, dim: int) -> None:
        work = dist.broadcast(as_bytes(value), self._first_of(dim), self.mesh.get_group(dim), async_op=True)
        finish(work, value.device)

    def _first_of(self, dim: int) -> int:
        """Return the global rank that comes first in this rank's line of a dimension. It need not be the first of the
        process group, which sorts its ranks."""
        place = tuple(0 if i == dim else at for i, at in enumerate(self.mesh.get_coordinate() or ()))
        return int(self.mesh.mesh[place])


def shapes_of_groups(mesh: DeviceMesh) -> dict[str, GroupShape]:
    """Return the name of the group of each dimension → where its ranks lie."""
    shapes: dict[str, GroupShape] = {}
    for dim in range(mesh.ndim):
        line = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim))[0].tolist()
        stride = abs(line[1] - line[0]) if len(line) > 1 else 1
        shapes[mesh.get_group(dim).group_name] = GroupShape(len(line), stride)
    return shapes


def find_mesh(mesh: Any, device: torch.device | None, dims: Any) -> tuple[DataParallelMesh | None, torch.device]:
    """Return the data-parallel part of ``mesh`` (None: of all ranks), and the device of a rank's shards.

    ``device``: the model's; None if it is on the meta device. ``dims``: names of the dimensions that are for data
    parallelism, where they do not say so themselves (torch's ``DataParallelMeshDims``). Raises MeshError, TypeError or
    ValueError where ``mesh`` is no mesh of this rank, or not one for this device.
    """
    if mesh is None and dims is not None:
        raise ValueError("dp_mesh_dims names dimensions of a mesh, and there is none; pass mesh=")
    if mesh is None:
        if not dist.is_initialized() and world_size_of_environment() > 1:
            dist.init_process_group()
        if not dist.is_initialized():
            return None, device if device is not None else _device_of_type(_default_device_type())
        mesh = init_device_mesh(_first_ranks_device_type(device), (dist.get_world_size(),))
    check_mesh(mesh, device)
    found = DataParallelMesh.of(mesh) if dims is None else _of_dimensions(mesh, dims)
    return found, _device_of_type(mesh.device_type, device)


def _of_dimensions(mesh: DeviceMesh, dims: Any) -> DataParallelMesh:
    """Return the part of ``mesh`` that ``dims.shard`` and ``dims.replicate`` name: a dimension, several that become one
    in the order of their names here, or None."""
    groups = [getattr(dims, "replicate", None), getattr(dims, "shard", None)]
    replicate, shard = ((names,) if isinstance(names, str) else tuple(names or ()) for names in groups)
    if not replicate and not shard:
        raise TypeError(f"dp_mesh_dims must be a torch.distributed.fsdp.DataParallelMeshDims, got {dims!r}")
    wrong = [name for name in (*replicate, *shard) if name not in (mesh.mesh_dim_names or ())]
    if wrong or len({*replicate, *shard}) < len(replicate) + len(shard):
        what = f"the dimension {wrong[0]!r}, which mesh lacks" if wrong else "one dimension twice"
        raise MeshError(f"dp_mesh_dims={dims!r} names {what}; mesh has {mesh.mesh_dim_names}, name some of these, once")
    parts = [compat.one_dimension(mesh, names) for names in (replicate, shard) if names]
    if len(parts) == 2:
        both = compat.concatenate_meshes(*parts)
        _check_replicas(both)
        return DataParallelMesh(both, shard_dim=1, replicate_dim=0)
    return DataParallelMesh(parts[0], *((0, None) if shard else (None, 0)))


def _device_of_type(device_type: str, device: torch.device | None = None) -> torch.device:
    """Return ``device`` if it is of this type, else the process's current device of the type."""
    if device is not None and device.type == device_type:
        return device
    return torch.empty(0, device=device_type).device  # with its index


def check_mesh(mesh: Any, device: torch.device | None) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh (torch.distributed.init_device_mesh) or None, got {mesh!r}")
    if not dist.is_initialized():
        raise MeshError(
            f"mesh: its process group is not initialised (or was destroyed); start the script with {_TORCHRUN!r} and "
            "make the mesh with init_device_mesh"
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"mesh has the ranks {mesh.mesh.flatten().tolist()} and this one is rank {dist.get_rank()}; call "
            "graph_fsdp.compile on the ranks of the mesh only"
        )
    if device is None and mesh.device_type == "meta":
        raise MeshError("mesh is of device type 'meta', which holds no values; make it for the device to compute on")
    moved = device is not None and device.type == "cpu" and mesh.device_type != "meta"
    if device is not None and device.type != mesh.device_type and not moved:
        raise MeshError(
            f"mesh is of device type {mesh.device_type!r} and the model's parameters are on {device.type!r}; move the "
            "model, or make the mesh for its device type"
        )


def _check_replicas(mesh: DeviceMesh) -> None:
    """Raise MeshError unless replicas hold the same shards: a rank's shard goes by its place in the process group of
    its row, which sorts its ranks."""
    places = mesh.mesh.argsort(dim=1)
    if not torch.equal(places, places[:1].expand_as(places)):
        raise MeshError(
            f"mesh has the ranks {mesh.mesh.tolist()}, a row of which shards and a column of which replicates; process "
            "groups sort their ranks, so that ranks of a column would hold different shards: list the ranks of each "
            "row in ascending order"
        )


def world_size_of_environment() -> int:
    """Return the number of ranks that torchrun started; 1 without a launcher. Raises MeshError under a launcher that
    set no rendezvous (SLURM), where each process would train a model of its own."""
    found = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))
    if not found.isdigit():
        raise MeshError(
            f"the environment variable WORLD_SIZE (or SLURM_NTASKS) is {found!r}, not a number of ranks; unset it, or "
            "start with torchrun"
        )
    launched = int(found)
    if launched > 1:
        missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
        if missing:
            raise MeshError(
                f"{launched} processes were started and no process group is initialised, nor can it be: "
                f"{', '.join(missing)} not set in the environment; start the script with {_TORCHRUN!r} (under SLURM: "
                "srun torchrun …), or call torch.distributed.init_process_group first"
            )
    return launched


def _data_parallel_slice(mesh: DeviceMesh) -> DeviceMesh:
    """Return the data-parallel dimensions of the mesh (of a single one: all). Raises MeshError if names do not say."""
    names = mesh.mesh_dim_names
    if mesh.ndim == 1 or names is None:
        return mesh
    sizes = dict(zip(names, mesh.shape, strict=True))
    kept = [name for name in names if name not in OTHER_NAMES]
    known = [name for name in kept if name in SHARD_NAMES | REPLICATE_NAMES]
    if known:
        kept = [name for name in kept if name in known or sizes[name] > 1]
    described = f"mesh has the dimensions {', '.join(f'{name!r} of size {size}' for name, size in sizes.items())}"
    if not kept:
        raise MeshError(f"{described}, and none of them is for data parallelism; pass a mesh with one that is")
    if len(kept) == 2 and (kept[0] in SHARD_NAMES or kept[1] in REPLICATE_NAMES):
        raise MeshError(
            f"{described}, and of two the first replicates and the second shards, which is not what the names "
            f"{kept[0]!r} and {kept[1]!r} say; pass a mesh with the dimensions in that order, or a slice with one of "
            "them: mesh['…']"
        )
    return mesh if len(kept) == mesh.ndim else mesh[tuple(kept)]


# (ranks, use) → what ``group_of`` has made.
_groups: dict[tuple[tuple[int, ...], Hashable], dist.ProcessGroup] = {}


def group_of(ranks: tuple[int, ...], use: Hashable, *options: Any) -> dist.ProcessGroup:
    """Return the one group of these ranks for this use. They alone call it: others may never come here. ``options``:
    timeout and backend."""
    key = (ranks, use)
    if key not in _groups or not _exists(_groups[key]):
        _groups[key] = compat.group_of_members(ranks, *options)
    return _groups[key]


def _exists(group: dist.ProcessGroup) -> bool:
    """Say whether the group has not been destroyed, as all groups are with the default one."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


# Calls of ``_first_ranks_device_type`` so far; all ranks count alike.
_calls = itertools.count()


def _first_ranks_device_type(device: torch.device | None) -> str:
    """Return the type of ``device`` on the first rank; a rank with its model on the meta device cannot tell."""
    own = device.type if device is not None else _default_device_type()
    ranks, key = range(dist.get_world_size()), f"device_type{next(_calls)}"
    if not is_shared(ranks):
        return own
    lockstep = lockstep_of(ranks)
    if dist.get_rank() == 0:
        publish(key, own, ranks)
    return receive(key, ranks, START_TIMEOUT_SECONDS, functools.partial(lockstep.check_refused, is_late=False))


def _default_device_type() -> str:
    """Return the type of device that a model on the meta device goes to when no mesh says."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def as_bytes(value: Tensor) -> Tensor:
    """View contiguous memory as bytes, which a process group sends whatever the dtype."""
    flat = value.view(-1)
    # One value is contiguous whatever its stride is, which a view keeps.
    return (flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat).view(torch.uint8)


def rows_of(full: Tensor, index: int, rows: int) -> Tensor:
    """Return the shard of this index, contiguous, where each has ``rows`` rows, the last ones filled up with zeros."""
    own = full[index * rows : (index + 1) * rows]
    if own.shape[0] == rows:
        return own.contiguous()
    padded = full.new_zeros(rows, *full.shape[1:])
    padded[: own.shape[0]] = own
    return padded
