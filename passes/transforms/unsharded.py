"""Parameters that are whole before the forward begins are inputs of the graphs, and nothing of them is gathered.

Not a pass of the pipeline: whatever pipeline the user has, a model that was unsharded must not gather. It runs on what
the partitioner left, before all passes. A graph takes such parameters behind its other inputs; backward, what forward
saved of them. Gradients are reduced to shards as ever.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import fx

from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.pipeline import add_stage
from graph_fsdp.passes.transforms.edits import add_input, add_outputs


def take_unsharded(graphs: Sequence[Graph], context: PassContext) -> None:
    """Replace the gathers of whole parameters by inputs, if there are any; then each graph has a stage of its own.
    ``graphs``: forward and backward, or the inference graph. ``unsharded`` of forward or inference then
    says which parameters it takes, in order."""
    begin = time.perf_counter()
    units = context.settings.unsharded
    gathers = [_gathers(graph) if units else {} for graph in graphs]
    like = {name: gather.meta["val"] for found in reversed(gathers) for name, gather in found.items()}
    whole = [p.name for p in context.model.parameters.values() if p.unit in units and p.name in like]
    if not whole:
        return

    def take(graph: Graph, found: dict[str, fx.Node], before: fx.Node, names: list[str]) -> dict[str, fx.Node]:
        taken = {}
        for name in names:
            bucket, unit = context.model.bucket_of.get(name), context.model.spec_of(name).unit
            record = NodeRecord(Role.UNSHARDED, unit, bucket.name if bucket else "", (name,), nbytes(like[name]))
            taken[name] = add_input(graph, before, f"whole_{name.replace('.', '_')}", like[name], record)
        graph.replace({found[name]: node for name, node in taken.items() if name in found})
        return taken

    first, *rest = graphs
    first.unsharded = whole
    inputs = take(first, gathers[0], first.placeholders[-1].next, whole)
    for backward in rest:
        saved = [name for name in whole if name in gathers[1]]
        # Saved tensors follow the user's outputs; see [Note: saved tensors] in reshard.py.
        add_outputs(first, context.forward_outputs, [inputs[name] for name in saved])
        before = next(n for n in backward.placeholders if isinstance(n.meta.get("val"), torch.Tensor))
        take(backward, gathers[1], before, saved)
    for graph in graphs:
        graph.module.recompile()
        add_stage(graph, context, "unsharded", time.perf_counter() - begin)


def _gathers(graph: Graph) -> dict[str, fx.Node]:
    return {dialect.parameter_of(node): node for node in graph.fx_graph.nodes if node.target is dialect.gather_param}
