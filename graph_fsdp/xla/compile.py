"""``graph_fsdp.compile(…, backend="xla")``: where a model is compiled for, and what runs it there."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.engine.owned_tensors import check_cuda_graphs
from graph_fsdp.options import CompileOptions
from graph_fsdp.place import Place
from graph_fsdp.runtime.backends import XlaBackend
from graph_fsdp.xla import validate as xla_validate
from graph_fsdp.xla.auto import GlobalEngine, trace_marks, with_constraints
from graph_fsdp.xla.engine import LocalEngine
from graph_fsdp.xla.mesh import XlaMesh
from graph_fsdp.xla.replicas import ReplicaEngine, ReplicaMesh, ReplicaStorage
from graph_fsdp.xla.storage import XlaStorage


def place_on_xla(mesh: Any, names: dict[nn.Parameter, list[str]], options: CompileOptions) -> Place:
    """The devices of an XLA program, for a model with parameters of these names: of one process that drives all of
    them, so that there is nobody to agree with, or of one replica.

    Raises:
        MeshError, UnsupportedError, ValueError, TypeError: this process, the options or the parameters do not fit.
    """
    if options.cuda_graphs:
        check_cuda_graphs(options, torch.device("xla"))
    replicas = options.sharding == "replicas"
    xla_validate.environment(replicas)
    xla_validate.check_options(options)
    found = (ReplicaMesh if replicas else XlaMesh).of(mesh)
    xla_validate.check_parameters(names, found)
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
