"""The optimizer steps a bucket in backward, when its reduction has ended, instead of backward returning its gradients.

A bucket's gradients are given to the optimizer behind the wait for its reduction, and are then free. The step writes to
the shards, which the bucket's gathers in this graph read until they are waited for: it comes behind these too. Gathered
parameters lie in memory of their own, so that what is computed with them later sees the values of before.

Gradients that a loss may leave out are returned as ever: whether there are any, only the end of backward tells.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.transforms.edits import recorded


@dataclass(frozen=True, repr=False)
class UpdateInBackward(GraphPass):
    """Gives gradients of ``context.settings.stepped`` to the optimizer. In the pipeline once an optimizer is to step in
    backward (``distribute_optimizer(…, in_backward=True)``)."""

    name = "update"
    phases = ("backward",)
    requires = ("scheduled",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        may_be_absent = graph.absent.tangents if graph.absent is not None else ()
        gradients: dict[str, dict[fx.Node, str]] = {}
        for index, node in enumerate(graph.outputs):
            if isinstance(node, fx.Node) and has_role(node, Role.SHARD_GRAD) and index not in may_be_absent:
                (name,) = node.meta["fsdp"].params
                if name in context.settings.stepped:
                    gradients.setdefault(node.meta["fsdp"].bucket, {})[node] = name
        positions = graph.positions()
        waits = {name: gather.wait for gather in graph.gathers if gather.wait for name in gather.params}
        updates: dict[fx.Node, fx.Node] = {}
        for members in gradients.values():
            read = [waits[name] for name in members.values() if name in waits]
            place, last = max([*members, *read], key=positions.__getitem__), list(members)[-1]
            for node, name in reversed(members.items()):
                with graph.fx_graph.inserting_after(place):
                    arguments = (node, name, node is last)
                    updates[node] = graph.call(dialect.update_shard, arguments, name=f"{name}.updated", like=node)
                recorded(updates[node], node.meta["fsdp"], Role.UPDATE)
        graph.output.args = (tuple(updates.get(value, value) for value in graph.outputs),)
        return f"{len(updates)} parameters are stepped, in {len(gradients)} buckets"
