"""Gathers and reductions become bucketed collectives, one bucket per unit.

What comes out is a correct serial schedule: a bucket is started and waited for just before its first use, and
reduced and waited for just after its last gradient. Moving starts up and waits down is the schedule pass's job.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.passes.ir.spec import BucketSpec, ModelSpec, ParameterSpec
from graph_fsdp.passes.transforms.accumulate import (
    accumulate,
    call_hook,
    is_unreplicated,
    is_unsynced,
    keep,
    reduction_options,
)
from graph_fsdp.passes.transforms.arrange import BucketSize, arrange_buckets
from graph_fsdp.passes.transforms.offload import HOST, fetch, fetch_shards
from graph_fsdp.passes.transforms.offload import offload as copy_to_cpu
from graph_fsdp.passes.transforms.payloads import combine_reductions, place_payloads
from graph_fsdp.passes.transforms.share import share_buckets

aten = torch.ops.aten
prims = torch.ops.prims


class Bucket(GraphPass):
    """Gathers of a bucket: one ``all_gather_start``/``wait`` pair, each parameter a view of the buffer.
    Gradients of a bucket: one ``reduce_scatter_start``/``wait`` pair, each shard gradient a view of the result; on a
    mesh that also replicates, an ``all_reduce_shard_start``/``wait`` pair over the replicas stands in between.

    A bucket is gathered whole even where a graph uses part of it (backward needs no biases): which part that is can
    depend on the partitioner, and so on a rank's shapes, and the collective's size must not. It also keeps the
    bucket one slice of the shard storage, with nothing to pack.
    ``size`` is what a bucket holds, and ``budget`` bounds it, as in :func:`.arrange.arrange_buckets`.

    Scalars are replicated: they are used as they are, and their gradients are all-reduced.
    Where nothing is sharded a gather is its shard, and the gradients of a bucket are all-reduced over the replicas. On
    one rank a reduction is its gradient too, and nothing is communicated or copied.
    """

    name = "bucket"
    phases = ("forward", "backward", "inference")
    requires = ("annotated",)
    provides = ("bucketed",)

    def __init__(self, size: BucketSize = "unit", budget: int | None = None) -> None:
        named = size in ("unit", "none", "auto") if isinstance(size, str) else False
        if not named and (isinstance(size, (bool, str)) or not isinstance(size, int) or size <= 0):
            raise ValueError(f"bucket must be 'unit', 'none', 'auto' or a positive number of bytes, got {size!r}")
        self.size = size
        self.budget = budget

    def arrange(self, model: ModelSpec, cost: CostModel | None) -> ModelSpec:
        return arrange_buckets(model, self.size, cost, self.budget)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        context.budget = self.budget  # for whoever schedules: also a pass that does not know it is held to it
        combine_reductions(graph)
        positions = graph.positions()
        unsharded, alone = context.model.world_size == 1, context.model.ranks == 1
        offload = context.model.offload
        gathers: dict[str, list[fx.Node]] = {}
        fetches: dict[str, list[fx.Node]] = {}  # of what is not gathered
        reductions: dict[str, list[fx.Node]] = {}
        gradients: dict[fx.Node, fx.Node] = {}  # reduction → what takes its place
        for node in graph.with_role(Role.GATHER, Role.REDUCE):
            parameter = _parameter(node, context)
            if node.meta["fsdp"].role is Role.GATHER:
                if parameter.replicated or parameter.empty or unsharded:
                    if offload is None or (parameter.empty and not parameter.replicated):  # nothing to fetch
                        _use_shard(graph, node, parameter)
                    else:
                        fetches.setdefault(_reduction_name(parameter, context), []).append(node)
                else:
                    gathers.setdefault(node.meta["fsdp"].bucket, []).append(node)
            elif alone and offload is None:
                gradients[node] = _gradient(graph, node, parameter)
            elif parameter.empty:
                _empty_gradient(graph, node, parameter)
            else:
                reductions.setdefault(_reduction_name(parameter, context), []).append(node)
        for bucket in context.model.buckets:
            if bucket.name in gathers:
                _gather_bucket(graph, context, bucket, gathers[bucket.name], positions)
        share_buckets(graph, context)
        place_payloads(graph)
        if offload is not None:
            for name, nodes in fetches.items():
                parameters = [_parameter(node, context) for node in nodes]
                bucket_of_first = context.model.bucket_of.get(parameters[0].name)
                fetch_shards(graph, name, nodes, parameters, bucket_of_first, offload.device)
        positions = graph.positions()  # a parameter may be its own gradient, and is a new node now
        accumulated = 0
        for name, nodes in reductions.items():
            unsynced = [node for node in nodes if is_unsynced(_parameter(node, context), context)]
            if unsynced:
                kept_whole = accumulate(graph, context, unsynced, positions)
                accumulated += sum(node.meta["fsdp"].nbytes for node in kept_whole.values())
                gradients |= kept_whole
            if synced := [node for node in nodes if node not in unsynced]:
                gradients |= _reduce_bucket(graph, context, name, synced, positions)
        graph.replace(gradients)
        if alone:
            return "one rank: each shard is the parameter, each gradient is its own mean"
        kept = f", {accumulated:,} bytes of gradients kept whole" if accumulated else ""
        reduced = len(graph.with_role(Role.REDUCE_START))
        if unsharded:
            replicas = context.model.replicas
            return f"each shard is the parameter, {reduced} buckets reduced over {replicas} replicas{kept}"
        taken = f", {len(context.taken)} taken from an earlier piece" if context.taken else ""
        given = f", {len(context.given)} given to a later one" if context.given else ""
        return f"{len(gathers) - len(context.taken)} buckets gathered, {reduced} reduced{kept}{taken}{given}"


def _parameter(node: fx.Node, context: PassContext) -> ParameterSpec:
    return context.model.spec_of(node.meta["fsdp"].params[0])


def _gather_bucket(
    graph: Graph, context: PassContext, bucket: BucketSpec, nodes: list[fx.Node], positions: dict[fx.Node, int]
) -> None:
    by_name = {_parameter(n, context).name: n for n in nodes}
    used = [p for p in bucket.parameters if p.name in by_name]
    offsets = [bucket.offsets[p.name] for p in used]
    first_use = min((user for n in nodes for user in n.users), key=positions.__getitem__)
    names = tuple(p.name for p in bucket.parameters)

    def put(role: Role) -> NodeRecord:
        return NodeRecord(role, bucket.unit, bucket.name, names, bucket.full_nbytes)

    with graph.fx_graph.inserting_before(first_use):
        shards = [operand(by_name[p.name]) for p in used]
        rest: list[Any] = [used[0].param_dtype, bucket.world_size, context.model.group]
        custom = context.settings.custom_all_gather
        messages = [] if custom else bucket.message_arguments()
        if messages:
            rest.append(messages)
        if context.model.offload is not None:
            device = context.model.offload.device
            shards = [fetch(graph, shards, offsets, bucket.shard_numel, device, put(Role.FETCH_START))]
            rest = [*rest[:3], messages, [p.shard_numel for p in used]]
        if custom:
            rest = [*(rest if len(rest) == 5 else [*rest[:3], [], []]), True]
        arguments = (shards, offsets, bucket.shard_numel, *rest)
        start = graph.call(dialect.all_gather_start, arguments, name=f"gather_{bucket.name}")
        set_record(start, put(Role.GATHER_START))
        wait = set_record(
            graph.call(dialect.all_gather_wait, (start,), name=f"full_{bucket.name}"), put(Role.GATHER_WAIT)
        )
    for p, offset in zip(used, offsets, strict=True):
        gather = by_name[p.name]
        # The view stands where the parameter is first used, so that it falls into the same compute region.
        with graph.fx_graph.inserting_before(min(gather.users, key=positions.__getitem__)):
            view = _unpack(graph, wait, p, offset * p.world_size, gather)
        set_record(view, NodeRecord(Role.UNPACK, bucket.unit, bucket.name, (p.name,), nbytes(view.meta["val"])))
        gather.replace_all_uses_with(view)
        graph.fx_graph.erase_node(gather)


def _unpack(graph: Graph, buffer: fx.Node, p: ParameterSpec, begin: int, like: fx.Node) -> fx.Node:
    padded = (p.chunk_rows * p.world_size, *p.stored_shape[1:])
    node = graph.call(aten.slice.Tensor, (buffer, 0, begin, begin + math.prod(padded)), name=p.name, like=like)
    if len(padded) > 1:
        node = graph.call(aten.view.default, (node, list(padded)), name=p.name, like=like)
    if padded != p.stored_shape:
        node = graph.call(aten.slice.Tensor, (node, 0, 0, p.rows), name=p.name, like=like)
    return node


def _reduction_name(p: ParameterSpec, context: PassContext) -> str:
    """Gradients are reduced by the buckets that parameters are gathered in; a unit's scalars, which are in none, by
    their dtype and that of the reduction, where it is not what the model's other scalars have."""
    if p.name in context.model.bucket_of:
        return context.bucket_of(p.name).name
    name = f"{p.unit or 'root'}#scalars" + ("" if p.dtype is torch.float32 else f"#{p.dtype}".replace("torch.", ""))
    scalars = (q for q in context.model.parameters.values() if q.replicated and q.unit == p.unit and q.dtype is p.dtype)
    usual = next(scalars).reduce_dtype
    return name if p.reduce_dtype is usual else f"{name}#in {p.reduce_dtype}".replace("torch.", "")


def _reduce_bucket(
    graph: Graph, context: PassContext, name: str, nodes: list[fx.Node], positions: dict[fx.Node, int]
) -> dict[fx.Node, fx.Node]:
    bucket = context.model.bucket_of.get(_parameter(nodes[0], context).name)
    order = context.model.index_of if bucket is None else bucket.offsets
    nodes = sorted(nodes, key=lambda n: order[_parameter(n, context).name])
    parameters = [_parameter(n, context) for n in nodes]
    unit, dtype = parameters[0].unit, parameters[0].dtype
    grads: list[fx.Node] = [operand(n) for n in nodes]
    # Autograd runs the gathers' adjoints last of all; the reduction can start as soon as the gradients exist.
    last = max(grads, key=positions.__getitem__)
    if last.op == "placeholder":
        last = graph.placeholders[-1]

    shard_grads: dict[fx.Node, fx.Node] = {}
    with graph.fx_graph.inserting_before(last.next):
        offload = context.model.offload
        options = reduction_options(parameters, name, context)
        hooked = options.pop("unit", None)
        unreplicated = is_unreplicated(parameters[0], context)
        if context.model.ranks == 1:
            values = [_cast(graph, grad, dtype) for grad in grads]
            begins = list(itertools.accumulate((p.shard_numel for p in parameters[:-1]), initial=0))
        else:
            custom = context.settings.custom_reduce_scatter
            arguments = (bucket, name, grads, parameters, options, unreplicated, custom)
            flat, begins = _reduce(graph, context.model, *arguments)
            if hooked is not None and not unreplicated:
                flat = call_hook(graph, flat, hooked)
            values = [flat if unreplicated else _cast(graph, flat, dtype)]
        if offload is not None and not unreplicated:
            record = NodeRecord(Role.OFFLOAD_START, unit, name, tuple(p.name for p in parameters))
            values = [copy_to_cpu(graph, values, offload.pin_memory, record)]
        (flat,) = values
        for node, p, begin in zip(nodes, parameters, begins, strict=True):
            piece = (flat, 0, begin, begin + p.shard_numel)
            grad = graph.call(aten.slice.Tensor, piece, name=f"{p.name}.grad", like=node)
            if len(p.shard_shape) != 1:
                grad = graph.call(aten.view.default, (grad, list(p.shard_shape)), name=f"{p.name}.grad", like=node)
            if unreplicated:
                shard_grads[node] = keep(graph, grad, context, p.name, name)
                continue
            set_record(grad, NodeRecord(Role.SHARD_GRAD, unit, name, (p.name,), nbytes(grad.meta["val"])))
            shard_grads[node] = grad
    return shard_grads


def _cast(graph: Graph, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype is dtype:
        return value
    return graph.call(prims.convert_element_type.default, (value, dtype))


def _reduce(
    graph: Graph,
    model: ModelSpec,
    bucket: BucketSpec | None,
    name: str,
    grads: list[fx.Node],
    parameters: list[ParameterSpec],
    options: dict[str, Any],
    unreplicated: bool,
    custom: bool,
) -> tuple[fx.Node, list[int]]:
    """Insert the collectives of a bucket's gradients; the flat result of the last, waited for, and where in it each
    parameter's begins. ``unreplicated``: without the one over the replicas."""
    reduce_dtype, names = parameters[0].reduce_dtype, tuple(p.name for p in parameters)

    def collective(target: Any, args: tuple[Any, ...], start_role: Role, wait_role: Role, verb: str) -> fx.Node:
        start = graph.call(target, args, options, name=f"{verb}_{name}")
        record = NodeRecord(start_role, parameters[0].unit, name, names, nbytes(start.meta["val"]))
        set_record(start, record)
        wait = graph.call(dialect.reduce_wait, (start,), name=f"{verb}d_{name}")
        return set_record(wait, replace(record, role=wait_role))

    roles = (Role.REDUCE_START, Role.REDUCE_WAIT)
    whole = list(itertools.accumulate((p.shard_numel for p in parameters[:-1]), initial=0))
    if model.world_size == 1:
        arguments = (grads, reduce_dtype, model.replicas, model.replicate_group)
        return collective(dialect.all_reduce_start, arguments, *roles, "reduce"), whole
    over_shards: tuple[Any, ...] = (grads, reduce_dtype, model.world_size, model.reduce_group)
    if bucket is None:  # scalars
        target, begins, messages = dialect.all_reduce_start, whole, []
    else:
        target, messages = dialect.reduce_scatter_start, [] if custom else bucket.reduced_in(parameters)
        values = [grad.meta["val"] for grad in grads]
        begins = dialect.reduced_offsets(values, reduce_dtype, model.world_size, messages)[:-1]
    if custom and bucket is not None:
        over_shards = (*over_shards, model.replicas, [], True)
    elif messages:
        over_shards = (*over_shards, model.replicas, messages)
    elif model.replicas > 1:
        over_shards = (*over_shards, model.replicas)
    reduced = collective(target, over_shards, *roles, "reduce")
    if model.replicas == 1 or unreplicated:
        return reduced, begins
    over_replicas = (reduced, model.ranks, model.replicate_group)
    roles = (Role.REPLICATE_START, Role.REPLICATE_WAIT)
    return collective(dialect.all_reduce_shard_start, over_replicas, *roles, "replicate"), begins


def _use_shard(graph: Graph, node: fx.Node, p: ParameterSpec) -> None:
    shard = node.args[0]
    assert isinstance(shard, fx.Node)
    with graph.fx_graph.inserting_before(node):
        if p.empty and not p.replicated:
            device = node.meta["val"].device
            elsewhere = {} if device == shard.meta["val"].device else {"device": device}
            value = graph.call(aten.new_empty.default, (shard, list(p.stored_shape)), elsewhere, like=node)
        else:
            value = shard
        if p.param_dtype is not p.dtype:
            value = graph.call(prims.convert_element_type.default, (value, p.param_dtype), like=node)
    node.replace_all_uses_with(value)
    graph.fx_graph.erase_node(node)


def _gradient(graph: Graph, node: fx.Node, p: ParameterSpec) -> fx.Node:
    grad = node.args[0]
    assert isinstance(grad, fx.Node)
    if grad.meta["val"].dtype is not p.dtype:
        with graph.fx_graph.inserting_before(node):
            grad = graph.call(prims.convert_element_type.default, (grad, p.dtype), like=node)
    return grad


def _empty_gradient(graph: Graph, node: fx.Node, p: ParameterSpec) -> None:
    with graph.fx_graph.inserting_before(node):
        device = {} if node.meta["val"].device == operand(node).meta["val"].device else {"device": HOST}
        value = graph.fx_graph.call_function(
            aten.new_zeros.default, (node.args[0], list(p.shard_shape)), {"dtype": p.dtype, **device}
        )
        value.meta["val"] = node.meta["val"]
    set_record(value, NodeRecord(Role.SHARD_GRAD, p.unit, "", (p.name,)))
    node.replace_all_uses_with(value)
    graph.fx_graph.erase_node(node)
