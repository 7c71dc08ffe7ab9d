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
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.passes.pipeline import add_stage


def take_unsharded(graphs: Sequence[Graph], context: PassContext) -> None:
    """``use_unsharded`` where a unit is whole, with a stage of its own."""
    begin = time.perf_counter()
    if context.settings.unsharded and use_unsharded(graphs, context):
        for graph in graphs:
            graph.module.recompile()
            add_stage(graph, context, "unsharded", time.perf_counter() - begin)


def use_unsharded(graphs: Sequence[Graph], context: PassContext) -> bool:
    """Replace the gathers of whole parameters by inputs; whether there are any. ``graphs``: forward and backward, or
    the inference graph. ``context.unsharded`` then says which parameters forward or inference take, in order."""
    whole = [p.name for p in context.model.parameters.values() if p.unit in context.settings.unsharded]
    gathers = [_gathers(graph) for graph in graphs]
    whole = [name for name in whole if any(name in found for found in gathers)]
    if not whole:
        return False
    first = graphs[0]
    like = {name: next(found[name] for found in gathers if name in found).meta["val"] for name in whole}
    inputs = _take(first, gathers[0], first.placeholders[-1].next, {name: like[name] for name in whole}, context)
    context.unsharded[first.phase] = whole
    if len(graphs) > 1:
        backward = graphs[1]
        saved = [name for name in whole if name in gathers[1]]
        outputs = operands(first.output)
        # Saved tensors follow the user's outputs; see [Note: saved tensors] in reshard.py.
        outputs[context.forward_outputs : context.forward_outputs] = [inputs[name] for name in saved]
        first.output.args = (tuple(outputs),)
        before = next(n for n in backward.placeholders if isinstance(n.meta.get("val"), torch.Tensor))
        _take(backward, gathers[1], before, {name: like[name] for name in saved}, context)
    return True


def _gathers(graph: Graph) -> dict[str, fx.Node]:
    nodes = [node for node in graph.fx_graph.nodes if node.target is dialect.gather_param]
    return {str(dialect.argument(node, "param")): node for node in nodes}


def _take(
    graph: Graph,
    gathers: dict[str, fx.Node],
    before: fx.Node,
    values: dict[str, torch.Tensor],
    context: PassContext,
) -> dict[str, fx.Node]:
    taken = {}
    for name, value in values.items():
        with graph.fx_graph.inserting_before(before):
            node = graph.fx_graph.placeholder(f"whole_{name.replace('.', '_')}")
        node.meta["val"] = value
        bucket = context.model.bucket_of.get(name)
        unit, label = context.model.spec_of(name).unit, bucket.name if bucket else ""
        taken[name] = set_record(node, NodeRecord(Role.UNSHARDED, unit, label, (name,), nbytes(value)))
    graph.replace({gathers[name]: node for name, node in taken.items() if name in gathers})
    return taken
