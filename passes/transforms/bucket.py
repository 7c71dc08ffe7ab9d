"""Gathers and reductions become bucketed collectives, in a correct serial schedule.

A bucket is started and waited for just before its first use, and reduced and waited for just after its last gradient. A
graph that does not reduce a unit's gradients (``set_requires_gradient_sync(False)``) ends each of them in an
``accumulate_grad`` where the reduction would start, so that compute regions stay the same. Where replicas alone are
left out (``set_requires_all_reduce(False)``) the reduced shards are kept. The next graph that reduces a parameter's
gradient adds what is kept, in the executor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.layout import begins_of
from graph_fsdp.passes.ir.operands import argument, operand
from graph_fsdp.passes.ir.settings import is_count
from graph_fsdp.passes.ir.spec import HOST, BucketSpec, ModelSpec, ParameterSpec
from graph_fsdp.passes.transforms.arrange import BucketSize, Messages, arrange_buckets
from graph_fsdp.passes.transforms.edits import behind, recorded, start_and_wait, without_defaults
from graph_fsdp.passes.transforms.reshard import share_buckets
from graph_fsdp.passes.transforms.sources import combine_reductions, place_payloads

aten = torch.ops.aten
prims = torch.ops.prims

_Groups = dict[str, list[fx.Node]]  # bucket → its ``gather_param`` or ``reduce_grad`` nodes


@dataclass(frozen=True, repr=False)
class Bucket(GraphPass):
    """Makes one ``all_gather_start``/``wait`` pair of a bucket's gathers, with a view of the buffer for each parameter.

    A bucket's gradients become one ``reduce_scatter_start``/``wait`` pair, each shard gradient a view of the result; on
    a mesh that also replicates, an ``all_reduce_shard_start``/``wait`` pair over the replicas follows; where replica
    groups come and go outside of the mesh (``Settings.over_groups``), then a ``mean_over_groups``. A bucket is
    gathered whole even where a graph uses a part of it (docs/decisions/gathers_and_schedule.md). ``size`` is what a
    bucket holds, ``budget`` bounds it, and ``messages`` sends it, as in :func:`.arrange.arrange_buckets`.

    Scalars are replicated, and their gradients are all-reduced. Where nothing is sharded a gather is its shard, and a
    bucket's gradients are all-reduced over the replicas. On one rank nothing is communicated or copied.
    """

    size: BucketSize = "unit"
    budget: int | None = None
    messages: Messages = "auto"

    name = "bucket"
    requires = ("annotated",)
    provides = ("bucketed",)

    def __post_init__(self) -> None:
        size = self.size
        if size not in ("unit", "none", "auto") and not is_count(size):
            raise ValueError(f"bucket must be 'unit', 'none', 'auto' or a positive number of bytes, got {size!r}")
        if self.messages not in ("auto", "one"):
            raise ValueError(f"messages must be 'auto' or 'one', got {self.messages!r}")

    def arrange(self, model: ModelSpec, cost: CostModel | None) -> ModelSpec:
        return arrange_buckets(model, self.size, cost, self.budget, self.messages)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        context.budget = self.budget  # for whoever schedules: also a pass that does not know it is held to it
        combine_reductions(graph)
        gathered, copied = _divided(graph, context)
        positions = graph.positions()
        for bucket in context.model.buckets:
            if bucket.name in gathered:
                _gather(graph, context, bucket, gathered[bucket.name], positions)
        share_buckets(graph, context)
        place_payloads(graph)
        for name, nodes in copied.items():
            _fetch(graph, context, name, nodes)
        _reduce(graph, context)
        return _summary(graph, context, len(gathered))


def _summary(graph: Graph, context: PassContext, gathered: int) -> str:
    model, reduced = context.model, len(graph.with_role(Role.REDUCE_START))
    if model.mesh.ranks == 1:
        return "one rank: each shard is the parameter, each gradient is its own mean"
    unsynced = (n for n in graph.with_role(Role.ACCUMULATE) if is_unsynced(_parameter(n, context), context))
    kept = sum(node.meta["fsdp"].nbytes for node in unsynced)
    whole = f", {kept:,} bytes of gradients kept whole" if kept else ""
    if all(p.world_size == 1 for p in model.parameters.values()):
        return f"each shard is the parameter, {reduced} buckets reduced over {model.mesh.replicas} replicas{whole}"
    taken = f", {len(graph.taken)} taken from an earlier piece" if graph.taken else ""
    given = f", {len(graph.given)} given to a later one" if graph.given else ""
    return f"{gathered - len(graph.taken)} buckets gathered, {reduced} reduced{whole}{taken}{given}"


def _parameter(node: fx.Node, context: PassContext) -> ParameterSpec:
    return context.model.spec_of(node.meta["fsdp"].params[0])


def _bucket_name(p: ParameterSpec, context: PassContext) -> str:
    """Name the bucket of a parameter; a unit's scalars, which are not gathered, are named by their dtypes."""
    if p.name in context.model.bucket_of:
        return context.bucket_of(p.name).name
    name = f"{p.unit or 'root'}#scalars" + ("" if p.dtype is torch.float32 else f"#{p.dtype}".replace("torch.", ""))
    name += f"#on {p.mesh.name}" if p.mesh.name else ""
    alike = (p.unit, p.dtype, p.mesh)
    parameters = context.model.parameters.values()
    scalars = (q for q in parameters if q.replicated and (q.unit, q.dtype, q.mesh) == alike)
    usual = next(scalars).reduce_dtype
    return name if p.reduce_dtype is usual else f"{name}#in {p.reduce_dtype}".replace("torch.", "")


def _cast(graph: Graph, value: fx.Node, dtype: torch.dtype, like: fx.Node | None = None) -> fx.Node:
    if value.meta["val"].dtype is dtype:
        return value
    return graph.call(prims.convert_element_type.default, (value, dtype), like=like)


def _device(node: fx.Node) -> dict[str, torch.device]:
    """Return the argument that makes a node's value of its operand, where that is on another device."""
    device = node.meta["val"].device
    return {} if operand(node).meta["val"].device == device else {"device": device}


# Gathers


def _divided(graph: Graph, context: PassContext) -> tuple[_Groups, _Groups]:
    """Return the gathers of buckets and those of what is only copied; the others' shards take their places."""
    gathered: _Groups = {}
    copied: _Groups = {}
    for node in graph.with_role(Role.GATHER):
        p = _parameter(node, context)
        if not (p.replicated or p.empty or p.world_size == 1):
            gathered.setdefault(_bucket_name(p, context), []).append(node)
        elif _is_copied(node) and not p.empty:
            copied.setdefault(_bucket_name(p, context), []).append(node)
        else:
            with graph.fx_graph.inserting_before(node):
                value = operand(node)
                if p.empty:
                    value = graph.call(aten.new_empty.default, (value, list(p.stored_shape)), _device(node), like=node)
                graph.replace({node: _cast(graph, value, p.param_dtype, node)})
    return gathered, copied


def _is_copied(gather: fx.Node) -> bool:
    """Say whether the shard is kept on the CPU, and copied to the device first."""
    return argument(gather, "device") is not None


def _gather(
    graph: Graph, context: PassContext, bucket: BucketSpec, nodes: list[fx.Node], positions: dict[fx.Node, int]
) -> None:
    model, custom = context.model, context.settings.custom_all_gather
    group = bucket.mesh.group
    by_name = {_parameter(n, context).name: n for n in nodes}
    used = [p for p in bucket.parameters if p.name in by_name]
    offsets, numels = [bucket.offsets[p.name] for p in used], [p.shard_numel for p in used]
    record = NodeRecord(Role.GATHER, bucket.unit, bucket.name, tuple(p.name for p in bucket.parameters))
    first_uses = {n: min(n.users, key=positions.__getitem__) for n in nodes}
    with graph.fx_graph.inserting_before(min(first_uses.values(), key=positions.__getitem__)):
        shards = [operand(by_name[p.name]) for p in used]
        copied = _is_copied(by_name[used[0].name])
        if copied:
            assert model.offload is not None
            copy = (shards, offsets, bucket.shard_numel, model.offload.device)
            shards = [start_and_wait(graph, dialect.fetch_start, copy, record)]
        messages = [] if custom else bucket.message_arguments()
        layout = (offsets, bucket.shard_numel, used[0].param_dtype, bucket.world_size, group, messages)
        arguments = (shards, *layout, numels if copied else [], custom)
        wait = start_and_wait(graph, dialect.all_gather_start, arguments, record)
    for p, offset in zip(used, offsets, strict=True):
        gather = by_name[p.name]
        # The view stands where the parameter is first used, so that it falls into the same compute region.
        with graph.fx_graph.inserting_before(first_uses[gather]):
            padded = (p.chunk_rows * p.world_size, *p.stored_shape[1:])
            view = _piece(graph, wait, offset * p.world_size, padded, p.name, gather)
            if padded != p.stored_shape:
                view = graph.call(aten.slice.Tensor, (view, 0, 0, p.rows), name=p.name, like=gather)
        graph.replace({gather: recorded(view, record, Role.UNPACK, (p.name,))})


def _piece(graph: Graph, flat: fx.Node, begin: int, shape: Sequence[int], name: str, like: fx.Node) -> fx.Node:
    """View a flat tensor from element ``begin`` on, in ``shape``."""
    node = graph.call(aten.slice.Tensor, (flat, 0, begin, begin + math.prod(shape)), name=name, like=like)
    return node if len(shape) == 1 else graph.call(aten.view.default, (node, list(shape)), name=name, like=like)


def _fetch(graph: Graph, context: PassContext, name: str, nodes: list[fx.Node]) -> None:
    """Make parameters that are used without a gather views of a copy on the device."""
    parameters, positions = [_parameter(node, context) for node in nodes], graph.positions()
    bucket, offload = context.model.bucket_of.get(parameters[0].name), context.model.offload
    assert offload is not None
    if bucket is None:
        *offsets, length = _begins(parameters)
    else:
        offsets, length = [bucket.offsets[p.name] for p in parameters], bucket.shard_numel
    record = NodeRecord(Role.GATHER, parameters[0].unit, name, tuple(p.name for p in parameters))
    values: dict[fx.Node, fx.Node] = {}
    with graph.fx_graph.inserting_before(min((u for n in nodes for u in n.users), key=positions.__getitem__)):
        arguments = (list(map(operand, nodes)), offsets, length, offload.device)
        flat = start_and_wait(graph, dialect.fetch_start, arguments, record)
        for node, p, begin in zip(nodes, parameters, offsets, strict=True):
            value = graph.call(aten.slice.Tensor, (flat, 0, begin, begin + p.shard_numel), name=p.name, like=node)
            value = graph.call(aten.view.default, (value, list(p.stored_shape)), name=p.name, like=node)
            values[node] = _cast(graph, value, p.param_dtype, node)
    graph.replace(values)


def _begins(parameters: Sequence[ParameterSpec]) -> list[int]:
    """Return where shards begin that lie one behind the other, and where the last ends."""
    return list(itertools.accumulate((p.shard_numel for p in parameters), initial=0))


# Reductions


def _reduce(graph: Graph, context: PassContext) -> None:
    """Reduce gradients, or keep them whole."""
    positions = graph.positions()
    groups: _Groups = {}
    gradients: dict[fx.Node, fx.Node] = {}  # reduction → what takes its place
    offloads = context.model.offload is not None
    differs = context.model.mesh.ranks > 1 or offloads  # from the gradient of the parameter
    for node in graph.with_role(Role.REDUCE):
        p = _parameter(node, context)
        if not p.empty and (p.mesh.ranks > 1 or offloads):
            groups.setdefault(_bucket_name(p, context), []).append(node)
            continue
        with graph.fx_graph.inserting_before(node):
            if p.empty and differs:
                arguments, options = (operand(node), list(p.shard_shape)), {"dtype": p.dtype, **_device(node)}
                gradients[node] = graph.call(aten.new_empty.default, arguments, options)
            else:
                gradients[node] = _cast(graph, _of_batch(graph, operand(node), p, context), p.dtype, node)
            if differs:
                set_record(gradients[node], NodeRecord(Role.SHARD_GRAD, p.unit, "", (p.name,)))
    for name, nodes in groups.items():
        unsynced = {node: operand(node) for node in nodes if is_unsynced(_parameter(node, context), context)}
        if unsynced:
            with graph.fx_graph.inserting_before(behind(graph, unsynced.values(), positions)):
                for node, grad in unsynced.items():
                    record = node.meta["fsdp"]
                    gradients[node] = keep(graph, grad, context, record.params[0], record.bucket)
        if synced := [node for node in nodes if node not in unsynced]:
            gradients |= _reduce_bucket(graph, context, name, synced, positions)
    graph.replace(gradients)


def _reduce_bucket(
    graph: Graph, context: PassContext, name: str, nodes: list[fx.Node], positions: dict[fx.Node, int]
) -> dict[fx.Node, fx.Node]:
    model, bucket = context.model, context.model.bucket_of.get(_parameter(nodes[0], context).name)
    order = dict(zip(model.parameters, itertools.count(), strict=False)) if bucket is None else bucket.offsets
    nodes = sorted(nodes, key=lambda n: order[_parameter(n, context).name])
    parameters, grads = [_parameter(n, context) for n in nodes], list(map(operand, nodes))
    unreplicated, dtype = is_unreplicated(parameters[0], context), parameters[0].dtype
    record = NodeRecord(Role.REDUCE, parameters[0].unit, name, tuple(p.name for p in parameters))
    found: dict[fx.Node, fx.Node] = {}
    # Autograd runs the gathers' adjoints last of all; the reduction can start as soon as the gradients exist.
    with graph.fx_graph.inserting_before(behind(graph, grads, positions)):
        begins = _begins(parameters)[:-1]
        if parameters[0].mesh.ranks > 1:
            reduced, begins = _reduced(graph, context, grads, parameters, record)
            grads = [reduced]
        else:
            grads = [_of_batch(graph, grad, parameters[0], context) for grad in grads]
        values = grads if unreplicated else [_cast(graph, value, dtype) for value in grads]
        if model.offload is not None and not unreplicated:
            values = [start_and_wait(graph, dialect.offload_start, (values, model.offload.pin_memory), record)]
        (flat,) = values
        for node, p, begin in zip(nodes, parameters, begins, strict=True):
            grad = _piece(graph, flat, begin, p.shard_shape, f"{p.name}.grad", node)
            kept = keep(graph, grad, context, p.name, name) if unreplicated else None
            found[node] = kept or recorded(grad, record, Role.SHARD_GRAD, (p.name,))
    return found


def _reduced(
    graph: Graph, context: PassContext, grads: list[fx.Node], parameters: list[ParameterSpec], of: NodeRecord
) -> tuple[fx.Node, list[int]]:
    """Insert a bucket's collectives; return the last flat result, and where in it each parameter's begins."""
    model, first = context.model, parameters[0]
    mesh, group = first.mesh, model.reduce_group(first.mesh)
    bucket, custom = model.bucket_of.get(first.name), context.settings.custom_reduce_scatter
    options, hooked = reduction_options(parameters, of.bucket, context)
    over: tuple[Any, ...]
    quantized: dict[str, Any] = {}
    if mesh.world_size == 1:
        target, over = dialect.all_reduce_start, (mesh.replicas, mesh.replicate_group)
    elif bucket is None:  # scalars
        target, over = dialect.all_reduce_start, (mesh.world_size, group, mesh.replicas)
    else:
        messages = [] if custom or first.sent_as else bucket.reduced_in(parameters)
        over = (mesh.world_size, group, mesh.replicas, messages, custom)
        target, quantized = dialect.reduce_scatter_start, {"sent_as": first.sent_as} if first.sent_as else {}
    flat = start_and_wait(graph, target, (grads, first.reduce_dtype, *over), of, options | quantized)
    begins = begins_of(operand(flat))
    if is_unreplicated(first, context):
        return flat, begins
    if mesh.world_size > 1 and mesh.replicas > 1:
        over = (flat, mesh.ranks, mesh.replicate_group)
        flat = start_and_wait(graph, dialect.all_reduce_shard_start, over, of, options)
    if context.settings.over_groups:
        mean = graph.call(dialect.mean_over_groups, (flat, of.bucket), name=f"mean_{of.bucket}")
        flat = set_record(mean, replace(flat.meta["fsdp"], role=Role.MEAN_OVER_GROUPS))
    if hooked is not None:  # the user's function is shown what a reduction has left
        hook = graph.call(dialect.reduce_hook, (flat, hooked), name=f"hook_{hooked or 'root'}")
        flat = set_record(hook, replace(flat.meta["fsdp"], role=Role.REDUCE_HOOK))
    return flat, begins


def _of_batch(graph: Graph, grad: fx.Node, p: ParameterSpec, context: PassContext) -> fx.Node:
    """Divide a gradient that no other rank has a part of by the ranks of the batch, in the type of reductions."""
    factor = dict(context.settings.divide_factors).get(p.unit, context.model.mesh.ranks)
    if factor == 1:
        return grad
    return graph.call(aten.div.Tensor, (_cast(graph, grad, p.reduce_dtype), float(factor)))


def is_unsynced(p: ParameterSpec, context: PassContext) -> bool:
    """Say whether a gradient is kept as it is; where nothing is sharded, the replicas are all it is reduced over. One
    that no other rank has a part of needs no reduction, and is not kept."""
    settings = context.settings
    kept = p.unit in settings.unsynced or (p.world_size == 1 and p.unit in settings.unreplicated)
    return kept and p.mesh.ranks > 1


def is_unreplicated(p: ParameterSpec, context: PassContext) -> bool:
    """Say whether a gradient is kept after its reduction over the ranks that shard."""
    settings = context.settings
    return p.mesh.replicas > 1 and p.world_size > 1 and p.unit in settings.unreplicated - settings.unsynced


def keep(graph: Graph, grad: fx.Node, context: PassContext, parameter: str, bucket: str) -> fx.Node:
    """Keep a gradient, whole or this rank's shard of it, for a later graph."""
    p = context.model.parameters[parameter]
    device = HOST if context.model.offload is not None else None
    arguments = (grad, list(p.shard_shape), p.dtype, p.reduce_dtype, p.name, device)
    given = without_defaults(dialect.accumulate_grad, arguments)
    node = graph.call(dialect.accumulate_grad, given, name=f"{p.name}.kept")
    return set_record(node, NodeRecord(Role.ACCUMULATE, p.unit, bucket, (p.name,), nbytes(grad.meta["val"])))


def reduction_options(
    parameters: list[ParameterSpec], bucket: str, context: PassContext
) -> tuple[dict[str, Any], str | None]:
    """Return keyword arguments of the collectives that reduce these gradients, and the unit whose hook sees the result.

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
    if factor is None and parameters[0].mesh.ranks != context.model.mesh.ranks:
        factor = float(context.model.mesh.ranks)
    options = {"factor": factor, "summed": summed or None}
    return {key: value for key, value in options.items() if value is not None}, hooked
