"""Some parameters have a mesh of their own: experts, which other ranks hold others of, are sharded over fewer ranks.

[Note: a batch has one size]
The model's mesh has the ranks that share a batch, and a mesh of its own some of these. Gradients are summed over a
parameter's own mesh and divided by the ranks of the model's, as those of all other parameters: on a rank's experts lie
tokens of all ranks that it exchanges tokens with, and each rank's loss is the mean of its part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graph_fsdp.errors import MeshError
from graph_fsdp.mesh import DataParallelMesh, check_mesh
from graph_fsdp.passes.ir.settings import check_signature

Meshes: TypeAlias = Mapping[type[nn.Module] | nn.Module, DeviceMesh] | Callable[[nn.Parameter], DeviceMesh | None]


def find_meshes(
    meshes: Meshes | None,
    model: nn.Module,
    names: Mapping[nn.Parameter, Sequence[str]],
    ignored: Collection[nn.Parameter],
) -> dict[str, DeviceMesh]:
    """Return canonical name of a parameter → the mesh that ``meshes`` gives it.

    Raises:
        TypeError, ValueError: ``meshes`` names what is no module of ``model``, or gives a parameter two meshes.
    """
    if meshes is None:
        return {}
    if callable(meshes):
        check_signature("meshes", meshes, "pass a function of a parameter that returns its mesh or None", "parameter")
        asked = {name: meshes(p) for p, (name, *_) in names.items() if p not in ignored}
        return {name: mesh for name, mesh in asked.items() if mesh is not None}
    if not isinstance(meshes, Mapping):
        raise TypeError(
            "meshes must be a dict from classes or modules of the model to a mesh, or a function from a parameter to a "
            f"mesh or None, got {meshes!r}"
        )
    found: dict[str, DeviceMesh] = {}
    modules = dict(model.named_modules())
    for key, mesh in meshes.items():
        is_class = isinstance(key, type) and issubclass(key, nn.Module)
        if not is_class and not isinstance(key, nn.Module):
            raise TypeError(f"meshes: {key!r} is neither a class of modules nor a module; give one of these a mesh")
        chosen = {path: m for path, m in modules.items() if (isinstance(m, key) if isinstance(key, type) else m is key)}
        if not chosen:
            what = key.__name__ if isinstance(key, type) else type(key).__name__
            raise ValueError(f"meshes: the model has no module {what}; name a class or a module that it has")
        for p in (p for module in chosen.values() for p in module.parameters()):
            if p in ignored or p not in names:
                continue
            name = names[p][0]
            if found.setdefault(name, mesh) != mesh:
                raise ValueError(
                    f"meshes: parameter {name!r} has two meshes, {found[name]} and {mesh}; name modules of which none "
                    "is in another, nor shares a parameter with it"
                )
    return found


def own_meshes(
    found: Mapping[str, DeviceMesh | DataParallelMesh], mesh: DataParallelMesh | None
) -> dict[str, DataParallelMesh]:
    """Return the meshes that are others than the model's ``mesh``.

    Raises:
        TypeError, MeshError: one is no mesh, or has ranks that the model's has not.
    """
    own: dict[str, DataParallelMesh] = {}
    for name, given in found.items():
        if not isinstance(given, DeviceMesh | DataParallelMesh):
            raise TypeError(f"meshes: parameter {name!r} must have a DeviceMesh, got {given!r}")
        if mesh is None:
            raise MeshError(
                f"meshes: parameter {name!r} has a mesh of its own and the model none; pass mesh=, with all ranks that "
                "share a batch"
            )
        if isinstance(given, DeviceMesh):
            check_mesh(given, None)
            given = DataParallelMesh.of(given)
        others = sorted(set(given.ranks) - set(mesh.ranks))
        if others or given.mesh.device_type != mesh.mesh.device_type:
            raise MeshError(
                f"meshes: parameter {name!r} is on the ranks {list(given.ranks)} of type {given.mesh.device_type!r}, "
                f"and the model on {list(mesh.ranks)} of type {mesh.mesh.device_type!r}; give it ranks of the model's "
                "mesh, which has all that share a batch"
            )
        if given != mesh:
            own[name] = given
    return own
