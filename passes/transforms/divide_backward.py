"""Divide a backward graph, after all passes, into that of inputs' gradients and that of weights' (zero bubble).

The first half has what the gradients of the stage's inputs are computed from, and what draws random numbers or writes
to its inputs, which keep their order; the second has the rest. So what an activation checkpoint computes again is in
the first half where an input's gradient needs it. The second half takes, behind the backward's own inputs, what the
first has computed and returns behind the gradients; but a bucket that both read is gathered in both, and freed in both.
Both keep the order of the whole graph, so its slots, budget and order of collectives hold for either (Qi et al. 2024,
"Zero Bubble Pipeline Parallelism").
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any

from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.effects import draws, mutated_inputs
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.passes.transforms.edits import ancestors


@dataclass(frozen=True)
class Half:
    """Holds one half of a backward, and the places of its inputs among the backward's. What the first half returns
    behind the gradients are further inputs of the second."""

    graph: Graph
    places: tuple[int, ...]


def divide_backward(backward: Graph, weights: Set[int]) -> tuple[Half, Half]:
    """Return both halves. ``weights``: the places of weights' gradients among the outputs. Each half returns as many
    gradients as the backward, None in the place of the other half's.
    """
    outputs = backward.outputs
    of_inputs = [None if i in weights else value for i, value in enumerate(outputs)]
    of_weights = [value if i in weights else None for i, value in enumerate(outputs)]
    first = _of_inputs(backward, _nodes(of_inputs))
    second, crossing = _the_rest(backward, first, _nodes(of_weights))
    return _half(backward, first, [*of_inputs, *crossing]), _half(backward, second, of_weights, crossing)


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _of_inputs(backward: Graph, gradients: Iterable[fx.Node]) -> set[fx.Node]:
    calls = [n for n in backward.fx_graph.nodes if n.op == "call_function" and n.target not in dialect.EXECUTED]
    first = ancestors([*gradients, *(node for node in calls if draws(node) or mutated_inputs(node))])
    # Of a call with several results each is a tensor of its own for the second half.
    first.update(node for node in calls if node.target is operator.getitem and operand(node) in first)
    return first


def _the_rest(backward: Graph, first: set[fx.Node], gradients: Iterable[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
    """Return the second half's nodes, and what crosses from the first to it, in order. Buffers of transfers do not."""
    roots = backward.alias_roots()

    def is_made_twice(node: fx.Node) -> bool:
        is_buffer = any(root.target in dialect.TRANSFER_STARTS or has_role(root, Role.KEPT) for root in roots[node])
        return is_buffer or node.op == "get_attr"

    inner = [node for node in backward.fx_graph.nodes if node.op not in ("placeholder", "output")]
    frees = [node for node in inner if node.target is dialect.free]
    stack = [node for node in inner if node not in first and node.op != "get_attr" and node not in frees]
    second: set[fx.Node] = set()
    crossing = first.intersection(gradients)
    while stack:
        node = stack.pop()
        if node in second:
            continue
        second.add(node)
        for source in node.all_input_nodes:
            if source in first and not is_made_twice(source):
                crossing.add(source)
            elif source.op != "placeholder":
                stack.append(source)
    for half in (first, second):
        half.update(free for free in frees if _reads_buffer(free, half))
    return second, [node for node in inner if node in crossing]


def _reads_buffer(free: fx.Node, half: set[fx.Node]) -> bool:
    buffer = operand(free)
    return not half.isdisjoint(buffer.users if buffer.op == "placeholder" else (buffer,))


def _half(backward: Graph, nodes: set[fx.Node], outputs: list[Any], crossing: Iterable[fx.Node] = ()) -> Half:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copied: Callable[[fx.Node], fx.Node] = copies.__getitem__
    read = {source for node in nodes for source in node.all_input_nodes}.union(_nodes(outputs))
    given = {node: place for place, node in enumerate(backward.placeholders) if node in read}
    for node in (*given, *crossing):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in backward.fx_graph.nodes:
        if node in nodes:
            copies[node] = graph.node_copy(node, copied)
    graph.output(fx.map_arg(tuple(outputs), copied)).meta = dict(backward.output.meta)
    half = Graph(fx.GraphModule(backward.module, graph), "backward")
    half.facts, half.slots, half.absent, half.cost = backward.facts, backward.slots, backward.absent, backward.cost
    return Half(half, tuple(given.values()))
