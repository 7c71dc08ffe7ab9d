"""The joint graph: what is gathered is never saved for backward.

The partitioner saves what is dear to compute, and a gather is dear; left alone it would keep every full parameter
from forward to backward. Gathers, and what is cheap and computed from parameters alone (views, casts, pointwise
operators), are therefore tagged MUST_RECOMPUTE. Whether a bucket is kept after all is one decision per bucket and
belongs to the reshard pass.
"""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes.compat import CheckpointPolicy
from graph_fsdp.passes.dialect import Role, has_role
from graph_fsdp.passes.graph import Graph, is_cheap
from graph_fsdp.passes.kernels import Kind, kind_of
from graph_fsdp.passes.payloads import ancestors
from graph_fsdp.passes.pipeline import GraphPass, PassContext

# The partitioner saves a recomputed node whose user belongs to a later checkpoint region (a higher id). Gathers
# feed users in every region, so they take an id above all of the user's own.
_REGION_ID = 2**31


class TagRecompute(GraphPass):
    name = "recompute"
    phases = ("joint",)
    requires = ("annotated",)
    provides = ("recompute_tagged",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        tagged: set[fx.Node] = set()
        payloads = ancestors(graph.with_role(Role.PAYLOAD))
        restored: set[fx.Node] = set()  # computed from gathered payloads: all that fuses is recomputed, casts too
        for node in graph.fx_graph.nodes:
            if (
                has_role(node, Role.GATHER)
                or node in payloads
                or (
                    node.all_input_nodes
                    and tagged.issuperset(node.all_input_nodes)
                    and (is_cheap(node) or _is_restoring(node, restored))
                )
            ):
                tagged.add(node)
                if not restored.isdisjoint(node.all_input_nodes) or _gathers_payload(node, context):
                    restored.add(node)
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = _REGION_ID
        return f"{len(tagged)} nodes computed from parameters alone are recomputed in backward"


def _gathers_payload(node: fx.Node, context: PassContext) -> bool:
    return has_role(node, Role.GATHER) and node.meta["fsdp"].params[0] in context.model.payloads


def _is_restoring(node: fx.Node, restored: set[fx.Node]) -> bool:
    return kind_of(node) is Kind.FUSIBLE and not restored.isdisjoint(node.all_input_nodes)
