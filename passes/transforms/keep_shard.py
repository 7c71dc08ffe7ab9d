"""Resharding to smaller groups: between forward and backward each rank keeps a larger shard of each bucket.

FSDP2's ``reshard_after_forward=<int>``. The ranks that shard are divided into groups of ``n`` consecutive ones (those
of a machine, say). After its last use in forward, a bucket is cut to this rank's 1/n of it, which forward saves;
backward gathers it over the small group.

Layout. A gathered bucket is parameter-major: over ``W`` ranks the parameter at element ``o`` of the shard lies at
``W * o``, as ``W`` chunks. A rank keeps ``s = W / n`` consecutive chunks of each, at ``s * o``. So what it keeps is a
shard of the same bucket over ``n`` ranks, in which every offset and size is ``s`` times as large, and gathering it over
them gives the same buffer. Which chunks they are is the rank's place in its group, and known at run time only: the
graph is the same on all ranks.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.passes.ir.spec import BucketSpec


def scale_of(context: PassContext) -> int:
    """How many chunks of a parameter a rank keeps: offsets and sizes are as many times larger than in a shard."""
    return context.model.world_size // context.model.reshard_size


def keep_shards(graph: Graph, waits: list[fx.Node], context: PassContext) -> None:
    """Forward saves a shard of each of these gathered buckets, cut off before the first collective after its last
    use: there the compute regions are cut anyway, and the buffer is freed."""
    roots = graph.alias_roots()
    starts = {wait.args[0]: wait for wait in waits}
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.fx_graph.nodes:
        if node.op != "output":
            for root in {root for source in node.all_input_nodes for root in roots[source]} & starts.keys():
                last_use[starts[root]] = node
    next_communication = graph.next_communication()
    for wait in waits:
        bucket = context.bucket_of(wait.meta["fsdp"].params[0])
        with graph.fx_graph.inserting_before(next_communication[last_use[wait]]):
            kept = _keep_shard(graph, wait, bucket, context)
        context.kept_shards[bucket.name] = kept
    outputs = operands(graph.output)
    place = context.forward_outputs + len(context.kept)
    outputs[place:place] = context.kept_shards.values()
    graph.output.args = (tuple(outputs),)


def _keep_shard(graph: Graph, wait: fx.Node, bucket: BucketSpec, context: PassContext) -> fx.Node:
    offsets, numels = [bucket.offsets[p.name] for p in bucket.parameters], [p.shard_numel for p in bucket.parameters]
    sizes = (bucket.shard_numel, bucket.world_size, context.model.reshard_size)
    arguments = (wait, offsets, numels, *sizes, context.model.reshard_group)
    kept = graph.call(dialect.keep_shard, arguments, name=f"shard_{bucket.name}")
    size = nbytes(kept.meta["val"])
    return set_record(kept, NodeRecord(Role.KEEP_SHARD, bucket.unit, bucket.name, wait.meta["fsdp"].params, size))


def receive_shards(graph: Graph, context: PassContext) -> None:
    """Backward takes the shards behind what it received already, and gathers the buckets from them."""
    tensors = [n for n in graph.placeholders if isinstance(n.meta.get("val"), torch.Tensor)]
    place = next(n for n in tensors if not dialect.has_role(n, Role.KEPT))
    gathers = {start.meta["fsdp"].bucket: start for start in graph.with_role(Role.GATHER_START)}
    for index, (name, source) in enumerate(context.kept_shards.items()):
        with graph.fx_graph.inserting_before(place):
            shard = graph.fx_graph.placeholder(f"shard_{index}")
        shard.meta["val"] = source.meta["val"]
        set_record(shard, dataclasses.replace(source.meta["fsdp"], role=Role.KEPT_SHARD))
        if name in gathers:
            _gather_from(shard, gathers[name], context)


def _gather_from(shard: fx.Node, start: fx.Node, context: PassContext) -> None:
    bucket, scale = context.bucket_of(start.meta["fsdp"].params[0]), scale_of(context)
    used: list[int] = list(dialect.argument(start, "offsets"))
    numel_at = {bucket.offsets[p.name]: p.shard_numel for p in bucket.parameters}
    start.args = (
        [shard],
        [scale * offset for offset in used],
        scale * bucket.shard_numel,
        dialect.argument(start, "dtype"),
        context.model.reshard_size,
        context.model.reshard_group,
        [scale * value for value in dialect.argument(start, "messages")],
        [scale * numel_at[offset] for offset in used],
        *([True] if dialect.argument(start, "custom") else []),
    )
