"""``graph_fsdp.compile(…, backend="xla")``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor

from graph_fsdp import api
from graph_fsdp import options as validate
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.initialise.initial_values import initial_values
from graph_fsdp.initialise.safetensors_files import AnyPath, Safetensors
from graph_fsdp.module.module import become_compiled, original_forward
from graph_fsdp.parameters.extensions import is_extended
from graph_fsdp.parameters.mixed_precision import ModulePolicies
from graph_fsdp.passes import ActivationCheckpointing, PassPipeline, default_pipeline
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.passes.transforms.activation_checkpointing import with_activation_checkpointing
from graph_fsdp.runtime.backends import XlaBackend
from graph_fsdp.runtime.xla.host_fallbacks import OnHostFallback
from graph_fsdp.runtime.xla.placement import read_placement
from graph_fsdp.units import AutoWrapPolicy, find_units, parameter_names
from graph_fsdp.xla import validate as xla_validate
from graph_fsdp.xla.auto import GlobalEngine, ShardOutput, trace_marks, with_constraints
from graph_fsdp.xla.engine import XlaEngine
from graph_fsdp.xla.mesh import XlaMesh
from graph_fsdp.xla.replicas import (
    AmongReplicas,
    ReplicaEngine,
    ReplicaMesh,
    ReplicaStorage,
    check_threads,
    put_replicas_values,
)
from graph_fsdp.xla.storage import XlaStorage

Model = TypeVar("Model", bound=nn.Module)


def compile_on_xla(
    model: Model,
    mesh: Any,
    policies: ModulePolicies,
    *,
    auto_wrap_policy: AutoWrapPolicy | None,
    reshard_after_forward: Any,
    offload_policy: OffloadPolicy,
    ignored_params: Iterable[nn.Parameter | nn.Module] | None,
    shard_placement_fn: Any,
    activation_checkpointing: Any,
    sync_module_states: bool,
    param_init_fn: Callable[[nn.Module], Any] | None,
    checkpoint: Safetensors | AnyPath | Sequence[AnyPath] | None,
    passes: PassPipeline | None,
    regions: str,
    fullgraph: bool,
    dynamic: bool | None,
    on_host_fallback: OnHostFallback,
    sharding: Literal["manual", "auto", "replicas"],
    shard_output: ShardOutput | None,
) -> Model:
    """What ``graph_fsdp.compile`` does after it has checked its arguments, for the devices of an XLA program: of one
    process that drives all of them, so that there is nobody to agree with, or of one replica."""
    replicas, auto = sharding == "replicas", sharding == "auto"
    xla_validate.environment(replicas)
    checkpointing = ActivationCheckpointing.of(activation_checkpointing)
    if regions == "whole":
        raise ValueError("regions='whole': backend='xla' compiles every graph in one piece; leave it out")
    if not fullgraph and sharding == "manual":
        raise UnsupportedError(
            "fullgraph=False: with backend='xla' the graph of one device's rows cannot be left for Python and entered "
            "again; change the line that breaks the graph (fullgraph=True names it), or pass sharding='auto'"
        )
    _refuse(offload_policy, reshard_after_forward, shard_placement_fn, checkpointing, dynamic)
    if replicas and checkpoint is not None:
        raise UnsupportedError(
            "checkpoint: sharding='replicas' reads no files; load the model before graph_fsdp.compile"
        )
    if replicas:
        check_threads(fullgraph)
    parallel, device = (ReplicaMesh if replicas else XlaMesh).of(mesh), compat_xla.device()
    ignored = validate.ignored_parameters(model, ignored_params)
    names = parameter_names(model)
    for p, (name, *_) in names.items():
        if is_extended(p) or isinstance(p, DTensor):
            kind = "a DTensor" if isinstance(p, DTensor) else "a tensor extension"
            raise UnsupportedError(
                f"parameter {name!r} is {kind}, which backend='xla' cannot gather; pass a plain model"
            )
        if p.device.type not in ("cpu", "xla", "meta"):
            raise ValueError(f"parameter {name!r} is on {p.device}; move the model to the CPU or to XLA's device")
        _check_unmarked(name, p, parallel)
    units = find_units(model, auto_wrap_policy, ignored)
    put_values = initial_values(
        model,
        {module for unit in units if unit.parameters for module in unit.modules.values()},
        AmongReplicas(parallel) if isinstance(parallel, ReplicaMesh) and sync_module_states else None,  # type: ignore[arg-type]  # it broadcasts
        torch.device("cpu"),
        sync_module_states=sync_module_states,
        param_init_fn=param_init_fn,
        shard_dims={},
        checkpoint=checkpoint if isinstance(checkpoint, Safetensors | None) else Safetensors(checkpoint),
    )
    pipeline = passes if passes is not None else default_pipeline()
    if checkpointing is not None:
        pipeline = with_activation_checkpointing(pipeline, checkpointing)
    if auto:
        pipeline = with_constraints(pipeline, parallel)
    spec = api._model_spec(units, names, parallel, policies, {})  # type: ignore[arg-type]  # with the groups' names and sizes
    cost = api._cost_model(pipeline, parallel.group_shapes(), device, "xla")
    spec = _named_groups(pipeline.arrange(spec, cost), parallel)
    originals = {p_names[0]: p for p, p_names in names.items() if p_names[0] in spec.parameters}
    storage = (ReplicaStorage if replicas else XlaStorage)(model, spec, originals, names, parallel, device)
    if isinstance(storage, ReplicaStorage):
        put_replicas_values(model, storage, put_values, sync_module_states)
    else:
        put_values(storage)  # type: ignore[arg-type]  # it is filled as an eager one is
    engine = {"manual": XlaEngine, "auto": GlobalEngine, "replicas": ReplicaEngine}[sharding](
        original_forward(model),
        spec,
        storage,
        pipeline,
        XlaBackend(on_host_fallback),
        cost,
        reshard_after_forward=reshard_after_forward,
        fullgraph=fullgraph,
        dynamic=False,
    )
    storage.install(model)
    policies.install(name for unit in units for name in unit.modules)
    if auto:
        trace_marks(model, shard_output, mesh)
    become_compiled(model, engine, policies, units)
    return model


def _check_unmarked(name: str, p: nn.Parameter, mesh: XlaMesh) -> None:
    """A tensor of XLA's that is divided cannot be given another sharding."""
    if p.device.type != "xla":
        return
    (spec,) = compat_xla.sharding_specs([p.detach()])
    if read_placement(spec, mesh.ranks) not in (mesh.sharded, mesh.whole):
        raise ValueError(
            f"parameter {name!r} is sharded as {spec} by mark_sharding; pass the model as it was before that, or "
            "torch_xla.distributed.spmd.clear_sharding each parameter"
        )


def _named_groups(spec: ModelSpec, mesh: XlaMesh) -> ModelSpec:
    return dataclasses.replace(spec, group=mesh.group, replicate_group=mesh.replicate_group, replicas=mesh.replicas)


def _refuse(
    offload_policy: OffloadPolicy,
    reshard_after_forward: Any,
    shard_placement_fn: Any,
    checkpointing: ActivationCheckpointing | None,
    dynamic: bool | None,
) -> None:
    """What XLA devices do not have."""
    if type(offload_policy) is not OffloadPolicy:
        raise UnsupportedError("offload_policy: backend='xla' keeps shards on the devices; leave it out")
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise UnsupportedError(
            f"reshard_after_forward={reshard_after_forward}: with backend='xla' parameters are kept whole or "
            "sharded over all devices; pass True, False, None or 'auto'"
        )
    if shard_placement_fn is not None:
        raise UnsupportedError(
            "shard_placement_fn: with backend='xla' parameters are sharded on dimension 0; leave it out"
        )
    if checkpointing is not None and checkpointing.offload:
        raise UnsupportedError("activation_checkpointing with offload: backend='xla' makes no copies to the CPU")
    if dynamic:
        raise UnsupportedError("dynamic=True: XLA compiles static shapes, a graph for each; pass None or False")
