"""Gathered parameters in the joint graph are recomputed in backward, and never saved for it.

Gathers, and what is cheap and computed from parameters alone (views, casts, pointwise operators), are tagged
MUST_RECOMPUTE, as the partitioner would save every full parameter. The reshard pass decides per bucket what is kept.
What backward needs of the results of a ``torch.utils.checkpoint`` region is saved (docs/decisions/memory.md).

Which buckets backward gathers is then no choice of the partitioner, which looks at sizes (``settle_gathers``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import fx

from graph_fsdp.compat import CheckpointPolicy, inputs_of
from graph_fsdp.passes.analysis.kernels import Kind, kind_of
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.effects import aliased_inputs, is_cheap, is_random
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.passes.transforms.edits import ancestors, computed_of, computed_of_constants, reached_from

# The partitioner saves a recomputed node whose user belongs to a later checkpoint region (a higher id). Gathers
# feed users in every region, so they take an id above all of the user's own.
_REGION_ID = 2**31

aten = torch.ops.aten
# Masks and constants of dequantization, which are kernels by themselves where nothing fuses them.
_DEQUANTIZING = frozenset((aten.full_like.default, aten.index_put.default, aten.lift_fresh_copy.default))


class TagRecompute(GraphPass):
    """Tags gathers and what is computed from parameters alone to be recomputed."""

    name = "recompute"
    phases = ("joint",)
    requires = ("annotated",)
    provides = ("recompute_tagged",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        once, gathers = graph.with_role(Role.PAYLOAD_REDUCE), graph.with_role(Role.GATHER)
        sources = {*gathers, *ancestors(graph.with_role(Role.PAYLOAD))}.difference(once)
        # Of what is computed from payloads and quantized parameters, all that fuses is recomputed, casts too, and what
        # dequantization has besides.
        restored = reached_from(graph, [n for n in gathers if _is_compressed(n.meta["fsdp"].params[0], context.model)])

        def is_recomputed(node: fx.Node) -> bool:
            dequantizes = kind_of(node) is Kind.FUSIBLE or node.target in _DEQUANTIZING
            return is_cheap(node) or (node in restored and dequantizes)

        constants = _constants(graph) if restored else set[fx.Node]()
        sizes = {node for node in graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)}  # as numbers are
        tagged = computed_of(graph.nodes, (sources | constants | sizes).__contains__, is_recomputed) - sizes
        tagged -= (constants - sources) - ancestors(tagged & restored)
        for node in tagged:
            if node.op == "get_attr":
                continue
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _REGION_ID
        for node in once:  # a few numbers, for which ranks would communicate again
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        checkpointed = [n for n in graph.fx_graph.nodes if _is_recomputed(n) and n not in tagged]
        graph.recomputes_activations = bool(checkpointed)
        for node in _results(checkpointed, graph, context):
            save(node)
        return f"{len(tagged)} nodes computed from parameters alone are recomputed in backward"


def _is_compressed(name: str, model: ModelSpec) -> bool:
    dtype = model.spec_of(name).param_dtype
    return name in model.payloads or not (dtype.is_floating_point or dtype.is_complex)


def _constants(graph: Graph) -> set[fx.Node]:
    """Return what is made of no input and not drawn at random, as a table for values that are dequantized is."""

    def is_made(node: fx.Node) -> bool:
        made = kind_of(node) in (Kind.FREE, Kind.FUSIBLE) or node.target in _DEQUANTIZING
        return node.op == "call_function" and made and not is_random(node)

    return computed_of_constants(graph.fx_graph.nodes, is_made)


def is_of_parameters(node: fx.Node) -> bool:
    """Say whether the pass has tagged the node."""
    return node.meta.get("ac_graph_id") == _REGION_ID


def _results(checkpointed: list[fx.Node], graph: Graph, context: PassContext) -> list[fx.Node]:
    """Return what forward computes in a region of the user's and reads outside of it, or an element of it."""
    forward = forward_nodes(graph, context)

    def leaves(node: fx.Node) -> bool:
        readers = [r for user in node.users for r in (user.users if user.target is operator.getitem else (user,))]
        region = node.meta.get("ac_graph_id")
        return any(reader in forward and reader.meta.get("ac_graph_id") != region for reader in readers)

    return [node for node in checkpointed if node.target is not operator.getitem and leaves(node)]


def settle_gathers(joint: Graph, context: PassContext) -> None:
    """Tag what reads parameters, behind all passes, so that the partitioner does not choose which buckets backward
    gathers: it goes by sizes, and ranks have sizes of their own. Linear but for the buckets that a node reads.

    Where nothing but forward reads a bucket, that is not computed again. What is computed for gradients alone, of
    activations and of a bucket that no gradient reads, is computed in backward.
    """
    forward = forward_nodes(joint, context)
    gradients = reached_from(joint, joint.with_role(Role.TANGENT))
    for_sure = _buckets_read(joint, _is_recomputed)
    gathered = {bucket for node in gradients for bucket in for_sure[node]}
    read = _buckets_read(joint, lambda node: _is_recomputed(node) or (node not in forward and node not in gradients))
    needed = {bucket for node, buckets in read.items() if node not in forward for bucket in buckets}
    for node, buckets in read.items():
        if node.op != "call_function" or "recompute" in node.meta or node in gradients:
            continue
        if node in forward:
            if not buckets <= needed:
                save(node)
        elif not buckets <= gathered:
            tag(node, CheckpointPolicy.MUST_RECOMPUTE)
            node.meta["ac_graph_id"] = math.nan  # of no region: torch 2.9 asks whether one comes after another


def _buckets_read(graph: Graph, carries: Callable[[fx.Node], bool]) -> dict[fx.Node, set[str]]:
    """Return of each node the buckets of which it reads parameters, or what nodes that ``carries`` compute of them."""
    read, carried = dict[fx.Node, set[str]](), dict[fx.Node, set[str]]()
    for node in graph.fx_graph.nodes:
        read[node] = {bucket for source in inputs_of(node) for bucket in carried.get(source, ())}
        if has_role(node, Role.GATHER):
            carried[node] = {node.meta["fsdp"].bucket}
        elif read[node] and carries(node):
            carried[node] = read[node]
    return read


def _is_recomputed(node: fx.Node) -> bool:
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def forward_nodes(graph: Graph, context: PassContext) -> set[fx.Node]:
    """Return the user's outputs in a joint or forward graph and what they are computed from; no inputs."""
    return ancestors(node for node in graph.outputs[: context.forward_outputs] if isinstance(node, fx.Node))


def save(node: fx.Node) -> None:
    """Tag a node's value to be saved; of a view or an element of a tuple, its base, which has the memory."""
    while True:
        sources = aliased_inputs(node)
        if not sources:
            tag(node, CheckpointPolicy.MUST_SAVE)
        if len(sources) != 1 or sources[0].op != "call_function" or is_of_parameters(sources[0]):
            return
        node = sources[0]


def tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    """Tag an operator; one that returns several tensors is saved or computed again with all of them."""
    node.meta["recompute"] = policy
    for user in node.users:
        if user.target is operator.getitem:
            user.meta["recompute"] = policy
