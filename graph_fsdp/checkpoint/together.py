"""Ranks go through an export or an import together, part by part, and none waits for one that has raised.

Each part is begun as a program is: ranks that do something else there get a ``RankDisagreement``, and a rank that
raises says so in the store. Before the collectives of a part, which torch waits for without looking there, ranks meet
in one that is waited for as a program's are: it does not end where another rank has raised, and then the others raise a
``RankFailure`` that names it. It is the only one that a missing rank can keep waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.parameters.gradient_norm import groups_sharding
from graph_fsdp.passes.ir.settings import is_count
from graph_fsdp.runtime.ranks import lockstep

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


def mesh_of_all(engine: Engine) -> Any:
    """Return the mesh of all ranks that hold parts of a model: of a tensor-parallel one more than share a batch, in one
    mesh with these; None where it is one process. Raises UnsupportedError where no parameter's mesh has all of them."""
    mesh: Any = engine.storage.mesh
    if not isinstance(mesh, DataParallelMesh):
        return mesh
    shards = [p.shard for p in engine.storage.parameters.values()]
    meshes = [mesh.mesh, *(shard.device_mesh for shard in shards if isinstance(shard, DTensor))]
    widest = max(dict.fromkeys(meshes), key=DeviceMesh.size)
    held = {rank for each in dict.fromkeys(meshes) for rank in each.mesh.flatten().tolist()}
    if widest.size() < len(held):
        raise UnsupportedError(
            f"model: its parameters are on {len(held)} ranks, and the largest mesh of one, {widest}, has "
            f"{widest.size()}; make a DTensor of each parameter on a mesh with all of them, or use "
            "graph_fsdp.checkpoint.save and load"
        )
    return mesh if widest.size() == len(mesh.ranks) else DataParallelMesh(widest, None, None)


def check_rank(mesh: DataParallelMesh | None, rank: Any) -> None:
    """Raise ValueError if ``rank`` is neither a global rank of the mesh nor None."""
    ranks = (0,) if mesh is None else mesh.ranks
    if rank is not None and (not is_count(rank, least=0) or rank not in ranks):
        raise ValueError(f"rank must be a global rank of the model's mesh, {ranks[0]} to {ranks[-1]}, got {rank!r}")


@contextlib.contextmanager
def in_step(engine: Engine, call: str, what: Sequence[str]) -> Iterator[None]:
    """Begin a part of ``call``, about the tensors ``what``, when all ranks are about to, and tell them if it raises."""
    engine.schedules.begin(call, "call", what)
    with engine.schedules.telling():
        yield


def groups_of(tensors: Iterable[Tensor]) -> list[str]:
    """Return the names of the process groups that shard some tensors, in an order that all ranks have."""
    return list(dict.fromkeys(name for tensor in tensors for name in groups_sharding(tensor)))


def meet(groups: Iterable[str], device: torch.device) -> None:
    """Wait until all ranks of each group have come here."""
    for name in groups:
        work = dist.all_reduce(torch.zeros(1, device=device), group=compat.resolve_group(name), async_op=True)
        lockstep.finish(work, device)
