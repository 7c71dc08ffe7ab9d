"""Where forward writes to an input that backward needs, a copy of the input's old value is saved.

A module may write to its buffers, or to its inputs, which AOTAutograd makes a copy at the end of the graph. The
partitioner takes inputs for free, and does not ask whether they are still the same when backward reads them. torch's
own ``aot_eager`` has wrong gradients from that. So what is saved of such an input is a copy of what it was.

Not a pass of the pipeline: it mends what the partitioner left, before all passes, whatever pipeline the user has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from graph_fsdp.passes.ir.effects import aliased_inputs, mutated_inputs
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operands


def save_as_they_were(forward: Graph, user_outputs: int) -> None:
    """Copy inputs that forward writes to and saves, or saves views of, at its beginning. ``user_outputs``: number of
    outputs that are the user's; saved tensors follow."""
    nodes, roots = forward.nodes, forward.alias_roots()

    def of(found: Iterable[Any]) -> set[fx.Node]:
        return {root for node in found if isinstance(node, fx.Node) for root in roots[node] if root.op == "placeholder"}

    targets = {target: node for node in nodes for target in mutated_inputs(node)}
    outputs: list[Any] = operands(forward.output)
    written, saved = of(targets), of(outputs[user_outputs:])
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
