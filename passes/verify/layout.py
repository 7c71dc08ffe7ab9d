"""The verifier checks a bucket's layout: what is gathered and reduced lies where the bucket says."""

from __future__ import annotations

from typing import NoReturn, Protocol

from torch import fx

from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.passes.transforms.keep_shard import scale_of
from graph_fsdp.passes.transforms.offload import wrong_fetch


class Fail(Protocol):
    """Raises the verifier's error: the invariant, the node that breaks it, and how."""

    def __call__(self, invariant: str, node: fx.Node | None, detail: str) -> NoReturn: ...


def check_layout(node: fx.Node, graph: Graph, context: PassContext, fail: Fail) -> None:
    """Chunks go into a gather, and parameters come out of it, at the places that the bucket's layout says."""
    invariant = "a gathered bucket has its own layout"
    if node.target is dialect.all_gather_start:
        bucket = context.bucket_of(node.meta["fsdp"].params[0])
        shards, offsets = operands(node), operands(node, 1)
        scale = 1
        if has_role(shards[0], Role.KEPT_SHARD):
            scale = scale_of(context)
            _kept_layout(node, scale, context, fail)
        elif has_role(shards[0], Role.FETCH_WAIT):
            if wrong := wrong_fetch(node, bucket):
                fail(invariant, node, wrong)
        else:
            found = [shard.meta["fsdp"].params[0] for shard in shards]
            if [bucket.offsets.get(name) for name in found] != offsets:
                fail(invariant, node, f"shards of {', '.join(found)} are said to lie at {offsets}")
        custom = dialect.argument(node, "custom")
        if custom != context.settings.custom_all_gather:
            fail("collectives are those that the user has set", node, f"{node} has custom={custom}")
        messages = [] if custom else bucket.message_arguments(scale)
        found_messages = list(dialect.argument(node, "messages"))
        if found_messages != messages:
            invariant = "a bucket is gathered in the same messages on all ranks"
            fail(invariant, node, f"{node} has messages {found_messages}, its bucket {messages}")
    elif node.target is dialect.reduce_scatter_start and "bucketed" in graph.facts:
        names = node.meta["fsdp"].params
        bucket = context.bucket_of(names[0])
        custom = dialect.argument(node, "custom")
        if custom != context.settings.custom_reduce_scatter:
            fail("collectives are those that the user has set", node, f"{node} has custom={custom}")
        due = [] if custom else bucket.reduced_in([context.model.parameters[name] for name in names])
        if (counts := list(dialect.argument(node, "messages"))) != due:
            wrong = f"{node} has messages {counts}, its bucket {due}"
            fail("a bucket is reduced in the same messages on all ranks", node, wrong)
    elif has_role(node, Role.KEEP_SHARD):
        _kept_layout(node, 1, context, fail)
    elif has_role(node, Role.UNPACK):
        name = node.meta["fsdp"].params[0]
        bucket, parameter = context.bucket_of(name), context.model.spec_of(name)
        piece = node
        while isinstance(piece.args[0], fx.Node) and not has_role(piece.args[0], Role.GATHER_WAIT, Role.KEPT):
            piece = piece.args[0]
        begin = bucket.offsets[name] * bucket.world_size
        expected = (0, begin, begin + parameter.shard_numel * bucket.world_size)
        if piece.args[1:] != expected:
            fail(invariant, node, f"{name} lies at {expected[1:]} of its bucket and is read at {piece.args[2:]}")


def _kept_layout(node: fx.Node, scale: int, context: PassContext, fail: Fail) -> None:
    """A shard that goes from forward to backward is cut out of its own bucket and gathered to the same buffer."""
    record, model = node.meta["fsdp"], context.model
    bucket = context.bucket_of(record.params[0])
    numel_at = {scale * bucket.offsets[p.name]: scale * p.shard_numel for p in bucket.parameters}
    offsets, numels = dialect.argument(node, "offsets"), dialect.argument(node, "numels")
    chunks = dict(zip(offsets, numels, strict=False))
    invariant = "a kept shard has its bucket's layout"
    if len(offsets) != len(numels) or not chunks.items() <= numel_at.items():
        fail(invariant, node, f"chunks at {offsets} of {numels} elements, the bucket's are {numel_at}")
    if node.target is dialect.keep_shard and chunks != numel_at:
        fail(invariant, node, f"only the chunks at {offsets} are kept, the bucket's are {numel_at}")
    sizes = (dialect.argument(node, "length"), dialect.group_of(node))
    if sizes != (scale * bucket.shard_numel, model.reshard_group):
        expected = f"{scale * bucket.shard_numel} elements over group {model.reshard_group!r}"
        fail(invariant, node, f"{sizes[0]} elements over group {sizes[1]!r}, and not {expected}")
    source = node.args[0] if isinstance(node.args[0], fx.Node) else operands(node)[0]
    if source.meta["fsdp"].bucket != record.bucket:
        fail(invariant, node, f"{node} is of bucket {record.bucket} and takes {source}")
