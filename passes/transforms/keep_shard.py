"""Resharding to smaller groups: between forward and backward each rank keeps a larger shard of each bucket.

FSDP2's ``reshard_after_forward=<int>``, for groups of ``n`` consecutive ranks (those of a machine, say). After its last
use in forward, a bucket is cut to this rank's 1/n of it, which forward saves; backward gathers it over the small group.

Layout. A gathered bucket is parameter-major: over ``W`` ranks the parameter at element ``o`` of the shard lies at
``W * o``, as ``W`` chunks. A rank keeps ``s = W / n`` consecutive chunks of each, at ``s * o``. So what it keeps is a
shard of the same bucket over ``n`` ranks, in which every offset and size is ``s`` times as large, and gathering it over
them gives the same buffer. Which chunks they are is the rank's place in its group, and known at run time only: the
graph is the same on all ranks.
"""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.passes.transforms.edits import erase_unread, recorded, without_defaults


def scale_of(context: PassContext) -> int:
    """How many chunks of a parameter a rank keeps: offsets and sizes are as many times larger than in a shard."""
    return context.model.world_size // context.model.reshard_size


def keep_shards(graph: Graph, waits: list[fx.Node], context: PassContext) -> list[fx.Node]:
    """Cut a shard out of each of these gathered buckets, before the first collective after its last use: there the
    compute regions are cut anyway, and the buffer is freed."""
    reads = {gather.wait: gather.reads for gather in graph.gathers}
    next_communication = graph.next_communication()
    found = []
    for wait in waits:
        bucket, model = context.bucket_of(wait.meta["fsdp"].params[0]), context.model
        chunks = ([bucket.offsets[p.name] for p in bucket.parameters], [p.shard_numel for p in bucket.parameters])
        sizes = (bucket.shard_numel, bucket.world_size, model.reshard_size)
        with graph.fx_graph.inserting_before(next_communication[[wait, *reads[wait]][-1]]):
            arguments = (wait, *chunks, *sizes, model.reshard_group)
            kept = graph.call(dialect.keep_shard, arguments, name=f"shard_{bucket.name}")
        found.append(recorded(kept, wait.meta["fsdp"], Role.KEEP_SHARD))
    return found


def gather_from(graph: Graph, shard: fx.Node, start: fx.Node, context: PassContext) -> None:
    """Gather a bucket of backward from such a shard, over the small group."""
    bucket, scale = context.bucket_of(start.meta["fsdp"].params[0]), scale_of(context)
    shards, used = operands(start), operands(start, 1)
    numel_at = {bucket.offsets[p.name]: p.shard_numel for p in bucket.parameters}
    arguments = (
        [shard],
        [scale * offset for offset in used],
        scale * bucket.shard_numel,
        dialect.argument(start, "dtype"),
        context.model.reshard_size,
        context.model.reshard_group,
        [scale * value for value in dialect.argument(start, "messages")],
        [scale * numel_at[offset] for offset in used],
        dialect.argument(start, "custom"),
    )
    start.args = without_defaults(dialect.all_gather_start, arguments)
    erase_unread(graph, shards)
