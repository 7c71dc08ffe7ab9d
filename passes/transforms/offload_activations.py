"""Saved activations of units wait on the CPU for their backward.

Forward copies each to the CPU after its last use, and returns the copy in its place. Backward copies it back one region
before the one that reads it. Copies stand next to collectives, where compute regions are cut anyway; in a graph without
collectives, where the next unit begins.

Copied are whole tensors of at least ``SMALLEST`` bytes that a unit computes or reads and that nobody holds beside
autograd. Views are made again (``SaveBases``). What the unit used last needs stays: backward would wait for it at once.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graph_fsdp.compat import CheckpointPolicy, size_hint
from graph_fsdp.passes.analysis.kernels import value_nbytes
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, has_role, record, set_record
from graph_fsdp.passes.ir.effects import aliased_inputs, is_view
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.unit_calls import UnitCall, unit_calls
from graph_fsdp.passes.transforms.edits import reached_from

SMALLEST = 1024  # bytes; a copy of less costs more time than its memory is worth
_WAITS = {
    dialect.offload_activation: dialect.activation_offloaded,
    dialect.reload_activation: dialect.activation_reloaded,
}


class SaveBases(GraphPass):
    """Saves what a view looks at, and has backward make the view again: one copy then moves all of the memory."""

    name = "save_bases"
    phases = ("joint",)
    requires = ("recompute_tagged",)
    provides = ("bases_saved",)

    def run(self, graph: Graph, context: PassContext) -> str:
        gradients = reached_from(graph, graph.with_role(Role.TANGENT))
        views = [n for n in graph.fx_graph.nodes if n not in gradients and _is_view(n) and "recompute" not in n.meta]
        for node in views:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = math.nan  # of no region: torch 2.9 asks whether one comes after another
        return f"{len(views)} views are made again in backward"


def _is_view(node: fx.Node) -> bool:
    """Say whether a node is a view; of lists, an element of split is one, one of an operator's results is not."""
    return is_view(node) and (node.target is not operator.getitem or is_view(aliased_inputs(node)[0]))


class OffloadActivations(GraphPass):
    """Copies saved activations to the CPU in forward, and back in backward."""

    name = "offload_activations"
    phases = ("forward", "backward")
    requires = ("scheduled",)
    provides = ("offloaded",)

    def run(self, graph: Graph, context: PassContext) -> str:
        return _offload(graph, context) if graph.phase == "forward" else _reload(graph, context)


def _offload(graph: Graph, context: PassContext) -> str:
    calls = unit_calls(graph, context.model)
    values = graph.outputs[context.forward_outputs :]  # in the order in which backward receives them
    saved = [v for v in values if isinstance(v, fx.Node) and isinstance(v.meta.get("val"), torch.Tensor)]
    owners = _owners(saved, graph.outputs[: context.forward_outputs], calls)
    roots, positions = graph.alias_roots(), graph.positions()
    last_use: dict[fx.Node, int] = {}  # of memory, by the node that allocated it
    for node in graph.fx_graph.nodes:
        if node.op != "output":
            for source in node.all_input_nodes:
                last_use.update(dict.fromkeys(roots[source], positions[node]))
    first_of_calls = {calls[node]: node for node in reversed(graph.nodes) if node in calls}
    borders = [*_borders(graph, first_of_calls.values()), graph.output, graph.output]
    places = [positions[border] for border in borders]
    copies: dict[fx.Node, fx.Node] = {}
    for node in sorted(owners, key=positions.__getitem__):
        left = bisect.bisect_right(places, max(last_use.get(root, positions[node]) for root in roots[node]))
        put = NodeRecord(Role.OFFLOAD, owners[node].unit, "", (), value_nbytes(node.meta["val"]))
        copies[node] = _copy(graph, dialect.offload_activation, (node,), borders[left : left + 2], put)
    index_of = {node: index for index, node in enumerate(saved)}
    graph.offloaded.update((index_of[node], copy) for node, copy in copies.items())
    # The user's outputs are not among them.
    graph.output.args = (tuple(copies.get(v, v) if isinstance(v, fx.Node) else v for v in graph.outputs),)
    total = sum(copy.meta["fsdp"].nbytes for copy in copies.values())
    return f"{len(copies)} saved activations go to the CPU, {total:,} bytes"


def _copy(graph: Graph, target: Any, args: tuple[Any, ...], borders: Sequence[fx.Node], put: NodeRecord) -> fx.Node:
    """Start a copy of the first argument in front of the first border, and wait for it in front of the second."""
    node, verb = args[0], put.role.value
    with graph.fx_graph.inserting_before(borders[0]):
        start = set_record(graph.call(target, args, name=f"{verb}_{node.name}"), put)
    with graph.fx_graph.inserting_before(borders[1]):
        return set_record(graph.call(_WAITS[target], (start, node), name=f"{verb}ed_{node.name}"), put)


def _owners(saved: list[fx.Node], for_user: Sequence[Any], calls: dict[fx.Node, UnitCall]) -> dict[fx.Node, UnitCall]:
    """Return for each saved tensor the last call that computes or reads it, whose backward needs it first."""
    last = max((call.index for call in calls.values()), default=-1)
    owners = {}
    for node in saved:
        if node.op != "call_function" or record(node) is not None or node in for_user or not _is_whole(node):
            continue
        using = [calls[n] for n in (node, *node.users) if n in calls]
        owner = max(using, key=lambda call: call.index, default=None)
        if owner is not None and owner.index < last:
            owners[node] = owner
    return owners


def _is_whole(node: fx.Node) -> bool:
    """Say whether a value is a dense tensor on a device, with a storage of its own, of a size worth a copy."""
    value = node.meta["val"]
    if value_nbytes(value) < SMALLEST or _is_view(node):
        return False
    if value.dtype is torch.uint8 and value.dim() == 1:  # the state of a generator, which is on the CPU as it is
        return False
    return size_hint(value.untyped_storage().nbytes()) == value_nbytes(value)


def _reload(graph: Graph, context: PassContext) -> str:
    tensors = [node for node in graph.placeholders if isinstance(node.meta.get("val"), torch.Tensor)]
    received = [node for node in tensors if not has_role(node, Role.TANGENT)]
    positions = graph.positions()
    forward = context.graphs.get("forward")  # none is before what ``finalize_backward()`` reduces
    hosts = {received[index]: copy for index, copy in forward.offloaded.items()} if forward is not None else {}
    first_use = {node: min(node.users, key=positions.__getitem__) for node in hosts if node.users}
    needed: dict[str, fx.Node] = {}  # unit → the first node that reads a copy of it
    for node, copy in hosts.items():
        shapes = [tuple(map(str, n.meta["val"].shape)) for n in (node, copy)]
        assert shapes[0] == shapes[1], f"{node} and {copy} are not the same saved tensor"
        if node in first_use:
            unit = copy.meta["fsdp"].unit
            needed[unit] = min(needed.get(unit, first_use[node]), first_use[node], key=positions.__getitem__)
    borders = _borders(graph, needed.values())
    places = [positions[border] for border in borders]
    for node, copy in hosts.items():
        users, device = list(node.users), node.meta["val"].device
        node.meta["val"] = copy.meta["val"]
        put = set_record(node, replace(copy.meta["fsdp"], role=Role.RELOAD)).meta["fsdp"]
        if node not in first_use:  # received, and not read
            continue
        at = bisect.bisect_right(places, positions[first_use[node]])
        ahead = [_behind(borders[max(0, at - n) : max(0, at - n + 1)], graph) for n in (2, 1)]
        back = _copy(graph, dialect.reload_activation, (node, device), ahead, put)
        for user in users:
            user.replace_input_with(node, back)
    return f"{len(first_use)} saved activations come back from the CPU"


def _borders(graph: Graph, otherwise: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the first node of each group of communication nodes; ``otherwise`` where there is no communication."""
    is_part = dialect.COMMUNICATION.__contains__
    groups = [b for a, b in itertools.pairwise(graph.nodes) if is_part(b.target) and not is_part(a.target)]
    return groups or sorted(otherwise, key=graph.positions().__getitem__)


def _behind(border: Sequence[fx.Node], graph: Graph) -> fx.Node:
    """Return the node before which a copy is started at a border: behind its communication."""
    node = border[0] if border else graph.placeholders[-1].next
    while node.target in dialect.EXECUTED:
        node = node.next
    return node
