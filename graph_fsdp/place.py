"""A ``Place`` says where a model is compiled for. It is found and checked before anything of the model is changed."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from graph_fsdp import compat
from graph_fsdp.engine.engine import Engine
from graph_fsdp.errors import AlreadyCompiledError, AlreadyShardedError, MeshError, UnsupportedError
from graph_fsdp.mesh import Mesh, find_mesh
from graph_fsdp.module.build import UNFINISHED
from graph_fsdp.module.module import GraphFSDPModule
from graph_fsdp.module.refusals import Registry
from graph_fsdp.options import CompileOptions
from graph_fsdp.parameters.extensions import check_extended_rows, check_extensions
from graph_fsdp.parameters.meshes import find_meshes, own_meshes
from graph_fsdp.parameters.placements import asked_placements, check_tensor_parallel, shard_dims
from graph_fsdp.parameters.quantized_weights import Quantized, find_quantized, is_quantized
from graph_fsdp.parameters.sharded import Shards
from graph_fsdp.parameters.shards import Storage
from graph_fsdp.passes import PassPipeline
from graph_fsdp.programs.folder import Folder
from graph_fsdp.runtime.backends import BACKENDS, Backend
from graph_fsdp.runtime.ranks.agreement import is_shared
from graph_fsdp.runtime.ranks.failure import RankFailure, raised_instead
from graph_fsdp.runtime.ranks.lockstep import lockstep_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NO_FORWARD = tuple(container.forward for container in (nn.Module, *_CONTAINERS))


@dataclass(frozen=True)
class Place:
    """Holds the devices that share a model and the storage and engine there (XLA's: ``graph_fsdp/xla/compile.py``).

    ``device``: of gathered parameters. ``values_on``: where what is on the meta device is given values, before it is
    sharded. ``shard_dims``: parameter name → the sharded dimension, where it is not the first. ``quantized``: parameter
    name → what is sharded of it. ``before_compiled``: called with the model when nothing can fail any more, before it
    gets its new class.
    """

    mesh: Mesh | None
    device: torch.device
    values_on: torch.device
    pipeline: PassPipeline
    backend: Backend
    whole: bool
    dynamic: bool | None
    storage: Callable[..., Shards] = Storage
    engine: type[Engine] = Engine
    programs: Callable[[], Folder | None] = lambda: None  # where those of earlier starts are kept
    shard_dims: Mapping[str, int] = field(default_factory=dict)
    quantized: Mapping[str, Quantized] = field(default_factory=dict)
    before_compiled: Callable[[nn.Module], None] = lambda model: None


def place_on_ranks(
    model: nn.Module,
    mesh: DeviceMesh | None,
    names: dict[nn.Parameter, list[str]],
    ignored: set[nn.Parameter],
    options: CompileOptions,
) -> Place:
    """Return the place of a model with parameters of these names: the ranks of ``mesh``, or this process alone.

    Raises:
        MeshError, UnsupportedError, ValueError, TypeError: the mesh, the options or the parameters do not fit.
    """
    check_parameters(names, ignored)
    of_no_plain_parameters = {
        "sync_module_states": options.sync_module_states,
        "shard_placement_fn": options.shard_placement_fn is not None,
        "checkpoint": options.checkpoint is not None,
    }
    check_extensions(
        {p: p_names for p, p_names in names.items() if p not in ignored and not is_quantized(p)},
        **{
            f"reshard_after_forward={options.reshard_after_forward}": options.reshards_to_groups,
            "regions='whole'": options.regions == "whole",
        },
    )
    placements, meshes = asked_placements(options.shard_placement_fn, names, ignored)
    given = find_meshes(options.meshes, model, names, ignored)
    if twice := sorted(given.keys() & meshes.keys()):
        raise ValueError(f"meshes and shard_placement_fn both give parameter {twice[0]!r} a mesh; leave one out")
    parallel, device = find_mesh(mesh, _device_of(model, ignored), options.dp_mesh_dims)
    if own := own_meshes({**given, **meshes}, parallel):
        assert parallel is not None
        options.check_meshes()
        parallel = dataclasses.replace(parallel, own=own)
    if options.cuda_graphs:
        options.check_cuda_graphs(device)
    fixed_shapes = check_tensor_parallel(names, ignored, parallel) or options.cuda_graphs
    dims = shard_dims(placements, names, parallel)
    check_extended_rows(dims, names)
    return Place(
        mesh=parallel,
        device=device,
        values_on=device,
        pipeline=options.pipeline,
        backend=BACKENDS[options.backend](),
        whole=options.regions == "whole",
        dynamic=False if fixed_shapes and options.dynamic is None else options.dynamic,
        programs=options.kept_programs(),
        shard_dims=dims,
        quantized=find_quantized(names, ignored, device, **of_no_plain_parameters),
    )


def failures_told(mesh: Any, dims: Any) -> contextlib.AbstractContextManager[None]:
    """Tell the other ranks of ``mesh``, which may wait for this one in ``compile``, if the body raises. ``dims`` as in
    ``find_mesh``."""

    def cause_of(error: BaseException) -> RankFailure | None:
        ranks = _ranks_of(mesh, dims) if dist.is_initialized() else ()
        return lockstep_of(ranks).failed_outside(error, "graph_fsdp.compile") if is_shared(ranks) else None

    return raised_instead(cause_of)


def _ranks_of(mesh: Any, dims: Any) -> tuple[int, ...]:
    """Return the ranks that share a model on ``mesh``; none where it is no mesh, or not one of this rank."""
    if mesh is None:
        return tuple(range(dist.get_world_size()))
    try:
        found, _ = find_mesh(mesh, None, dims)
    except (MeshError, TypeError, ValueError, RuntimeError):
        return ()
    return found.ranks if found is not None else ()


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"its submodule {name!r}" if name else "model"
        if UNFINISHED in vars(module):
            raise AlreadyCompiledError(
                f"{where} was being changed by graph_fsdp.compile when Ctrl-C or an error ended that, and is sharded "
                "in part; build it again"
            )
        if isinstance(module, GraphFSDPModule):
            raise AlreadyCompiledError(f"{where} was compiled by graph_fsdp before; compile a model once")
        registry = vars(module).get(compat.APPLIED)
        if isinstance(registry, Registry) and registry.has_shards:
            raise AlreadyCompiledError(
                f"{where} was compiled by graph_fsdp before, as a part of another model; compile a model once"
            )
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            kind = "FSDP2 (fully_shard)" if isinstance(module, FSDPModule) else "FSDP1 (FullyShardedDataParallel)"
            raise AlreadyShardedError(f"{where} is sharded by {kind} already; pass the model as it was before that")
        if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
            raise AlreadyShardedError(f"{where} is wrapped in {type(module).__name__}; pass {where}.module instead")
        if isinstance(module, (torch.jit.ScriptModule, compat.OptimizedModule)):
            raise UnsupportedError(f"{where} is a {type(module).__name__}; pass the module that it was made of")
    if isinstance(model, _CONTAINERS) and type(model).forward in _NO_FORWARD:
        raise ValueError(
            f"model: {type(model).__name__} only holds others and has no forward, so there is nothing to compile; "
            "pass the module whose forward uses it, or each of its modules that is called by itself"
        )
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet (a lazy module); run the model once before compile")


def ignored_parameters(model: nn.Module, ignored: Iterable[nn.Parameter | nn.Module] | None) -> set[nn.Parameter]:
    """Return the given parameters, and those of the given modules."""
    parameters, modules = set(model.parameters()), set(model.modules())
    if isinstance(ignored, (torch.Tensor, nn.Module)):
        kind = "Parameter" if isinstance(ignored, torch.Tensor) else f"module ({type(ignored).__name__})"
        raise TypeError(
            f"ignored_params must be a list or set of parameters and modules, got one {kind}; put it in a list"
        )
    if ignored is not None and not isinstance(ignored, Iterable):
        raise TypeError(f"ignored_params must be a list or set of parameters and modules, or None, got {ignored!r}")
    found: set[nn.Parameter] = set()
    for p in ignored if ignored is not None else ():
        if isinstance(p, nn.Module):
            if p not in modules:
                raise ValueError(
                    f"ignored_params holds a module ({type(p).__name__}) that is no submodule of model; leave it out"
                )
            found.update(p.parameters())
            continue
        if not isinstance(p, nn.Parameter):
            raise TypeError(f"ignored_params holds {p!r}, a {type(p).__name__}; give parameters and modules of model")
        if p not in parameters:
            raise ValueError(
                f"ignored_params holds a tensor of shape {tuple(p.shape)} that is no parameter of model; leave it out"
            )
        found.add(p)
    if found and found == parameters:
        raise ValueError("ignored_params holds every parameter of model, so there is nothing to shard; leave some out")
    return found


def check_gradients(names: Mapping[nn.Parameter, list[str]], ignored: set[nn.Parameter]) -> None:
    for p, (name, *_) in names.items():
        if p.grad is not None and p not in ignored:
            raise ValueError(
                f"parameter {name!r} has a gradient, which sharding would lose; call model.zero_grad() before compile"
            )


def check_parameters(names: Mapping[nn.Parameter, list[str]], ignored: set[nn.Parameter]) -> None:
    """Raise UnsupportedError for what cannot be sharded, and warn of what FSDP2 loses without a word."""
    sharded = {p: name for p, (name, *_) in names.items() if p not in ignored}
    for p, name in sharded.items():
        if p.layout is not torch.strided:
            raise UnsupportedError(
                f"parameter {name!r} has the layout {p.layout}, which has no rows to shard; make it dense, or put it "
                "into ignored_params"
            )
        if compat.has_hooks(p):
            warnings.warn(
                f"parameter {name!r} has hooks (register_hook, register_post_accumulate_grad_hook), which sharding "
                "loses; register them on the parameters that the model has after graph_fsdp.compile",
                stacklevel=5,
            )
    end, last = 0, ""
    for begin, after, name in sorted(_extents(sharded)):
        if begin < end:
            warnings.warn(
                f"parameters {last!r} and {name!r} have memory in common, and each gets shards of its own, which do "
                "not follow each other any more; to tie them, make them one nn.Parameter before graph_fsdp.compile",
                stacklevel=5,
            )
        end, last = max((end, last), (after, name))


def _extents(parameters: Mapping[nn.Parameter, str]) -> Iterator[tuple[int, int, str]]:
    """Yield where dense parameters begin and end in memory, and their names."""
    for p, name in parameters.items():
        dense = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)) == p.numel()
        if type(p) is nn.Parameter and not p.is_meta and dense and compat.has_memory(p) and p.numel():
            yield p.data_ptr(), p.data_ptr() + p.nbytes, name


def _device_of(model: nn.Module, ignored: set[nn.Parameter]) -> torch.device | None:
    """Return the device of parameters with values, or of buffers where there are no parameters; None if none has."""
    devices: dict[torch.device, str] = {}
    has_parameters = next(model.parameters(), None) is not None
    for name, p in model.named_parameters() if has_parameters else model.named_buffers():
        if p not in ignored and not p.is_meta:
            devices.setdefault(p.device, name)
    if len(devices) > 1:
        found = ", ".join(f"{name!r} on {d}" for d, name in devices.items())
        raise ValueError(f"model: parameters are on several devices ({found}); move the model to one device")
    return next(iter(devices), None)
