"""Where a model is compiled for: found and checked before anything of the model is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graph_fsdp import validate
from graph_fsdp.engine.engine import Engine
from graph_fsdp.engine.owned_tensors import check_cuda_graphs
from graph_fsdp.mesh import DataParallelMesh, Mesh, default_device_type, first_ranks_device_type
from graph_fsdp.options import CompileOptions
from graph_fsdp.parameters.extensions import check_extensions
from graph_fsdp.parameters.placements import check_tensor_parallel, shard_dims
from graph_fsdp.parameters.sharded import Shards
from graph_fsdp.parameters.shards import Storage
from graph_fsdp.passes import PassPipeline
from graph_fsdp.runtime.backends import BACKENDS, Backend


@dataclass(frozen=True)
class Place:
    """The devices that share a model, and what keeps its shards and runs it there. ``graph_fsdp/xla/compile.py`` makes
    the one of XLA.

    ``device``: of gathered parameters. ``values_on``: where what is on the meta device is given values, before it is
    sharded. ``shard_dims``: parameter name → the dimension that is sharded, where it is not the first.
    ``before_compiled``: called with the model when nothing can fail any more, before it gets its new class.
    """

    mesh: Mesh | None
    device: torch.device
    values_on: torch.device
    pipeline: PassPipeline
    storage: Callable[..., Shards]
    engine: type[Engine]
    backend: Backend
    whole: bool
    dynamic: bool | None
    shard_dims: Mapping[str, int] = field(default_factory=dict)
    before_compiled: Callable[[nn.Module], None] = lambda model: None


def place_on_ranks(
    model: nn.Module,
    mesh: DeviceMesh | None,
    names: dict[nn.Parameter, list[str]],
    ignored: set[nn.Parameter],
    options: CompileOptions,
) -> Place:
    """The ranks of ``mesh``, for a model with parameters of these names, or this process alone.

    Raises:
        MeshError, UnsupportedError, ValueError, TypeError: the mesh, the options or the parameters do not fit.
    """
    check_extensions(
        {p: p_names for p, p_names in names.items() if p not in ignored},
        offload_policy=options.offloads,
        sync_module_states=options.sync_module_states,
        reshard_after_forward_as_a_number=options.reshards_to_groups,
        regions_whole=options.regions == "whole",
        shard_placement_fn=options.shard_placement_fn is not None,
        checkpoint=options.checkpoint is not None,
    )
    found, device = _find_mesh(mesh, validate.device(model, ignored))
    parallel = DataParallelMesh.of(found) if found is not None else None
    if options.cuda_graphs:
        check_cuda_graphs(options, device)
    fixed_shapes = check_tensor_parallel(names, ignored, parallel, fullgraph=options.fullgraph) or options.cuda_graphs
    return Place(
        mesh=parallel,
        device=device,
        values_on=device,
        pipeline=options.pipeline,
        storage=Storage,
        engine=Engine,
        backend=BACKENDS[options.backend](),
        whole=options.regions == "whole",
        dynamic=False if fixed_shapes and options.dynamic is None else options.dynamic,
        shard_dims=shard_dims(options.shard_placement_fn, names, ignored, parallel),
    )


def _find_mesh(mesh: DeviceMesh | None, device: torch.device | None) -> tuple[DeviceMesh | None, torch.device]:
    """The mesh, and the device of this rank's shards. ``device``: of the model; None if it is on the meta device."""
    if mesh is not None:
        mesh = validate.mesh(mesh, device)
        return mesh, _device_of_type(mesh.device_type, device)
    if not dist.is_initialized() and validate.world_size_of_environment() > 1:
        dist.init_process_group()
    if not dist.is_initialized():
        return None, device if device is not None else _device_of_type(default_device_type())
    device_type = first_ranks_device_type(device)
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    return validate.mesh(mesh, device), _device_of_type(device_type, device)


def _device_of_type(device_type: str, device: torch.device | None = None) -> torch.device:
    """``device`` if it is of this type, else the process's current one of the type."""
    if device is not None and device.type == device_type:
        return device
    return torch.empty(0, device=device_type).device  # with its index
