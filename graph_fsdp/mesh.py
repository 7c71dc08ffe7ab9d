"""How a device mesh is used: which of its dimensions shards parameters, and which replicates the shards.

| mesh | strategy | placements of a parameter |
|---|---|---|
| one dimension | fully sharded (FSDP) | ``Shard(0)`` |
| two dimensions, of any names | hybrid (HSDP): the first replicates, the second shards | ``Replicate(), Shard(0)`` |
| one dimension named ``replicate`` or ``dp_replicate`` | replicated (DDP, FSDP1's ``NO_SHARD``) | ``Replicate()`` |

These are the meshes that ``fully_shard`` takes, and torchtitan's names. Scalars are replicated over all dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from graph_fsdp.passes import GroupShape

REPLICATE_NAMES = frozenset({"replicate", "dp_replicate"})


@dataclass(frozen=True)
class DataParallelMesh:
    """A mesh of one or two dimensions, and what each is for; None where no dimension is for it."""

    mesh: DeviceMesh
    shard_dim: int | None
    replicate_dim: int | None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> DataParallelMesh:
        if mesh.ndim == 2:
            return cls(mesh, shard_dim=1, replicate_dim=0)
        if mesh.mesh_dim_names and mesh.mesh_dim_names[0] in REPLICATE_NAMES:
            return cls(mesh, shard_dim=None, replicate_dim=0)
        return cls(mesh, shard_dim=0, replicate_dim=None)

    @property
    def world_size(self) -> int:
        """Ranks over which a parameter is sharded."""
        return 1 if self.shard_dim is None else self.mesh.size(self.shard_dim)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard."""
        return 1 if self.replicate_dim is None else self.mesh.size(self.replicate_dim)

    @property
    def shard_rank(self) -> int:
        return 0 if self.shard_dim is None else self.mesh.get_local_rank(self.shard_dim)

    @property
    def group(self) -> str:
        """Name of the group that shards, "" if nothing does."""
        return "" if self.shard_dim is None else self.mesh.get_group(self.shard_dim).group_name

    @property
    def replicate_group(self) -> str:
        """Name of the group of replicas, "" if there are none."""
        return "" if self.replicate_dim is None else self.mesh.get_group(self.replicate_dim).group_name

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the whole mesh."""
        return tuple(self.mesh.mesh.flatten().tolist())

    def subgroup(self, size: int) -> dist.ProcessGroup:
        """A new group of ``size`` consecutive ranks of the dimension that shards, this one among them (as FSDP2's
        ``_get_post_forward_mesh_info``). Every rank of the mesh makes one."""
        assert self.shard_dim is not None
        ranks = dist.get_process_group_ranks(self.mesh.get_group(self.shard_dim))
        begin = self.shard_rank - self.shard_rank % size
        # Made by its own ranks alone: those of other slices of a larger mesh may never come here.
        return dist.new_group(ranks[begin : begin + size], use_local_synchronization=True)

    def group_shapes(self) -> dict[str, GroupShape]:
        """Group name → where its ranks lie, for the cost model; a group of one rank where nothing shards."""
        shapes = {} if self.shard_dim is not None else {"": GroupShape(1)}
        for dim in range(self.mesh.ndim):
            line = self.mesh.mesh.movedim(dim, -1).reshape(-1, self.mesh.size(dim))[0].tolist()
            stride = abs(line[1] - line[0]) if len(line) > 1 else 1
            shapes[self.mesh.get_group(dim).group_name] = GroupShape(len(line), stride)
        return shapes

    def placements(self, scalar: bool) -> list[Placement]:
        """Where a parameter lies, per dimension of the mesh."""
        return [Shard(0) if dim == self.shard_dim and not scalar else Replicate() for dim in range(self.mesh.ndim)]

    def broadcast(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of the mesh's first rank: along one dimension after the other,
        from the ranks that have them already."""
        for dim in range(self.mesh.ndim):
            group = self.mesh.get_group(dim)
            source = dist.get_process_group_ranks(group)[0]
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    value = tensor.detach().contiguous()
                    dist.broadcast(value, source, group=group)
                    tensor.copy_(value)
