"""Gathered parameters in the joint graph are recomputed in backward, and never saved for it.

The partitioner saves what is dear to compute, and a gather is dear; left alone it would keep every full parameter
from forward to backward. Gathers, and what is cheap and computed from parameters alone (views, casts, pointwise
operators), are therefore tagged MUST_RECOMPUTE. Whether a bucket is kept after all is one decision per bucket and
belongs to the reshard pass.

What a region of ``torch.utils.checkpoint`` gives to code behind it is saved, where backward needs it. Else the
region would be computed again before the backward of that code begins, whose gradients would be in memory beside it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from graph_fsdp.compat import CheckpointPolicy
from graph_fsdp.passes.analysis.kernels import Kind, kind_of
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.effects import aliased_inputs, is_cheap
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.transforms.payloads import ancestors

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
            if has_role(node, Role.PAYLOAD_REDUCE):  # a few numbers, for which ranks would communicate again
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif (
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
        checkpointed = [n for n in graph.fx_graph.nodes if n.meta.get("recompute") in _RECOMPUTED and n not in tagged]
        context.recomputes_activations = bool(checkpointed)
        for node in _results(checkpointed, graph, context):
            save(node)
        return f"{len(tagged)} nodes computed from parameters alone are recomputed in backward"


def is_of_parameters(node: fx.Node) -> bool:
    """Whether the pass has tagged the node."""
    return node.meta.get("ac_graph_id") == _REGION_ID


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _results(checkpointed: list[fx.Node], graph: Graph, context: PassContext) -> list[fx.Node]:
    """What forward computes in a region of the user's and reads outside of it."""
    forward, found = forward_nodes(graph, context), []
    for node in checkpointed:
        region = node.meta.get("ac_graph_id")
        if node.target is not operator.getitem and any(
            reader in forward and reader.meta.get("ac_graph_id") != region for reader in _readers(node)
        ):
            found.append(node)
    return found


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Of the value, or of an element of it."""
    for user in node.users:
        yield from user.users if user.target is operator.getitem else (user,)


def forward_nodes(graph: Graph, context: PassContext) -> set[fx.Node]:
    """What the user's outputs are computed from in a joint or forward graph, and they themselves."""
    outputs = graph.output.args[0]
    assert isinstance(outputs, (list, tuple))
    found: set[fx.Node] = {node for node in outputs[: context.forward_outputs] if isinstance(node, fx.Node)}
    for node in reversed(graph.fx_graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def gradient_nodes(graph: Graph, context: PassContext) -> set[fx.Node]:
    """What a joint graph computes from the gradients of its outputs, and these."""
    found = set(graph.placeholders[context.tangents])
    for node in graph.fx_graph.nodes:
        if node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def save(node: fx.Node) -> None:
    """The node's value is not computed again. A view or an element of a tuple has no memory of its own: its base, and
    not the view, is what the partitioner can save."""
    while True:
        sources = aliased_inputs(node)
        if not sources:
            tag(node, CheckpointPolicy.MUST_SAVE)
        if len(sources) != 1 or sources[0].op != "call_function" or is_of_parameters(sources[0]):
            return
        node = sources[0]


def tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    """An operator that returns several tensors is saved or computed again with all of them."""
    node.meta["recompute"] = policy
    for user in node.users:
        if user.target is operator.getitem:
            user.meta["recompute"] = policy


def _gathers_payload(node: fx.Node, context: PassContext) -> bool:
    return has_role(node, Role.GATHER) and node.meta["fsdp"].params[0] in context.model.payloads


def _is_restoring(node: fx.Node, restored: set[fx.Node]) -> bool:
    return kind_of(node) is Kind.FUSIBLE and not restored.isdisjoint(node.all_input_nodes)
