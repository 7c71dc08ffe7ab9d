"""Several passes share these edits: pairs of a start and a wait, inputs, outputs, and what nobody reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graph_fsdp.compat import OpOverload, inputs_of
from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.operands import defaults

# What starts → what waits for it, and how the two nodes are called; the first word is that of their roles, too.
_PAIRS = {
    dialect.all_gather_start: (dialect.all_gather_wait, "gather", "full"),
    dialect.reduce_scatter_start: (dialect.reduce_wait, "reduce", "reduced"),
    dialect.all_reduce_start: (dialect.reduce_wait, "reduce", "reduced"),
    dialect.all_reduce_shard_start: (dialect.reduce_wait, "replicate", "replicated"),
    dialect.fetch_start: (dialect.fetch_wait, "fetch", "fetched"),
    dialect.offload_start: (dialect.offload_wait, "offload", "offloaded"),
}


def without_defaults(target: OpOverload[..., Any], arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Drop the arguments at the end of a call that are the defaults of the operator's schema."""
    given, known = list(arguments), list(defaults(target).values())
    while given and known[len(given) - 1] == given[-1]:
        given.pop()
    return tuple(given)


def start_and_wait(
    graph: Graph, target: Any, arguments: Sequence[Any], of: NodeRecord, options: dict[str, Any] | None = None
) -> fx.Node:
    """Insert a collective or a copy at the current insertion point with its wait right behind it, and return the wait.
    Both records have the unit, bucket and parameters of ``of``."""
    wait, verb, done = _PAIRS[target]
    start = graph.call(target, without_defaults(target, arguments), options, name=f"{verb}_{of.bucket}")
    recorded(start, of, Role(f"{verb}_start"))
    return recorded(graph.call(wait, (start,), name=f"{done}_{of.bucket}"), of, Role(f"{verb}_wait"))


def recorded(node: fx.Node, of: NodeRecord, role: Role, params: tuple[str, ...] | None = None) -> fx.Node:
    """Give a node the record ``of`` with another role, its own bytes and, where given, other parameters."""
    return set_record(node, replace(of, role=role, params=params or of.params, nbytes=nbytes(node.meta["val"])))


def with_results(wait: fx.Node) -> list[fx.Node]:
    """Return a wait and what is computed of its result, which only the output reads."""
    group, frontier = [wait], [wait]
    while frontier:
        frontier = list(dict.fromkeys(user for node in frontier for user in node.users if user.op != "output"))
        group += frontier
    return list(dict.fromkeys(group))


def move_with_results(wait: fx.Node, before: fx.Node) -> None:
    for node in with_results(wait):
        before.prepend(node)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and all that they are computed from, without inputs of the graph."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            stack += inputs_of(node)
    return found


def computed_of(
    nodes: Iterable[fx.Node], is_source: Callable[[fx.Node], bool], joins: Callable[[fx.Node], bool] = bool
) -> set[fx.Node]:
    """Return the sources among ``nodes``, in the graph's order, and what is computed of them alone and ``joins``."""
    found: set[fx.Node] = set()
    for node in nodes:
        inputs = inputs_of(node)
        if is_source(node) or (inputs and found.issuperset(inputs) and joins(node)):
            found.add(node)
    return found


def computed_of_constants(nodes: Iterable[fx.Node], joins: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return the constants among ``nodes``, and what calls that ``joins`` make of nothing and of these alone."""
    return computed_of(nodes, lambda n: n.op == "get_attr" or (not n.all_input_nodes and joins(n)), joins)


def reached_from(graph: Graph, sources: Iterable[fx.Node], ends: Collection[Any] = ()) -> set[fx.Node]:
    """Return the sources, and what is computed of them and of other values; calls of ``ends`` are not followed."""
    found = set(sources)
    for node in graph.fx_graph.nodes:
        if not found.isdisjoint(inputs_of(node)) and node.op != "output" and node.target not in ends:
            found.add(node)
    return found


def put_behind_inputs(graph: Graph, nodes: Iterable[fx.Node]) -> None:
    """Move nodes to the beginning of the graph, in the order that they have in it."""
    positions, inputs = graph.positions(), graph.placeholders
    for node in sorted(nodes, key=positions.__getitem__, reverse=True):
        inputs[-1].append(node)


def put_inputs_first(graph: fx.Graph) -> None:
    """Move inputs before all operators, in their order. AOTAutograd adds one where the first effect of a backward is
    (``torch.linalg.eigvals`` has one: the error of a matrix that is singular)."""
    inputs = graph.find_nodes(op="placeholder")
    for before, node in itertools.pairwise(inputs):
        if before.next is not node:
            before.append(node)


def behind(graph: Graph, nodes: Iterable[fx.Node], positions: dict[fx.Node, int]) -> fx.Node:
    """Return the node before which something stands that reads all of ``nodes`` as soon as they are there."""
    last = max(nodes, key=positions.__getitem__)
    return (graph.placeholders[-1] if last.op == "placeholder" else last).next


def add_input(graph: Graph, before: fx.Node, name: str, value: Any, record: NodeRecord) -> fx.Node:
    """Add an input in front of ``before``, called ``name``, in which any characters may stand."""
    with graph.fx_graph.inserting_before(before):
        node = graph.fx_graph.placeholder(name)
    node.target = node.name  # an identifier, and no other node's
    node.meta["val"] = value
    return set_record(node, record)


def add_outputs(graph: Graph, place: int | None, nodes: Iterable[fx.Node]) -> None:
    """Return ``nodes`` too, in front of the output at ``place``, or behind all with None."""
    outputs = graph.outputs
    outputs[len(outputs) if place is None else place : place] = nodes
    graph.output.args = (tuple(outputs),)


def first_saved(backward: Graph) -> fx.Node:
    """Return the first tensor that backward receives.

    [Note: saved tensors] AOTAutograd's backward takes symbolic sizes, then saved tensors, then tangents. Tensors of
    ours go in front of the saved ones, as they stand in front of them among forward's outputs, behind the user's.
    """
    return next(node for node in backward.placeholders if isinstance(node.meta.get("val"), torch.Tensor))


def units_of(node: fx.Node, context: PassContext) -> set[str]:
    """Return the units of the parameters that a node is for."""
    return {context.model.spec_of(name).unit for name in node.meta["fsdp"].params}


def mark_escaping(buffer: fx.Node) -> None:
    """Say of a gathered buffer, and of the gather that it comes from, that it outlives the graph."""
    for node in (*buffer.all_input_nodes, buffer):
        set_record(node, replace(node.meta["fsdp"], escapes=True))


def use_instead(graph: Graph, node: fx.Node, new: fx.Node) -> None:
    """Give readers of ``node`` another one, and erase it with all that was computed for it alone."""
    node.replace_all_uses_with(new)
    erase_unread(graph, [node])


def erase_unread(graph: Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of ``nodes`` that nothing reads, and then what only they have read; no inputs of the graph."""
    stack = [node for node in nodes if not node.users and node.op != "placeholder"]
    while stack:
        node = stack.pop()
        sources = node.all_input_nodes
        graph.fx_graph.erase_node(node)
        stack += [source for source in sources if not source.users and source.op != "placeholder"]
