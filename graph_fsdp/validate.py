"""Bad models and meshes: one clear error each, before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from graph_fsdp import compat
from graph_fsdp.errors import AlreadyCompiledError, AlreadyShardedError, MeshError, UnsupportedError
from graph_fsdp.mesh import data_parallel_slice
from graph_fsdp.module.module import GraphFSDPModule

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NO_FORWARD = tuple(container.forward for container in (nn.Module, *_CONTAINERS))
_TORCHRUN = "torchrun --nproc-per-node N script.py"


def torch_version(version: str) -> None:
    try:
        compat.check_torch_version(version)
    except ImportError as error:
        raise UnsupportedError(str(error)) from None


def model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"its submodule {name!r}" if name else "model"
        if isinstance(module, GraphFSDPModule):
            raise AlreadyCompiledError(f"{where} was compiled by graph_fsdp before; compile a model once")
        if isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            kind = "FSDP2 (fully_shard)" if isinstance(module, FSDPModule) else "FSDP1 (FullyShardedDataParallel)"
            raise AlreadyShardedError(f"{where} is sharded by {kind} already; pass the model as it was before that")
        if isinstance(module, DistributedDataParallel):
            raise AlreadyShardedError(f"{where} is wrapped in DistributedDataParallel; pass {where}.module instead")
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
        if p.grad is not None:
            raise ValueError(
                f"parameter {name!r} has a gradient, which sharding would lose; call model.zero_grad() before compile"
            )


def ignored_parameters(model: nn.Module, ignored: Iterable[nn.Parameter | nn.Module] | None) -> set[nn.Parameter]:
    """Those that are given, and those of the modules that are."""
    parameters, modules = set(model.parameters()), set(model.modules())
    if isinstance(ignored, (torch.Tensor, nn.Module)):
        kind = "Parameter" if isinstance(ignored, torch.Tensor) else f"module ({type(ignored).__name__})"
        raise TypeError(
            f"ignored_params must be a list or set of parameters and modules, got one {kind}; put it in a list"
        )
    found: set[nn.Parameter] = set()
    for p in ignored if ignored is not None else ():
        if isinstance(p, nn.Module):
            if p not in modules:
                raise ValueError(f"ignored_params holds a module ({type(p).__name__}) that is no submodule of model")
            found.update(p.parameters())
            continue
        if not isinstance(p, nn.Parameter):
            raise TypeError(f"ignored_params holds {p!r}, neither a parameter nor a module but a {type(p).__name__}")
        if p not in parameters:
            raise ValueError(f"ignored_params holds a tensor of shape {tuple(p.shape)} that is no parameter of model")
        found.add(p)
    if found and found == parameters:
        raise ValueError("ignored_params holds every parameter of model, so there is nothing to shard")
    return found


def device(model: nn.Module, ignored: set[nn.Parameter]) -> torch.device | None:
    """Of the parameters that have values, or of buffers where there are no parameters; None if none has any."""
    devices: dict[torch.device, str] = {}
    has_parameters = next(model.parameters(), None) is not None
    for name, p in model.named_parameters() if has_parameters else model.named_buffers():
        if p not in ignored and not p.is_meta:
            devices.setdefault(p.device, name)
    if len(devices) > 1:
        found = ", ".join(f"{name!r} on {d}" for d, name in devices.items())
        raise ValueError(f"model: parameters are on several devices ({found}); move the model to one device")
    return next(iter(devices), None)


def mesh(mesh: Any, device: torch.device | None) -> DeviceMesh:
    """The mesh, or the slice of it that is for data parallelism."""
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
    return data_parallel_slice(mesh)


def world_size_of_environment() -> int:
    """Ranks that torchrun started this process with; 1 without a launcher.

    A launcher that set no rendezvous (SLURM) is an error: each process would train a model of its own.
    """
    found = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))
    if not found.isdigit():
        raise MeshError(f"the environment variable WORLD_SIZE (or SLURM_NTASKS) is {found!r}, not a number of ranks")
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
