"""Mend what the partitioner leaves, before all passes and whatever pipeline the user has.

**Inputs that forward writes to**: where such an input is saved, a copy of its old value is saved instead, or backward
would read the new one (*Saved inputs that forward writes to* in docs/decisions/memory.md).

**Sizes that the data decides** are made equal before the partition where operators compute the same.

**Parameters that are whole before the forward begins** are inputs and not gathered. A graph takes them behind its other
inputs; backward, what forward saved of them. Gradients are reduced to shards as ever.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role
from graph_fsdp.passes.ir.effects import aliased_inputs, draws, mutated_inputs
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.pipeline import add_stage
from graph_fsdp.passes.transforms.edits import add_input, add_outputs, first_saved


def save_as_they_were(forward: Graph, user_outputs: int, written_later: Collection[fx.Node]) -> None:
    """Copy inputs at forward's beginning that it writes to and saves, or saves views of. ``user_outputs``: how many
    outputs are the user's; saved tensors follow. ``written_later``: inputs that are written to behind the graph."""
    nodes = forward.nodes
    targets = {target: node for node in nodes for target in mutated_inputs(node)}
    if not targets and not written_later:
        return
    roots = forward.alias_roots()

    def of(found: Iterable[Any]) -> set[fx.Node]:
        return {root for node in found if isinstance(node, fx.Node) for root in roots[node] if root.op == "placeholder"}

    outputs = forward.outputs
    written, saved = {*of(targets), *written_later}, of(outputs[user_outputs:])
    copied = [node for node in forward.placeholders if node in written and node in saved]
    sources = set(targets)  # nodes that are written to, and what they are views of
    for node in reversed(nodes):
        sources.update(aliased_inputs(node) if node in sources else ())
    writing = {*targets.values(), *sources, forward.output}
    for node in copied:
        users = [user for user in node.users if user not in writing]
        with forward.fx_graph.inserting_after(forward.placeholders[-1]):
            copy = forward.call(torch.ops.aten.clone.default, (node,), like=node, name=f"{node.name}_as_it_was")
        for user in users:
            user.replace_input_with(node, copy)
        outputs[user_outputs:] = [copy if value is node else value for value in outputs[user_outputs:]]
    forward.output.args = (tuple(outputs),)


def unify_sizes(joint: Graph) -> None:
    """Have operators that compute the same results of the same sizes, where the data decides them (the rows of
    ``x[mask]``). The partitioner keeps one of such operators, and the values of what follows the others as they were,
    with sizes that no operator defines any more."""
    if not any("unbacked_bindings" in node.meta for node in joint.nodes):
        return
    first: dict[str, fx.Node] = {}  # of those that compute the same
    same: dict[fx.Node, fx.Node] = {}
    for node in joint.nodes:
        found = node
        if node.op == "call_function" and not draws(node):
            args = fx.map_arg((node.args, node.kwargs), lambda n: same[n])
            found = first.setdefault(f"{node.target} of {args}", node)
        same[node] = found
        if found is not node and "unbacked_bindings" in node.meta:
            compat.unify_sizes(node.meta["val"], found.meta["val"])


def take_unsharded(graphs: Sequence[Graph], context: PassContext) -> None:
    """Replace the gathers of whole parameters in ``graphs``, forward and backward or inference, by inputs. If there are
    any, each graph gets a stage, and ``unsharded`` of the first names its parameters in order."""
    begin = time.perf_counter()
    model, units = context.model, context.settings.unsharded
    gathers = [{dialect.parameter_of(n): n for n in g.nodes if n.target is dialect.gather_param} for g in graphs]
    like = {name: gather.meta["val"] for found in reversed(gathers) for name, gather in found.items()}
    whole = [p.name for p in model.parameters.values() if p.unit in units and p.name in like]
    if not whole:
        return
    first, names, taken = graphs[0], whole, dict[str, fx.Node]()
    first.unsharded = whole
    for graph, found in zip(graphs, gathers, strict=True):
        before = first.placeholders[-1].next
        if graph is not first:
            names = [name for name in whole if name in found]
            add_outputs(first, context.forward_outputs, [taken[name] for name in names])
            before = first_saved(graph)
        for name in names:
            bucket, unit = model.bucket_of.get(name), model.spec_of(name).unit
            record = NodeRecord(Role.UNSHARDED, unit, bucket.name if bucket else "", (name,), nbytes(like[name]))
            taken[name] = add_input(graph, before, f"whole_{name.replace('.', '_')}", like[name], record)
        graph.replace({found[name]: taken[name] for name in names if name in found})
    for graph in graphs:
        graph.module.recompile()
        add_stage(graph, context, "unsharded", time.perf_counter() - begin)
