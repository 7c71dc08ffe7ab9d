"""Bad input: one clear error each, before anything is changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, OffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from graph_fsdp import compat
from graph_fsdp.errors import AlreadyCompiledError, AlreadyShardedError, MeshError, UnsupportedError
from graph_fsdp.mesh_names import data_parallel_slice
from graph_fsdp.module.module import GraphFSDPModule
from graph_fsdp.passes import ActivationCheckpointing, PassPipeline
from graph_fsdp.passes.ir.spec import Offload
from graph_fsdp.passes.transforms.activation_checkpointing import with_activation_checkpointing
from graph_fsdp.runtime.backends import BACKENDS

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


def sharding(sharding: object, shard_output: object, backend: str) -> None:
    """Who divides a graph among XLA's devices."""
    if sharding not in ("manual", "auto", "replicas"):
        raise ValueError(f"sharding must be 'manual', 'auto' or 'replicas', got {sharding!r}")
    if sharding == "replicas" and backend != "xla":
        raise ValueError(
            f"sharding='replicas' is for one process per XLA device and takes backend='xla'; backend is {backend!r}, "
            "which always has one process per device: leave sharding out"
        )
    if sharding == "auto" and backend != "xla":
        raise ValueError(f"sharding='auto' lets XLA divide the model and takes backend='xla'; backend is {backend!r}")
    if shard_output is not None and sharding != "auto":
        raise ValueError("shard_output says how XLA divides outputs, and takes backend='xla' and sharding='auto'")
    if shard_output is not None and not callable(shard_output):
        raise TypeError(f"shard_output must be a function of the output and the mesh, got {shard_output!r}")


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


def reshard_size(value: Any, world_size: int) -> tuple[Any, int]:
    """``reshard_after_forward`` without its numbers, and the size of the groups that parameters are resharded to; 0
    for no such groups. ``world_size``: of the dimension that shards. The rules are FSDP2's."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value, 0
    if value < 1 or value > world_size or world_size % value:
        possible = "".join(f"{n}, " for n in range(2, world_size) if world_size % n == 0)
        raise ValueError(
            f"reshard_after_forward={value} is a number of ranks that has to divide the {world_size} that parameters "
            f"are sharded over; pass {possible}True or False"
        )
    if value == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps every parameter whole after forward, as False does; pass True to gather "
            "parameters again in backward",
            stacklevel=3,
        )
        return False, 0
    return (True, 0) if value == world_size else (True, value)


def offloaded_from(device: torch.device, checkpointing: ActivationCheckpointing) -> None:
    if checkpointing.offload and device.type == "cpu":
        warnings.warn(
            "activation_checkpointing: activations are offloaded to the CPU's memory, and the model is on the CPU: the "
            "copies save nothing there",
            stacklevel=3,
        )


def options(
    *,
    reshard_after_forward: Any,
    offload_policy: Any,
    activation_checkpointing: Any,
    sync_module_states: Any,
    param_init_fn: Any,
    passes: Any,
    backend: Any,
    regions: Any,
) -> None:
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} does not exist; there are {', '.join(map(repr, sorted(BACKENDS)))}")
    if regions not in ("cut", "whole"):
        raise ValueError(f"regions must be 'cut' or 'whole', got {regions!r}")
    if regions == "whole" and not BACKENDS[backend].compiles_whole:
        able = ", ".join(repr(name) for name, b in sorted(BACKENDS.items()) if b.compiles_whole)
        raise ValueError(
            f"regions='whole' has a graph compiled in one piece, and backend {backend!r} runs it operator by operator; "
            f"leave regions out, or pass backend={able}"
        )
    if passes is not None and not isinstance(passes, PassPipeline):
        raise TypeError(f"passes must be a PassPipeline (see graph_fsdp.passes.default_pipeline), got {passes!r}")
    if not isinstance(reshard_after_forward, (bool, int, type(None))) and reshard_after_forward != "auto":
        raise TypeError(
            "reshard_after_forward must be True, False, None, 'auto' or a number of ranks, got "
            f"{reshard_after_forward!r}"
        )
    if reshard_after_forward == "auto" and not any(getattr(p, "budget", None) for p in passes or ()):
        raise ValueError(
            "reshard_after_forward='auto' keeps what a budget of gathered bytes has room for, and there is none; pass "
            "passes=graph_fsdp.passes.default_pipeline(budget=…) with a number of bytes"
        )
    _offload_policy(offload_policy, regions)
    checkpointing = ActivationCheckpointing.of(activation_checkpointing)
    if checkpointing is not None and passes is not None:
        with_activation_checkpointing(passes, checkpointing)
    if checkpointing is not None and checkpointing.offload and regions == "whole":
        raise ValueError(
            "activation_checkpointing with offload copies activations between compiled pieces, and regions='whole' "
            "compiles a graph in one; leave regions out"
        )
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(f"param_init_fn must be a function that initialises a module, or None, got {param_init_fn!r}")
    if param_init_fn is not None and sync_module_states:
        raise ValueError(
            "param_init_fn would never be called: sync_module_states=True gives every rank the values of the mesh's "
            "first rank; leave one of the two out"
        )


def _offload_policy(policy: Any, regions: Any) -> None:
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(
            "offload_policy must be torch.distributed.fsdp's OffloadPolicy() or CPUOffloadPolicy(pin_memory=…), got "
            f"{policy!r}"
        )
    if type(policy) not in (OffloadPolicy, CPUOffloadPolicy):
        raise UnsupportedError(
            f"offload_policy is a {type(policy).__name__}, of which only its author knows what it does; pass "
            "OffloadPolicy() or CPUOffloadPolicy(pin_memory=…)"
        )
    if regions == "whole" and isinstance(policy, CPUOffloadPolicy):
        raise UnsupportedError(
            "offload_policy=CPUOffloadPolicy() has copies run between regions, and regions='whole' leaves no place "
            "between them; leave one of the two out"
        )


def offload(policy: OffloadPolicy, device: torch.device) -> Offload | None:
    """What ``offload_policy`` asks for, of a model that computes on ``device``."""
    if not isinstance(policy, CPUOffloadPolicy):
        return None
    if device.type == "cpu":
        warnings.warn(
            "offload_policy=CPUOffloadPolicy(): the model computes on the CPU, where its shards are anyway; they are "
            "copied before each gather and gradients after each reduction all the same, which saves no memory. "
            "Nothing is pinned",
            stacklevel=3,
        )
    return Offload(device, policy.pin_memory and device.type != "cpu")
