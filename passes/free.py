"""Gathered buffers are freed after their last use through any alias.

Not right after it but before the next collective starts or is waited for: nothing is allocated for a gather in
between, and a free in the middle of a unit's computation would cut its compute region in two.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from graph_fsdp.passes import dialect
from graph_fsdp.passes.dialect import NodeRecord, Role, set_record
from graph_fsdp.passes.graph import Graph
from graph_fsdp.passes.pipeline import GraphPass, PassContext


class Free(GraphPass):
    """A buffer that the graph returns (kept for backward, or a parameter that the model gives out) is not freed:
    its record says that it escapes, and it is given back when nobody holds it any more."""

    name = "free"
    requires = ("bucketed",)
    provides = ("freed",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        roots = graph.alias_roots()
        buffers = graph.with_role(Role.GATHER_START, Role.KEPT)
        last_use: dict[fx.Node, fx.Node] = {buffer: buffer for buffer in buffers}
        for node in graph.fx_graph.nodes:
            for source in node.all_input_nodes:
                for root in roots[source]:
                    if root in last_use:
                        last_use[root] = node
        next_collective: dict[fx.Node, fx.Node] = {}
        upcoming = graph.output
        for node in reversed(graph.fx_graph.nodes):
            next_collective[node] = upcoming
            if node.target in dialect.STARTS or node.target in dialect.WAITS:
                upcoming = node
        freed = 0
        inputs = graph.placeholders
        for buffer in buffers:
            last = last_use[buffer]
            if last.op == "output":
                for node in (buffer, *(u for u in buffer.users if dialect.has_role(u, Role.GATHER_WAIT))):
                    set_record(node, dataclasses.replace(node.meta["fsdp"], escapes=True))
                continue
            record: NodeRecord = buffer.meta["fsdp"]
            handle = next((u for u in buffer.users if dialect.has_role(u, Role.GATHER_WAIT)), buffer)
            if last.op == "placeholder":  # received and not used
                last = inputs[-1]
            with graph.fx_graph.inserting_before(next_collective[last]):
                node = graph.fx_graph.create_node(
                    "call_function", dialect.free, (handle,), name=f"free_{record.bucket}"
                )
            node.meta["val"] = None
            set_record(node, dataclasses.replace(record, role=Role.FREE, escapes=False))
            freed += 1
        return f"{freed} of {len(buffers)} buffers freed in this graph"
