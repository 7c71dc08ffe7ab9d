"""``graph_fsdp.compile(…, backend="xla")``."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graph_fsdp import validate
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.engine.owned_tensors import check_cuda_graphs
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.initialise.initial_values import initial_values
from graph_fsdp.model_spec import cost_model, model_spec
from graph_fsdp.module.module import become_compiled, original_forward
from graph_fsdp.options import CompileOptions
from graph_fsdp.parameters.extensions import is_extended
from graph_fsdp.parameters.mixed_precision import find_policies
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.runtime.backends import XlaBackend
from graph_fsdp.runtime.xla.placement import read_placement
from graph_fsdp.units import find_units, parameter_names
from graph_fsdp.xla import validate as xla_validate
from graph_fsdp.xla.auto import GlobalEngine, trace_marks, with_constraints
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


def compile_on_xla(model: Model, mesh: Any, options: CompileOptions) -> Model:
    """What ``graph_fsdp.compile`` does after it has checked its arguments, for the devices of an XLA program: of one
    process that drives all of them, so that there is nobody to agree with, or of one replica."""
    policies = find_policies(model, options.mp_policy)
    if options.cuda_graphs:
        check_cuda_graphs(options, torch.device("xla"))
    replicas, auto = options.sharding == "replicas", options.sharding == "auto"
    xla_validate.environment(replicas)
    if options.regions == "whole":
        raise ValueError("regions='whole': backend='xla' compiles every graph in one piece; leave it out")
    if not options.fullgraph and options.sharding == "manual":
        raise UnsupportedError(
            "fullgraph=False: with backend='xla' the graph of one device's rows cannot be left for Python and entered "
            "again; change the line that breaks the graph (fullgraph=True names it), or pass sharding='auto'"
        )
    _refuse(options)
    if replicas and options.checkpoint is not None:
        raise UnsupportedError(
            "checkpoint: sharding='replicas' reads no files; load the model before graph_fsdp.compile"
        )
    if replicas:
        check_threads(options.fullgraph)
    parallel, device = (ReplicaMesh if replicas else XlaMesh).of(mesh), compat_xla.device()
    ignored = validate.ignored_parameters(model, options.ignored_params)
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
    units = find_units(model, options.auto_wrap_policy, ignored)
    put_values = initial_values(
        model,
        {module for unit in units if unit.parameters for module in unit.modules.values()},
        AmongReplicas(parallel) if isinstance(parallel, ReplicaMesh) and options.sync_module_states else None,  # type: ignore[arg-type]  # it broadcasts
        torch.device("cpu"),
        sync_module_states=options.sync_module_states,
        param_init_fn=options.param_init_fn,
        shard_dims={},
        checkpoint=options.files,
    )
    pipeline = with_constraints(options.pipeline, parallel) if auto else options.pipeline
    spec = model_spec(units, names, parallel, policies, {})
    cost = cost_model(pipeline, parallel.group_shapes(), device, "xla")
    spec = _named_groups(pipeline.arrange(spec, cost), parallel)
    originals = {p_names[0]: p for p, p_names in names.items() if p_names[0] in spec.parameters}
    storage = (ReplicaStorage if replicas else XlaStorage)(model, spec, originals, names, parallel, device)
    if isinstance(storage, ReplicaStorage):
        put_replicas_values(model, storage, put_values, options.sync_module_states)
    else:
        put_values(storage)  # type: ignore[arg-type]  # it is filled as an eager one is
    engine = {"manual": XlaEngine, "auto": GlobalEngine, "replicas": ReplicaEngine}[options.sharding](
        original_forward(model),
        spec,
        storage,
        pipeline,
        XlaBackend(options.on_host_fallback),
        cost,
        reshard_after_forward=options.reshard_after_forward,
        fullgraph=options.fullgraph,
        dynamic=False,
    )
    storage.install(model)
    policies.install(name for unit in units for name in unit.modules)
    if auto:
        trace_marks(model, options.shard_output, mesh)
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


def _refuse(options: CompileOptions) -> None:
    """What XLA devices do not have."""
    if options.offloads:
        raise UnsupportedError("offload_policy: backend='xla' keeps shards on the devices; leave it out")
    if options.reshards_to_groups:
        raise UnsupportedError(
            f"reshard_after_forward={options.reshard_after_forward}: with backend='xla' parameters are kept whole or "
            "sharded over all devices; pass True, False, None or 'auto'"
        )
    if options.shard_placement_fn is not None:
        raise UnsupportedError(
            "shard_placement_fn: with backend='xla' parameters are sharded on dimension 0; leave it out"
        )
    if options.checkpointing is not None and options.checkpointing.offload:
        raise UnsupportedError("activation_checkpointing with offload: backend='xla' makes no copies to the CPU")
    if options.dynamic:
        raise UnsupportedError("dynamic=True: XLA compiles static shapes, a graph for each; pass None or False")
