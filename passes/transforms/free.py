"""Gathered buffers are freed after their last use through any alias.

Not right after it but before the next collective starts or is waited for: nothing is allocated for a gather in
between, and a free in the middle of a unit's computation would cut its compute region in two.
"""

from __future__ import annotations

import dataclasses

from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, set_record
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.transforms.edits import mark_escaping


class Free(GraphPass):
    """A buffer that the graph returns (kept for backward, or a parameter that the model gives out) is not freed:
    its record says that it escapes, and it is given back when nobody holds it any more."""

    name = "free"
    requires = ("bucketed",)
    provides = ("freed",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        next_communication = graph.next_communication()
        gathers, inputs = graph.gathers, graph.placeholders
        freed = 0
        for gather in gathers:
            if gather.escapes:
                mark_escaping(gather.buffer)
                continue
            # A bucket that was received and is not used is freed at once.
            last = [gather.wait or inputs[-1], *gather.reads][-1]
            with graph.fx_graph.inserting_before(next_communication[last]):
                call = (dialect.free, (gather.buffer,))
                node = graph.fx_graph.create_node("call_function", *call, name=f"free_{gather.bucket}")
            node.meta["val"] = None
            set_record(node, dataclasses.replace(gather.buffer.meta["fsdp"], role=Role.FREE, escapes=False))
            freed += 1
        return f"{freed} of {len(gathers)} buffers freed in this graph"
