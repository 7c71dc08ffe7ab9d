"""Records say what a node of the dialect does, and for which parameters."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import fx


class Role(enum.Enum):
    """Says what a node does in the schedule."""

    SHARD = "shard"  # a graph input: the local shard of a parameter
    TANGENT = "tangent"  # a graph input: the gradient of an output
    GATHER = "gather"
    GATHER_START = "gather_start"
    GATHER_WAIT = "gather_wait"
    UNPACK = "unpack"  # a view of one parameter in a gathered bucket
    FREE = "free"
    REDUCE = "reduce"
    REDUCE_START = "reduce_start"
    REDUCE_WAIT = "reduce_wait"
    REPLICATE_START = "replicate_start"  # what was reduced, reduced again over the replicas
    REPLICATE_WAIT = "replicate_wait"
    SHARD_GRAD = "shard_grad"  # the gradient of a local shard
    ACCUMULATE = "accumulate"  # keeps a gradient for a later graph, which reduces it
    REDUCE_HOOK = "reduce_hook"
    KEPT = "kept"  # a gathered bucket that goes from forward to backward
    KEEP_SHARD = "keep_shard"  # cuts a shard out of a gathered bucket
    KEPT_SHARD = "kept_shard"  # such a shard, in backward
    UNSHARDED = "unsharded"  # a graph input: a parameter that was whole before the forward began
    OFFLOAD = "offload"  # copies a saved activation to the CPU
    RELOAD = "reload"  # and back, in backward
    PAYLOAD = "payload"  # what is gathered of a parameter that travels as something else
    PAYLOAD_REDUCE = "payload_reduce"  # an all-reduce of an extension's, for payloads
    FETCH_START = "fetch_start"  # shards that are kept on the CPU, to the device
    FETCH_WAIT = "fetch_wait"
    OFFLOAD_START = "offload_start"  # gradients of shards, to the CPU
    OFFLOAD_WAIT = "offload_wait"


@dataclass(frozen=True)
class NodeRecord:
    """Says what a node of the dialect does. ``nbytes`` counts the gathered, reduced or copied buffer. ``slot`` and
    ``landing_slot``, of the start of a gather: where its buffer and its landing buffer lie; None for memory of
    their own, or where there is no such buffer."""

    role: Role
    unit: str
    bucket: str
    params: tuple[str, ...]
    nbytes: int = 0
    escapes: bool = False  # the buffer outlives the graph: kept for backward, or returned to the user
    slot: int | None = None
    landing_slot: int | None = None


def record(node: fx.Node) -> NodeRecord | None:
    """Return the record of a node, None where it is not the dialect's."""
    return node.meta.get("fsdp")


def has_role(node: fx.Node, *roles: Role) -> bool:
    """Say whether a node has a record of one of these roles."""
    found = record(node)
    return found is not None and found.role in roles


def set_record(node: fx.Node, value: NodeRecord) -> fx.Node:
    """Give a node its record, and return the node."""
    node.meta["fsdp"] = value
    return node
