"""The verifier checks a bucket's layout: what is gathered and reduced lies where the bucket says."""

from __future__ import annotations

from typing import NoReturn, Protocol

from torch import fx

from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import arguments, operand
from graph_fsdp.passes.ir.spec import BucketSpec
from graph_fsdp.passes.transforms.reshard import scale_of


class Fail(Protocol):
    """Raises the verifier's error: the invariant, the node that breaks it, and how."""

    def __call__(self, invariant: str, node: fx.Node | None, detail: str) -> NoReturn: ...


def check_layout(node: fx.Node, graph: Graph, context: PassContext, fail: Fail) -> None:
    """Chunks go into a gather, and parameters come out of it, at the places that the bucket's layout says."""
    invariant = "a gathered bucket has its own layout"
    if node.target is dialect.all_gather_start:
        bucket = context.bucket_of(node.meta["fsdp"].params[0])
        given, scale = arguments(node), 1
        shards, offsets = given.shards, list(given.offsets)
        if has_role(shards[0], Role.KEPT_SHARD):
            scale = scale_of(context)
            _kept_layout(node, scale, context, fail)
        elif has_role(shards[0], Role.FETCH_WAIT):
            _fetched_layout(node, bucket, fail, invariant)
        else:
            found = [shard.meta["fsdp"].params[0] for shard in shards]
            if [bucket.offsets.get(name) for name in found] != offsets:
                fail(invariant, node, f"shards of {', '.join(found)} are said to lie at {offsets}")
        due = [] if given.custom else bucket.message_arguments(scale)
        invariant = "a bucket is gathered in the same messages on all ranks"
        _check_messages(node, context.settings.custom_all_gather, due, invariant, fail)
    elif node.target is dialect.reduce_scatter_start and "bucketed" in graph.facts:
        names = node.meta["fsdp"].params
        bucket = context.bucket_of(names[0])
        parameters = [context.model.parameters[name] for name in names]
        due = [] if dialect.is_custom(node) else bucket.reduced_in(parameters)
        invariant = "a bucket is reduced in the same messages on all ranks"
        _check_messages(node, context.settings.custom_reduce_scatter, due, invariant, fail)
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


def _fetched_layout(gather: fx.Node, bucket: BucketSpec, fail: Fail, invariant: str) -> None:
    """What a gather reads of a copy of shards lies in it where the gather reads it."""
    copy, given = arguments(operand(arguments(gather).shards[0])), arguments(gather)
    found = [shard.meta["fsdp"].params[0] for shard in copy.shards]
    if [bucket.offsets.get(name) for name in found] != list(copy.offsets) or copy.length != bucket.shard_numel:
        where = f"shards of {', '.join(found)} are said to lie at {copy.offsets} of {copy.length} elements"
        fail(invariant, gather, where)
    if (list(given.offsets), given.length) != (list(copy.offsets), copy.length):
        fail(invariant, gather, f"{gather} reads {given.offsets} of a copy with shards at {copy.offsets}")
    numel_of = {p.name: p.shard_numel for p in bucket.parameters}
    if list(given.numels) != (numels := [numel_of[name] for name in found]):
        fail(invariant, gather, f"{gather} reads {given.numels} elements of shards of {numels}")


def _check_messages(node: fx.Node, custom: bool, due: list[int], invariant: str, fail: Fail) -> None:
    given = arguments(node)
    if given.custom != custom:
        fail("collectives are those that the user has set", node, f"{node} has custom={given.custom}")
    if (found := list(given.messages)) != due:
        fail(invariant, node, f"{node} has messages {found}, its bucket {due}")


def _kept_layout(node: fx.Node, scale: int, context: PassContext, fail: Fail) -> None:
    """A shard that goes from forward to backward is cut out of its own bucket and gathered to the same buffer."""
    record, model = node.meta["fsdp"], context.model
    bucket = context.bucket_of(record.params[0])
    numel_at = {scale * bucket.offsets[p.name]: scale * p.shard_numel for p in bucket.parameters}
    given = arguments(node)
    chunks = dict(zip(given.offsets, given.numels, strict=False))
    invariant = "a kept shard has its bucket's layout"
    if len(given.offsets) != len(given.numels) or not chunks.items() <= numel_at.items():
        wrong = f"chunks at {given.offsets} of {given.numels} elements, the bucket's are {numel_at}"
        fail(invariant, node, wrong)
    if node.target is dialect.keep_shard and chunks != numel_at:
        fail(invariant, node, f"only the chunks at {given.offsets} are kept, the bucket's are {numel_at}")
    if (given.length, given.group) != (scale * bucket.shard_numel, model.reshard_group):
        expected = f"{scale * bucket.shard_numel} elements over group {model.reshard_group!r}"
        fail(invariant, node, f"{given.length} elements over group {given.group!r}, and not {expected}")
    source = node.all_input_nodes[0]
    if source.meta["fsdp"].bucket != record.bucket:
        fail(invariant, node, f"{node} is of bucket {record.bucket} and takes {source}")
