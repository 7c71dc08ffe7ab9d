"""The dimensions of a training mesh say which ranks share a batch, and which divide a model between them.

Names and layout are torchtitan's. Ranks of ``tp`` are next to each other, then come those of ``cp``, ``dp_shard``,
``dp_replicate``, and the stages of ``pp`` lie outermost, in whatever order the dimensions are given:

| dimension | its ranks | they exchange |
|---|---|---|
| ``pp`` | have other layers | activations and their gradients |
| ``dp_replicate`` | have the same shards, and other sequences | sums of gradients |
| ``dp_shard`` | have other shards, and other sequences | parameters, sums of gradients |
| ``cp`` | have other shards, and other parts of the same sequences | these, and keys and values |
| ``tp`` | have other parts of each matrix | activations |
| ``ep`` | have other experts | tokens |

``ep`` adds no ranks: experts lie on the ranks of ``dp_shard`` and ``cp``, of which ``ep`` have all experts together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graph_fsdp.errors import MeshError
from graph_fsdp.passes import GroupShape, Hardware
from graph_fsdp.passes.ir.settings import is_count

# Changes a model on the meta device in place, as a training program does, given the meshes "dp", "tp", "cp", "ep" and
# "efsdp" (of the ranks that hold the same experts), where they have more than one rank. With experts and ``tp``, "ep"
# has both dimensions. It returns further options of ``graph_fsdp.compile``, such as ``meshes``.
Parallelize = Callable[[nn.Module, Mapping[str, DeviceMesh]], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Dimensions:
    """Holds the sizes of a mesh's dimensions; see the table above."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, mesh_shape: Mapping[str, int] | Sequence[int] | Dimensions) -> Dimensions:
        """Read ``{name: size}``, ``(ranks that shard,)`` or ``(replicas, ranks that shard)``.

        Raises:
            ValueError: a dimension is not known, or a size no number of ranks.
            MeshError: ``ep`` does not divide the ranks that hold the parameters, or straddles ``cp``.
        """
        if isinstance(mesh_shape, Dimensions):
            return mesh_shape
        if not isinstance(mesh_shape, Mapping):
            given: Any = mesh_shape
            sizes = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
            if len(sizes) not in (1, 2) or not all(map(is_count, sizes)):
                raise ValueError(
                    "mesh_shape must be (ranks that shard,) or (replicas, ranks that shard), each 1 or more, or "
                    f"{{name: size}} of {', '.join(_NAMES)}, got {mesh_shape!r}"
                )
            return cls(dp_replicate=math.prod(sizes[:-1]), dp_shard=sizes[-1])
        for name, size in mesh_shape.items():
            if name not in _NAMES:
                raise ValueError(f"mesh_shape: there is no dimension {name!r}; name some of {', '.join(_NAMES)}")
            if not is_count(size):
                raise ValueError(f"mesh_shape: {name} must be a number of ranks, 1 or more, got {size!r}")
        found = cls(**mesh_shape)
        nests = found.ep % found.cp == 0 or found.cp % found.ep == 0
        if found.shards % found.ep or not nests:
            raise MeshError(
                f"mesh_shape: ep={found.ep} does not nest in dp_shard={found.dp_shard} times cp={found.cp}, whose "
                f"{found.shards} ranks hold all experts; give a divisor of {found.shards} that cp divides, or that "
                "divides cp"
            )
        return found

    @property
    def shards(self) -> int:
        """Return the number of ranks over which parameters are sharded."""
        return self.dp_shard * self.cp

    @property
    def stage_ranks(self) -> int:
        """Return the number of ranks of one stage."""
        return self.dp_replicate * self.shards * self.tp

    @property
    def ranks(self) -> int:
        return self.pp * self.stage_ranks

    @property
    def is_plain(self) -> bool:
        """Say whether there is data parallelism alone."""
        return self.pp == self.cp == self.tp == self.ep == 1

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """Return the ranks of data parallelism as ``(ranks that shard,)`` or ``(replicas, ranks that shard)``."""
        return (self.dp_replicate, self.dp_shard) if self.dp_replicate > 1 else (self.dp_shard,)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the dimensions that have more than one rank."""
        return {name: size for name, size in asdict(self).items() if size > 1}

    def __str__(self) -> str:
        if self.is_plain:
            return "x".join(map(str, self.plain_shape))
        return ",".join(f"{name}={size}" for name, size in self.sizes().items())

    def check_nodes(self, hardware: Hardware) -> None:
        """Refuse groups that straddle nodes unevenly, for which the cost model has no place. Raises MeshError."""
        island, shards = hardware.island, GroupShape(self.shards, self.tp)
        groups = [shards, GroupShape(self.tp), GroupShape(self.cp, self.tp), GroupShape(self.ep, self.tp)]
        even = all(_is_even(group, island) for group in groups)
        if self.ranks > island and (self.ranks % island or not even):
            says = f"mesh_shape: {self} does not divide into nodes of {island} {hardware.name}: give a number of ranks "
            if self.is_plain:
                wanted = "shards that are one too or a divisor of it"
            else:
                wanted = "tp, cp and ep whose ranks fill a part of a node or whole nodes"
            raise MeshError(f"{says}that is a multiple of {island}, and {wanted}")

    def meshes(self, device_type: str) -> dict[str, DeviceMesh]:
        """Make the meshes of one stage, for ``Parallelize``. The default process group has its ranks."""
        names = ("dp_replicate", "dp_shard", "tp")
        data = init_device_mesh(device_type, (self.dp_replicate, self.shards, self.tp), mesh_dim_names=names)
        found = {"dp": data["dp_shard"] if self.dp_replicate == 1 else data[names[:2]]}
        if self.tp > 1:
            found["tp"] = data["tp"]
        if self.cp > 1:
            sizes = (self.dp_replicate * self.dp_shard, self.cp, self.tp)
            found["cp"] = init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "cp", "tp"))["cp"]
        if self.ep > 1:
            around = (self.dp_replicate, self.shards // self.ep, self.ep, self.tp)
            experts = init_device_mesh(device_type, around, mesh_dim_names=("dp_replicate", "efsdp", "ep", "tp"))
            found["ep"] = experts["ep"] if self.tp == 1 else experts["ep", "tp"]
            found["efsdp"] = experts["efsdp"] if self.dp_replicate == 1 else experts["dp_replicate", "efsdp"]
        return found


_NAMES = tuple(Dimensions.__dataclass_fields__)


def named_meshes(given: Any, meshes: Mapping[str, DeviceMesh]) -> Any:
    """Return ``meshes`` of :func:`graph_fsdp.compile`, with the meshes of these names in place of the names.

    Where ranks hold all experts (``ep=1``), "efsdp" is the model's mesh, and one rank has none.

    Raises:
        ValueError: there is no mesh of a name.
    """

    def mesh_of(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        found = meshes.get("dp") if value == "efsdp" and "ep" not in meshes else meshes.get(value)
        if found is None and (meshes or value not in ("dp", "efsdp")):
            known = ", ".join(map(repr, meshes)) or "none"
            raise ValueError(f"meshes: there is no mesh {value!r} on this mesh_shape; there are {known}")
        return found

    if isinstance(given, Mapping):
        found = {key: mesh_of(value) for key, value in given.items()}
        return {key: mesh for key, mesh in found.items() if mesh is not None}
    return (lambda p: mesh_of(given(p))) if callable(given) else given


def _is_even(group: GroupShape, island: int) -> bool:
    """Say whether a group lies on islands alike: in one, one rank on each, or the same number on each."""
    span = group.size * group.stride
    if group.size == 1 or group.stride % island == 0:
        return True
    return island % span == 0 or (span % island == 0 and island % group.stride == 0)
