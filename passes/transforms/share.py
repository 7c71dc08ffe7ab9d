"""Gathered buckets that one piece of a broken model hands to a later piece of the same forward call.

A model that breaks into several graphs (``fullgraph=False``) may use a unit in more than one. A piece *takes* a bucket
that an earlier one has gathered: an input, in place of a gather. A piece *gives* what it gathered, or took, to a later
one: an output behind all others, and nothing frees it. Which ones is decided outside (``PassContext.sharing``);
backward, and what forward keeps for it, are the same for all variants of a piece.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import fx

from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.transforms.edits import add_input, add_outputs, mark_escaping, use_instead

if TYPE_CHECKING:
    from graph_fsdp.passes.context import PassContext
    from graph_fsdp.passes.ir.graph import Graph


def share_buckets(graph: Graph, context: PassContext) -> None:
    """Of a bucketed graph: ``graph.taken`` then names what it takes, in the order of its last inputs, and
    ``graph.given`` what it gives, in that of its last outputs."""
    sharing = context.sharing
    if not sharing or graph.phase == "backward":
        return
    inputs = graph.placeholders
    # What unshard() made whole follows what is shared, see ``UnshardedUnits.feeding``.
    before = next((node for node in inputs if has_role(node, Role.UNSHARDED)), inputs[-1].next)
    buffers: dict[str, fx.Node] = {}
    for wait in graph.with_role(Role.GATHER_WAIT):
        record, bucket = wait.meta["fsdp"], wait.meta["fsdp"].bucket
        buffers[bucket] = wait
        if bucket in sharing.takes:
            kept = dataclasses.replace(record, role=Role.KEPT)
            name = f"shared_{bucket.replace('.', '_')}"
            buffers[bucket] = add_input(graph, before, name, wait.meta["val"], kept)
            use_instead(graph, wait, buffers[bucket])
    graph.taken = [bucket for bucket in buffers if bucket in sharing.takes]
    graph.given = {bucket: node for bucket, node in buffers.items() if bucket in sharing.gives}
    for node in graph.given.values():
        mark_escaping(node)
    add_outputs(graph, None, graph.given.values())
