"""Gradients that are not reduced are accumulated, and reductions follow the settings made after compile.

A graph that does not reduce a unit's gradients (``set_requires_gradient_sync(False)``) ends each of them in an
``accumulate_grad`` where the reduction would start, so that the compute regions are those of the graph that reduces.
Where replicas alone are left out (``set_requires_all_reduce(False)``) gradients are reduced over the ranks that shard,
and their shards are kept. The next graph that reduces a parameter's gradient adds what is kept to it, in the executor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.spec import ParameterSpec
from graph_fsdp.passes.transforms.edits import without_defaults
from graph_fsdp.passes.transforms.offload import HOST


def is_unsynced(p: ParameterSpec, context: PassContext) -> bool:
    """Whether a gradient is kept as it is. Where nothing is sharded, the replicas are all that it is reduced over."""
    settings = context.settings
    return p.unit in settings.unsynced or (context.model.world_size == 1 and p.unit in settings.unreplicated)


def is_unreplicated(p: ParameterSpec, context: PassContext) -> bool:
    """Whether a gradient is kept after its reduction over the ranks that shard."""
    model = context.model
    return model.replicas > 1 and model.world_size > 1 and p.unit in context.settings.unreplicated


def keep(graph: Graph, grad: fx.Node, context: PassContext, parameter: str, bucket: str) -> fx.Node:
    """``grad``: whole, or this rank's shard of it."""
    p = context.model.parameters[parameter]
    device = HOST if context.model.offload is not None else None
    arguments = (grad, list(p.shard_shape), p.dtype, p.reduce_dtype, p.name, device)
    given = without_defaults(dialect.accumulate_grad, arguments)
    node = graph.call(dialect.accumulate_grad, given, name=f"{p.name}.kept")
    return set_record(node, NodeRecord(Role.ACCUMULATE, p.unit, bucket, (p.name,), nbytes(grad.meta["val"])))


def reduction_options(
    parameters: list[ParameterSpec], bucket: str, context: PassContext
) -> tuple[dict[str, Any], str | None]:
    """Keyword arguments of the collectives that reduce these parameters' gradients, and the unit whose hook sees the
    result, if there is one.

    Raises:
        ValueError: the units of the bucket differ in what the user has set.
    """
    settings, units = context.settings, list(dict.fromkeys(p.unit for p in parameters))
    factors = dict(settings.divide_factors)
    found = [(factors.get(u), u in settings.summed, u if u in settings.hooked else None) for u in units]
    if len(set(found)) > 1:
        raise ValueError(
            f"the gradients of the units {', '.join(map(repr, units))} are reduced together, in bucket {bucket!r}, and "
            "are to be divided, summed or hooked in different ways; set the same for all of them, or compile with "
            "passes=default_pipeline(bucket='unit')"
        )
    factor, summed, hooked = found[0]
    options = {"factor": factor, "summed": summed or None}
    return {key: value for key, value in options.items() if value is not None}, hooked


def call_hook(graph: Graph, reduced: fx.Node, unit: str) -> fx.Node:
    """Show what a reduction has left to the user's function."""
    hook = graph.call(dialect.reduce_hook, (reduced, unit), name=f"hook_{unit or 'root'}")
    return set_record(hook, replace(reduced.meta["fsdp"], role=Role.REDUCE_HOOK))
