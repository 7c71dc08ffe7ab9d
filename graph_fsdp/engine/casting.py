"""A model that is cast after ``compile``, with ``model.to(torch.bfloat16)``, computes in its new dtypes, as with FSDP2.

torch casts shards, gradients and buffers. Here the spec follows, and with it buckets, placeholders and the memory that
shards lie in, which the next forward takes; it is traced anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from graph_fsdp.parameters.mixed_precision import dtypes_under
from graph_fsdp.parameters.shards import Storage
from graph_fsdp.passes.ir.spec import make_model_spec

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


def follow_cast(engine: Engine, policies: Mapping[str, MixedPrecisionPolicy]) -> None:
    """Take over the dtypes that shards have now. ``policies``: parameter → its module's policy.

    Where something else knows a parameter's dtype nothing is done, and the next forward refuses the cast.
    """
    storage, old = engine.storage, engine.spec
    if not isinstance(storage, Storage) or not _can_follow(engine, storage):
        return
    if all(p.shard.dtype is p.spec.dtype for p in storage.parameters.values()):
        return
    parameters = []
    for name, p in old.parameters.items():
        shard = storage.parameters[name].shard
        gathered, reduced, sent_as = dtypes_under(policies[name], shard, name)
        parameters.append(replace(p, dtype=shard.dtype, param_dtype=gathered, reduce_dtype=reduced, sent_as=sent_as))
    made = make_model_spec(parameters, old.mesh)
    spec = replace(old, parameters=made.parameters, buckets=made.buckets)
    engine.spec = engine.pipeline.arrange(spec, engine.cost)
    storage.take_spec(engine.spec)
    engine.cast = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))


def _can_follow(engine: Engine, storage: Storage) -> bool:
    """Say whether nothing but the spec has dtypes: no tensor extension, no quantized weights, no tensor-parallel
    parameters (whose DTensors describe themselves), no CUDA graphs (which have addresses)."""
    known = engine.extensions or storage.keeps_buffers or not storage.has_memory
    return not known and not any(
        isinstance(p.placeholder, DTensor) or p.as_used is not None or p.used_like is not None or p.layout
        for p in storage.parameters.values()
    )


def without_autocast(run: Callable[[list[Any]], Any], device: torch.device) -> Callable[[list[Any]], Any]:
    """Return ``run``, which runs a backward's program, with the casts that were traced and no others: backward may be
    called in a block of autocast that its forward was not in, or that has changed since."""

    def call(args: list[Any]) -> Any:
        if not torch.is_autocast_enabled(device.type):
            return run(args)
        with torch.autocast(device.type, enabled=False):
            return run(args)

    return call
