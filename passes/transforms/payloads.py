"""Payloads of tensor extensions: the graph computes what is gathered of a parameter from its shard.

FSDP2's tensor extensions. ``fsdp_pre_all_gather`` makes payloads of a shard (int8 values and scales, say), each of
which is gathered by a ``gather_param`` of its own; ``fsdp_post_all_gather`` makes the parameter of what was gathered.
Both are traced like the model, so compilers fuse what they compute with what is around it. The payloads of a unit are
in buckets of their own, by dtype; the parameter's shard stays in a bucket that is reduced and never gathered.

An extension may all-reduce over the ranks that shard (torchao's float8 does, for the largest value of a weight). A
graph's reductions become one, right behind the inputs; backward has what forward found, and reduces nothing.

What is computed before a gather reads shards only. A schedule lifts it out of its way, and puts it right in front of
the gather again (``lift_payloads``, ``place_payloads``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, has_role, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.operands import operands


def ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are computed from, without inputs of the graph."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            stack += node.all_input_nodes
    return found


def lift_payloads(graph: Graph) -> None:
    """Put what computes payloads right behind the inputs."""
    payloads = graph.with_role(Role.PAYLOAD)
    if not payloads:
        return
    anchor = graph.placeholders[-1]
    for node in _in_order(graph, ancestors(payloads)):
        anchor.append(node)
        anchor = node


def place_payloads(graph: Graph) -> None:
    """Put what computes payloads right in front of the first gather that sends any of it."""
    payloads = graph.with_role(Role.PAYLOAD)
    if not payloads:
        return
    positions = graph.positions()
    first = ancestors(_reductions(graph))
    placed: set[fx.Node] = set(first)
    for start in graph.with_role(Role.GATHER_START):
        sent = [s for s in dialect.argument(start, "shards") if has_role(s, Role.PAYLOAD)]
        for node in sorted(ancestors(sent) - placed, key=positions.__getitem__):
            start.prepend(node)
            placed.add(node)
    _put_first(graph, sorted(first, key=positions.__getitem__))


def _put_first(graph: Graph, nodes: list[fx.Node]) -> None:
    for node in reversed(nodes):
        graph.placeholders[-1].append(node)


def _reductions(graph: Graph) -> list[fx.Node]:
    """Not what backward receives of them, which has their records."""
    return [node for node in graph.with_role(Role.PAYLOAD_REDUCE) if node.target is dialect.reduce_payloads]


def combine_reductions(graph: Graph) -> None:
    """One all-reduce for all that extensions reduce alike, in front of every other collective."""
    alike: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in _reductions(graph):
        alike.setdefault((*node.args[1:], node.meta["val"].dtype), []).append(node)
    for nodes in alike.values():
        values: list[fx.Node] = [value for node in nodes for value in operands(node)]
        order = graph.positions()
        _put_first(graph, sorted(ancestors(values), key=order.__getitem__))
        order = graph.positions()
        with graph.fx_graph.inserting_after(max([*values, graph.placeholders[-1]], key=order.__getitem__)):
            together = graph.call(dialect.reduce_payloads, (values, *nodes[0].args[1:]), name="reduced_payloads")
        names = tuple(name for node in nodes for name in node.meta["fsdp"].params)
        size = nbytes(together.meta["val"])
        set_record(together, NodeRecord(Role.PAYLOAD_REDUCE, "", "payloads", names, size))
        begin, replaced, last = 0, {}, together
        for node in nodes:
            numel = node.meta["val"].numel()
            with graph.fx_graph.inserting_after(last):
                last = graph.call(torch.ops.aten.slice.Tensor, (together, 0, begin, begin + numel), like=node)
            replaced[node], begin = last, begin + numel
        graph.replace(replaced)


def drop_unread_payloads(graph: Graph) -> None:
    """Payloads whose gather is gone, because backward received the bucket, go too, and what only they read."""
    stack = [node for node in graph.with_role(Role.PAYLOAD) if not node.users]
    while stack:
        node = stack.pop()
        if node.users or node.op == "placeholder":
            continue
        sources = list(node.all_input_nodes)
        graph.fx_graph.erase_node(node)
        stack += [s for s in sources if not s.users]


def _in_order(graph: Graph, nodes: set[fx.Node]) -> list[fx.Node]:
    return [node for node in graph.fx_graph.nodes if node in nodes] if nodes else []
