"""Nodes that the partitioner put at one end of a graph move to where the rest of their unit is. Linear.

Backward. The partitioner puts all recomputation before the first gradient, in forward order, so that all buckets would
be gathered at once. Walking the gradient nodes in autograd's order and emitting each one's inputs just before it gives
the order of an eager backward.

Forward. What backward computes without gradients (a layer norm's ``rstd / n``) may be computed in forward, and saved.
The partitioner puts it behind the last unit; it moves up to behind the last of its inputs.

Both. What several units read and none computes from its own parameters (rotary embeddings, a mask) stands in front of
the first of them, so that this one computes what the others do and no more. It is in memory a unit earlier.
"""

from __future__ import annotations

import operator

from torch import fx

from graph_fsdp import compat
from graph_fsdp.compat import inputs_of
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.effects import aliased_inputs, is_random, mutated_inputs
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.transforms.edits import computed_of, reached_from
from graph_fsdp.passes.transforms.recompute import forward_nodes

# What fewer units read is of these units: an activation, read by the unit that made it and the one behind.
_SHARED = 3


class JustInTime(GraphPass):
    """Moves nodes to where the rest of their unit is."""

    name = "just_in_time"
    phases = ("forward", "backward")
    requires = ("partitioned",)
    provides = ("just_in_time",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        before = list(graph.fx_graph.nodes)
        graph.reorder(_behind_inputs(graph, context) if graph.phase == "forward" else _before_uses(graph))
        graph.reorder(order := _before_units(graph))
        moved = sum(a is not b for a, b in zip(before, order, strict=True))
        return f"{moved} of {len(order)} nodes change place"


def _before_uses(graph: Graph) -> list[fx.Node]:
    positions = graph.positions()
    gradients = reached_from(graph, graph.with_role(Role.TANGENT))
    roots = [node for node in graph.fx_graph.nodes if node in gradients and node.op != "placeholder"]
    order = dict.fromkeys(graph.placeholders)
    for root in (*roots, graph.output):
        stack = [root]
        while stack:
            missing = [i for i in inputs_of(stack[-1]) if i not in order]
            if stack[-1] in order or not missing:
                order[stack.pop()] = None
            else:
                stack += sorted(missing, key=positions.__getitem__, reverse=True)
    # Nothing reads them, but they write (in-place updates of buffers): they stay, before the output.
    unread = [node for node in graph.fx_graph.nodes if node not in order]
    return [*list(order)[:-1], *unread, graph.output]


def _behind_inputs(graph: Graph, context: PassContext) -> list[fx.Node]:
    for_user = forward_nodes(graph, context)
    positions = graph.positions()
    parameters = computed_of(graph.nodes, lambda node: has_role(node, Role.GATHER))
    behind: dict[fx.Node, fx.Node] = {}  # what moves → the node behind which it stands
    moved: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.fx_graph.nodes:
        if mutated_inputs(node):
            break  # nothing moves over a write
        # What reads a parameter stays: it would be gathered sooner.
        if node in for_user or not _is_movable(node) or not parameters.isdisjoint(node.all_input_nodes):
            continue
        computed = [behind.get(source, source) for source in node.all_input_nodes if source.op != "placeholder"]
        if computed:
            behind[node] = last = max(computed, key=positions.__getitem__)
            moved.setdefault(last, []).append(node)
    return [n for node in graph.fx_graph.nodes if node not in behind for n in (node, *moved.get(node, ()))]


def _before_units(graph: Graph) -> list[fx.Node]:
    nodes = graph.nodes
    parameters = computed_of(nodes, lambda node: has_role(node, Role.GATHER))
    begins: dict[int, fx.Node] = {}  # unit, counted as they are used → its first node
    gathered: set[tuple[str, str]] = set()
    unit_of: dict[fx.Node, int] = {}
    independent: set[fx.Node] = set()  # of its own unit
    unit = 0
    for node in nodes:
        inputs = inputs_of(node)
        used = {(s.meta["fsdp"].bucket, s.meta["fsdp"].unit) for s in inputs if has_role(s, Role.GATHER)}
        if not used <= gathered:
            gathered |= used
            unit += 1
            if all(name for _, name in used):  # not the root: there is one of it
                begins[unit] = node
        unit_of[node] = unit
        if mutated_inputs(node):
            break
        own = [source for source in inputs if unit_of[source] == unit and source.op != "placeholder"]
        if _is_movable(node) and parameters.isdisjoint((node, *inputs)) and independent.issuperset(own):
            independent.add(node)
    moved: dict[int, list[fx.Node]] = {}
    needed: set[fx.Node] = set()
    readers: dict[fx.Node, set[int]] = {}  # units that read what may move, or a view, or a view of that
    for node in reversed(nodes):
        if node not in independent and not _is_view(node):
            continue
        users = [user for user in node.users if user.op != "output"]
        readers[node] = {unit_of.get(user, unit) for user in users}.union(*(readers[u] for u in users if _is_view(u)))
        if node not in independent or unit_of[node] not in begins:
            continue
        shared = len(readers[node]) >= _SHARED and not _is_view(node) and bool(node.all_input_nodes)
        if shared or node in needed:
            moved.setdefault(unit_of[node], []).append(node)
            needed.update(source for source in node.all_input_nodes if unit_of[source] == unit_of[node])
    away = {node for group in moved.values() for node in group}
    in_front = {begins[index]: group[::-1] for index, group in moved.items()}
    return [n for node in nodes if node not in away for n in (*in_front.get(node, ()), node)]


def _is_view(node: fx.Node) -> bool:
    return node.target is not operator.getitem and bool(aliased_inputs(node))


def _is_movable(node: fx.Node) -> bool:
    is_operator = node.op == "call_function" and not isinstance(node.target, compat.HigherOrderOperator)
    return is_operator and not is_random(node)
