"""Which buckets stay gathered from forward to backward (ZeRO-2) and which are gathered again (ZeRO-3).

A kept bucket becomes one more tensor that forward saves and backward receives: its buffer, whole. Its gather in
backward disappears.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from graph_fsdp.passes.dialect import Role, set_record
from graph_fsdp.passes.graph import Graph
from graph_fsdp.passes.pipeline import GraphPass, PassContext


class Reshard(GraphPass):
    """``reshard_after_forward``: True gathers every bucket again in backward, False keeps every bucket, None keeps
    only the unit that forward uses last, whose backward comes first and would gather it again at once."""

    name = "reshard"
    phases = ("forward", "backward")
    requires = ("bucketed",)
    provides = ("resharded",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        if graph.phase == "forward":
            return self._keep(graph, context)
        return self._receive(graph, context)

    def _keep(self, graph: Graph, context: PassContext) -> str:
        waits = graph.with_role(Role.GATHER_WAIT)
        kept = self._choose(graph, waits, context)
        outputs = list(graph.output.args[0])  # type: ignore[arg-type]
        # Saved tensors follow the user's outputs; ours come first among them (see [Note: saved tensors]).
        outputs[context.forward_outputs : context.forward_outputs] = kept
        for wait in kept:
            start = wait.args[0]
            assert isinstance(start, fx.Node)
            for node in (start, wait):
                set_record(node, dataclasses.replace(node.meta["fsdp"], escapes=True))
        graph.output.args = (tuple(outputs),)
        context.kept = {wait.meta["fsdp"].bucket: wait for wait in kept}
        names = ", ".join(context.kept) or "none"
        return f"kept for backward: {names}; gathered again: {len(waits) - len(kept)}"

    @staticmethod
    def _choose(graph: Graph, waits: list[fx.Node], context: PassContext) -> list[fx.Node]:
        if context.reshard_after_forward is True or not waits:
            return []
        if context.reshard_after_forward is False:
            return waits
        roots = graph.alias_roots()
        last_use: dict[str, int] = {}
        owner = {wait.args[0]: wait for wait in waits}
        for index, node in enumerate(graph.fx_graph.nodes):
            if node.op == "output":
                continue
            for source in node.all_input_nodes:
                for root in roots[source]:
                    if root in owner:
                        last_use[owner[root].meta["fsdp"].unit] = index
        last_unit = max(last_use, key=last_use.__getitem__)
        return [wait for wait in waits if wait.meta["fsdp"].unit == last_unit]

    @staticmethod
    def _receive(graph: Graph, context: PassContext) -> str:
        # [Note: saved tensors] AOTAutograd's backward takes symbolic sizes, then saved tensors, then tangents. Ours
        # go in front of the saved tensors, as they stand in front of them among forward's outputs.
        first_tensor = next(n for n in graph.placeholders if isinstance(n.meta.get("val"), torch.Tensor))
        gathered = {wait.meta["fsdp"].bucket: wait for wait in graph.with_role(Role.GATHER_WAIT)}
        removed: list[str] = []
        for bucket, source in context.kept.items():
            with graph.fx_graph.inserting_before(first_tensor):
                kept = graph.fx_graph.placeholder(f"kept_{len(removed)}")
            kept.meta["val"] = source.meta["val"]
            set_record(kept, dataclasses.replace(source.meta["fsdp"], role=Role.KEPT))
            removed.append(bucket)
            if bucket in gathered:
                _use_kept(graph, gathered[bucket], kept)
        return f"received from forward: {', '.join(removed) or 'none'}"


def _use_kept(graph: Graph, wait: fx.Node, kept: fx.Node) -> None:
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    wait.replace_all_uses_with(kept)
    graph.fx_graph.erase_node(wait)
    graph.fx_graph.erase_node(start)
