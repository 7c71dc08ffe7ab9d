"""``graph_fsdp.compile(…, backend="xla")`` chooses the devices and the engine here, and refuses bad input, with one
clear error each, before anything is changed (for meshes in ``mesh.py``)."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.errors import MeshError, UnsupportedError
from graph_fsdp.mesh import world_size_of_environment
from graph_fsdp.options import CompileOptions
from graph_fsdp.parameters.extensions import is_extended
from graph_fsdp.place import Place
from graph_fsdp.runtime.backends import XlaBackend
from graph_fsdp.runtime.xla.program import are_threads
from graph_fsdp.xla.auto import GlobalEngine, trace_marks, with_constraints
from graph_fsdp.xla.engine import LocalEngine
from graph_fsdp.xla.mesh import XlaMesh
from graph_fsdp.xla.replicas import ReplicaEngine, ReplicaMesh, ReplicaStorage
from graph_fsdp.xla.storage import XlaStorage

_TESTED_PAIR = "torch==2.9.1 torch_xla==2.9.0"


def place_on_xla(mesh: Any, names: dict[nn.Parameter, list[str]], options: CompileOptions) -> Place:
    """Return the devices of an XLA program, for a model with parameters of these names: those of one process that
    drives all of them, so that there is nobody to agree with, or that of one replica.

    Raises:
        MeshError, UnsupportedError, ValueError, TypeError: this process, the options or the parameters do not fit.
    """
    if options.cuda_graphs:
        options.check_cuda_graphs(torch.device("xla"))
    replicas = options.sharding == "replicas"
    check_environment(replicas)
    check_options(options)
    found = (ReplicaMesh if replicas else XlaMesh).of(mesh)
    check_parameters(names, found)
    place = Place(
        mesh=found,
        device=compat_xla.device(),
        values_on=torch.device("cpu"),
        pipeline=options.pipeline,
        storage=ReplicaStorage if replicas else XlaStorage,
        engine=ReplicaEngine if replicas else LocalEngine,
        backend=XlaBackend(options.on_host_fallback),
        whole=True,
        dynamic=False,
    )
    if options.sharding != "auto":
        return place
    return dataclasses.replace(
        place,
        pipeline=with_constraints(options.pipeline, found),
        engine=GlobalEngine,
        before_compiled=functools.partial(trace_marks, shard_output=options.shard_output, mesh=mesh),
    )


def check_environment(replicas: bool) -> None:
    """Check that this process can run the backend; with ``replicas``, as one of several that have a device each.

    Raises:
        UnsupportedError: torch_xla is missing, of another release than torch, or SPMD is off, or on for replicas.
        MeshError: torch.distributed, or a launcher, counts other processes than XLA; or this one is no replica.
    """
    installed = next((found.version for found in importlib.metadata.distributions(name="torch_xla")), None)
    check_versions(torch.__version__, installed)
    if compat_xla.runtime().is_spmd() == replicas:
        raise UnsupportedError(_SPMD_IS_ON if replicas else _SPMD_IS_OFF)
    launched = dist.get_world_size() if dist.is_initialized() else world_size_of_environment()
    if not replicas:
        check_world_sizes(launched, compat_xla.runtime().process_count())
        return
    found, devices = compat_xla.runtime().world_size(), compat_xla.runtime().global_runtime_device_count()
    if dist.is_initialized() or launched > 1:
        check_world_sizes(launched, found, replicas=True)
    if found != devices:
        raise MeshError(
            f"mesh: XLA has {devices} devices, and this process is no replica of theirs but a world of {found}; with "
            "sharding='replicas' start the training with torch_xla.launch(function), which calls it for each device"
        )


_SPMD_IS_OFF = (
    "backend='xla' has one process run all devices of its host, for which SPMD must be on; call "
    "torch_xla.runtime.use_spmd() at the start of the program, before anything is on the device; or pass "
    "sharding='replicas' in each of the processes that torch_xla.launch starts, one per device"
)
_SPMD_IS_ON = (
    "sharding='replicas' has one process run one device, and SPMD is on, with which one process runs all devices of "
    "its host; leave out torch_xla.runtime.use_spmd(), or pass sharding='manual'"
)


def check_versions(torch_version: str, xla_version: str | None) -> None:
    """Check that torch_xla is of torch's own release, whose symbols it has compiled in."""
    if xla_version is not None and compat.release(xla_version) == compat.release(torch_version):
        return
    found = "is not installed" if xla_version is None else f"is {xla_version}"
    raise UnsupportedError(
        f"backend='xla' needs torch_xla of torch's own release; torch is {torch_version} and torch_xla {found}. "
        f"Install a pair of one release, such as: pip install {_TESTED_PAIR}"
    )


def check_world_sizes(launched: int, found: int, replicas: bool = False) -> None:
    """Check that as many processes were ``launched`` (of torch.distributed, or by a launcher) as XLA has ``found``."""
    if launched == found:
        return
    of_xla, cure = (f"{found} replicas", _ONE_PER_DEVICE) if replicas else (f"{found}", _ONE_PER_HOST)
    raise MeshError(
        f"mesh: torch.distributed (or the launcher) counts {launched} processes and XLA {of_xla}, so they would not "
        f"train one model together; {cure}"
    )


_ONE_PER_HOST = (
    "start one process per host, which has all of its devices (on XLA's CPU client: python without torchrun, and "
    "CPU_NUM_DEVICES devices)"
)
_ONE_PER_DEVICE = (
    "start one process per device that XLA knows of: torch_xla.launch(function), or torchrun on TPU hosts (on XLA's "
    "CPU client each process of torchrun is a world of its own)"
)


def check_options(options: CompileOptions) -> None:
    """Refuse options that XLA devices do not have."""
    replicas = options.sharding == "replicas"
    if options.regions == "whole":
        raise ValueError("regions='whole': backend='xla' compiles every graph in one piece; leave it out")
    refused = (
        (
            not options.fullgraph and options.sharding == "manual",
            "fullgraph=False: with backend='xla' the graph of one device's rows cannot be left for Python and entered "
            "again; change the line that breaks the graph (fullgraph=True names it), or pass sharding='auto'",
        ),
        (
            not options.fullgraph and replicas and are_threads(),
            "fullgraph=False with sharding='replicas': the replicas of this process are threads, which take turns to "
            "trace, and a piece of a graph would wait in its turn for the others; leave fullgraph out, or start one "
            "process per device",
        ),
        (options.offloads, "offload_policy: backend='xla' keeps shards on the devices; leave it out"),
        (
            options.reshards_to_groups,
            f"reshard_after_forward={options.reshard_after_forward}: with backend='xla' parameters are kept whole or "
            "sharded over all devices; pass True, False, None or 'auto'",
        ),
        (
            options.shard_placement_fn is not None,
            "shard_placement_fn: with backend='xla' parameters are sharded on dimension 0; leave it out",
        ),
        (
            options.checkpointing is not None and options.checkpointing.offload,
            "activation_checkpointing with offload: backend='xla' makes no copies to the CPU",
        ),
        (options.dynamic, "dynamic=True: XLA compiles static shapes, a graph for each; pass None or False"),
        (
            replicas and options.checkpoint is not None,
            "checkpoint: sharding='replicas' reads no files; load the model before graph_fsdp.compile",
        ),
    )
    for is_given, message in refused:
        if is_given:
            raise UnsupportedError(message)


def check_parameters(names: Mapping[nn.Parameter, list[str]], mesh: XlaMesh) -> None:
    """Check that parameters are plain ones, and not divided yet: XLA cannot give a tensor another sharding."""
    for p, (name, *_) in names.items():
        wrapper: bool = compat.is_traceable_wrapper_subclass(p)
        if is_extended(p) or wrapper:
            kind = "a DTensor" if isinstance(p, DTensor) else f"a {type(p).__name__}"
            raise UnsupportedError(
                f"parameter {name!r} is {kind}, which backend='xla' cannot gather; pass a plain model"
            )
        if p.dtype is torch.complex128:
            raise UnsupportedError(
                f"parameter {name!r} is complex128, whose imaginary part torch_xla drops in all that it computes; make "
                "it complex64 before graph_fsdp.compile"
            )
        if p.device.type not in ("cpu", "xla", "meta"):
            raise ValueError(f"parameter {name!r} is on {p.device}; move the model to the CPU or to XLA's device")
        if p.device.type == "xla" and mesh.placements([p.detach()])[0] not in (mesh.sharded, mesh.whole):
            raise ValueError(
                f"parameter {name!r} is sharded as {compat_xla.sharding_specs([p.detach()])[0]} by mark_sharding; pass "
                "the model as it was before that, or torch_xla.distributed.spmd.clear_sharding each parameter"
            )
