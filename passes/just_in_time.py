"""The backward graph: recomputed nodes move to where they are first needed.

The partitioner puts everything that backward recomputes before its first gradient, in forward order. In that order
all buckets would be gathered at once, the first unit's first. Walking the gradient nodes in autograd's order and
emitting each one's inputs just before it gives the order in which an eager backward would run. Linear.
"""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes.dialect import Role
from graph_fsdp.passes.graph import Graph
from graph_fsdp.passes.pipeline import GraphPass, PassContext


class JustInTime(GraphPass):
    name = "just_in_time"
    phases = ("backward",)
    requires = ("partitioned",)
    provides = ("just_in_time",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        positions = graph.positions()
        placeholders = graph.placeholders
        from_gradient: set[fx.Node] = set(graph.with_role(Role.TANGENT))
        roots = []
        for node in graph.fx_graph.nodes:
            if any(i in from_gradient for i in node.all_input_nodes):
                from_gradient.add(node)
                roots.append(node)
        if not roots or roots[-1] is not graph.output:
            roots.append(graph.output)
        order = list(placeholders)
        emitted = set(placeholders)
        for root in roots:
            stack = [root]
            while stack:
                node = stack[-1]
                if node in emitted:
                    stack.pop()
                    continue
                missing = [i for i in node.all_input_nodes if i not in emitted]
                if missing:
                    stack += sorted(missing, key=positions.__getitem__, reverse=True)
                    continue
                stack.pop()
                emitted.add(node)
                order.append(node)
        # Nothing reads them, but they write (in-place updates of buffers): they stay, before the output.
        unread = [node for node in graph.fx_graph.nodes if node not in emitted]
        order[-1:-1] = unread
        before = list(graph.fx_graph.nodes)
        graph.reorder(order)
        moved = sum(a is not b for a, b in zip(before, order, strict=True))
        return f"{moved} of {len(order)} nodes change place"
