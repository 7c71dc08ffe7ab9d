"""Meshes of XLA devices say which axis shards and which replicates.

One process drives all devices of its host, so nothing here is about ranks: a device is what a rank is elsewhere.

| mesh | strategy |
|---|---|
| a torch_xla ``Mesh`` with an axis ``fsdp`` (FSDPv2's name), ``shard`` or ``dp_shard`` | sharded over that axis |
| and an axis ``replicate``, ``dp_replicate``, ``dcn`` or ``data`` | likewise, and replicated over this one (HSDP) |
| a ``DeviceMesh`` of device type ``xla``, of one or two dimensions | as on other devices |

Other axes must have size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.errors import MeshError
from graph_fsdp.mesh import REPLICATE_NAMES, SHARD_NAMES, Mesh
from graph_fsdp.passes import GroupShape
from graph_fsdp.passes.ir.spec import MeshSpec
from graph_fsdp.runtime.xla.operators import Placement, read_placement

_REPLICATE_NAMES = REPLICATE_NAMES | {"dcn", "data"}


@dataclass(frozen=True)
class XlaMesh(Mesh):
    """Describes a mesh of XLA devices: ``devices`` has their ordinals, one row per replica and one device per shard in
    it."""

    devices: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, mesh: Any) -> XlaMesh:
        """Read a user's mesh; None stands for all devices, which shard.

        Raises:
            TypeError, MeshError: it is no mesh of all XLA devices, or does not say which axis shards.
        """
        if mesh is None:
            return cls((tuple(range(compat_xla.runtime().global_runtime_device_count())),))
        if compat_xla.is_mesh(mesh):
            names = mesh.axis_names
            return cls._of(mesh.get_logical_mesh(), names, dict(zip(names or (), mesh.mesh_shape, strict=False)))
        if isinstance(mesh, DeviceMesh) and mesh.device_type == "xla":
            return cls._of_device_mesh(mesh)
        raise TypeError(
            "mesh must be a torch_xla Mesh with an axis named 'fsdp', a DeviceMesh of device type 'xla', or None for "
            f"all devices, got {mesh!r}; with backend='xla' there are no others"
        )

    @classmethod
    def _of(cls, array: Any, names: tuple[str, ...] | None, sizes: dict[str, int]) -> XlaMesh:
        if names is None:
            raise MeshError("mesh has no axis names; name one 'fsdp': Mesh(ids, shape, ('fsdp', …))")
        shards = [name for name in names if name in SHARD_NAMES]
        replicates = [name for name in names if name in _REPLICATE_NAMES and (sizes[name] > 1 or not shards)]
        others = [name for name in names if name not in (*shards, *replicates) and sizes[name] > 1]
        described = f"mesh has the axes {', '.join(f'{name!r} of size {size}' for name, size in sizes.items())}"
        if len(shards) != 1 or len(replicates) > 1:
            raise MeshError(f"{described}; one axis must be named 'fsdp', and at most one 'replicate'")
        if others:
            raise MeshError(f"{described}; parameters are sharded over 'fsdp' alone, so {others[0]!r} must have size 1")
        order = [names.index(name) for name in (*replicates, *shards)]
        rest = [dim for dim in range(len(names)) if dim not in order]
        rows = array.transpose([*rest, *order]).reshape(-1, sizes[shards[0]])
        return cls(tuple(tuple(int(d) for d in row) for row in rows))

    @classmethod
    def _of_device_mesh(cls, mesh: DeviceMesh) -> XlaMesh:
        if mesh.ndim > 2:
            raise MeshError(f"mesh has {mesh.ndim} dimensions; one shards, or the first of two replicates")
        array = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
        found = cls(tuple(map(tuple, array)))
        if found.size != (devices := compat_xla.runtime().global_runtime_device_count()):
            raise MeshError(
                f"mesh has {found.size} devices and the XLA program {devices}; make the mesh of all XLA devices: "
                "torch_xla's Mesh(range(n), (n,), ('fsdp',))"
            )
        return found

    def placements(self, tensors: Sequence[Tensor]) -> list[Placement | None]:
        """Say where tensors lie; None where another dimension than the first is sharded."""
        return [read_placement(spec, self.ordinals) for spec in compat_xla.sharding_specs(tensors)]

    @property
    def spec(self) -> MeshSpec:
        replicas = len(self.devices)
        return MeshSpec("", "fsdp", len(self.devices[0]), "replicate" if replicas > 1 else "", replicas)

    @property
    def size(self) -> int:
        return self.spec.ranks

    @property
    def ordinals(self) -> tuple[int, ...]:
        return tuple(device for row in self.devices for device in row)

    @property
    def groups(self) -> dict[str, list[list[int]]]:
        """Return group name → its groups of devices, which communicate at the same time."""
        columns = [list(column) for column in zip(*self.devices, strict=True)]
        return {"fsdp": [list(row) for row in self.devices], "replicate": columns}

    def group_shapes(self) -> dict[str, GroupShape]:
        spec = self.spec
        shapes = {"fsdp": GroupShape(spec.world_size, 1)}
        if spec.replicas > 1:
            shapes["replicate"] = GroupShape(spec.replicas, spec.world_size)
        return shapes

    @property
    def whole(self) -> Placement:
        """Return the placement that is the same on every device."""
        return Placement(self.ordinals)

    @property
    def sharded(self) -> Placement:
        """Return the placement of parameters, their gradients and so the optimizer's state."""
        by_shard = tuple(device for column in zip(*self.devices, strict=True) for device in column)
        return Placement(by_shard, self.spec.world_size)

    @property
    def batch(self) -> Placement:
        """Return the placement of inputs, and of what is computed from them: each device has its own rows."""
        return Placement(self.ordinals, self.size)
