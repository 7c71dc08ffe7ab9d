"""The verifier checks a bucket's layout: what is gathered and reduced lies where the bucket says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import fx

from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import argument, arguments, operand
from graph_fsdp.passes.ir.spec import BucketSpec
from graph_fsdp.passes.transforms.keep_shard import scale_of

_GATHER_INVARIANT = "a gathered bucket has its own layout"
_KEPT_INVARIANT = "a kept shard has its bucket's layout"
_CUSTOM_INVARIANT = "collectives are those that the user has set"
# Raises the verifier's error: the invariant, the node that breaks it, and how.
Fail = Callable[[str, fx.Node, str], NoReturn]


def check_layout(node: fx.Node, graph: Graph, context: PassContext, fail: Fail) -> None:
    """Chunks go into a gather, and parameters come out of it, at the places that the bucket's layout says; gradients go
    into a reduction in the messages that it says."""
    if node.target is dialect.all_gather_start or has_role(node, Role.KEEP_SHARD):
        _check_chunks(node, context.bucket_of(node.meta["fsdp"].params[0]), context, fail)
    elif node.target is dialect.reduce_scatter_start and "bucketed" in graph.facts:
        invariant = "a bucket is reduced in the same messages on all ranks"
        names, custom = node.meta["fsdp"].params, context.settings.custom_reduce_scatter
        messages = context.bucket_of(names[0]).reduced_in([context.model.parameters[name] for name in names])
        _check_messages(node, custom, messages, invariant, fail)
    elif has_role(node, Role.UNPACK):
        name = node.meta["fsdp"].params[0]
        bucket, parameter = context.bucket_of(name), context.model.spec_of(name)
        piece = node
        while isinstance(piece.args[0], fx.Node) and not has_role(piece.args[0], Role.GATHER_WAIT, Role.KEPT):
            piece = piece.args[0]
        begin = bucket.offsets[name] * bucket.world_size
        expected = (0, begin, begin + parameter.shard_numel * bucket.world_size)
        if piece.args[1:] != expected:
            wrong = f"{name} lies at {expected[1:]} of its bucket and is read at {piece.args[2:]}"
            fail(_GATHER_INVARIANT, node, wrong)


def _check_chunks(node: fx.Node, bucket: BucketSpec, context: PassContext, fail: Fail) -> None:
    """What is gathered, or cut out of a gathered bucket to be gathered in backward."""
    model, names, scale = context.model, [p.name for p in bucket.parameters], 1
    source = argument(node, "shards")[0] if node.target is dialect.all_gather_start else operand(node)
    is_fetched, is_kept = has_role(source, Role.FETCH_WAIT), has_role(source, Role.KEPT_SHARD)
    if is_kept:
        scale = scale_of(context)
        name_at = {scale * offset: name for name, offset in bucket.offsets.items()}
        names = [name_at.get(offset, "") for offset in argument(node, "offsets")]
    elif node.target is dialect.all_gather_start:
        shards = argument(operand(source) if is_fetched else node, "shards")
        names = [shard.meta["fsdp"].params[0] for shard in shards]
    numel_of = {p.name: p.shard_numel for p in bucket.parameters}
    due = {"offsets": [scale * bucket.offsets.get(name, -1) for name in names], "length": scale * bucket.shard_numel}
    numels = {"numels": [scale * numel_of.get(name, -1) for name in names]}
    if is_fetched:
        _check(operand(source), due, _GATHER_INVARIANT, fail)
    if is_kept or node.target is dialect.keep_shard:
        _check(node, {**due, **numels, "group": model.reshard_group}, _KEPT_INVARIANT, fail)
        if source.meta["fsdp"].bucket != bucket.name:
            fail(_KEPT_INVARIANT, node, f"{node} is of bucket {bucket.name} and takes {source}")
    else:
        _check(node, {**due, **(numels if is_fetched else {}), "group": model.group}, _GATHER_INVARIANT, fail)
    if node.target is dialect.all_gather_start:
        invariant = "a bucket is gathered in the same messages on all ranks"
        _check_messages(node, context.settings.custom_all_gather, bucket.message_arguments(scale), invariant, fail)


def _check(node: fx.Node, due: Mapping[str, Any], invariant: str, fail: Fail) -> None:
    given = arguments(node)
    for name, value in due.items():
        found = getattr(given, name)
        if (list(found) if isinstance(value, list) else found) != value:
            fail(invariant, node, f"{node} has {name}={found}, its bucket {value}")


def _check_messages(node: fx.Node, custom: bool, messages: list[int], invariant: str, fail: Fail) -> None:
    _check(node, {"custom": custom}, _CUSTOM_INVARIANT, fail)
    _check(node, {"messages": [] if custom else messages}, invariant, fail)
