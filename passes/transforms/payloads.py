"""Payloads of tensor extensions: the graph computes what is gathered of a parameter from its shard.

FSDP2's tensor extensions. ``fsdp_pre_all_gather`` makes payloads of a shard (int8 values and scales, say), each of
which is gathered by a ``gather_param`` of its own; ``fsdp_post_all_gather`` makes the parameter of what was gathered.
Both are traced like the model, so compilers fuse what they compute with what is around it. The payloads of a unit are
in buckets of their own, by dtype; the parameter's shard stays in a bucket that is reduced and never gathered.

An extension may all-reduce over the ranks that shard (torchao's float8 does, for the largest value of a weight). A
graph's reductions become one, right behind the inputs; backward has what forward found, and reduces nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.passes.transforms.edits import ancestors, behind, put_behind_inputs, recorded


def place_payloads(graph: Graph) -> None:
    """Put what computes payloads right in front of the first gather that sends any of it."""
    if not graph.with_role(Role.PAYLOAD):
        return
    positions = graph.positions()
    first = ancestors(_reductions(graph))
    placed = set(first)
    for start in graph.with_role(Role.GATHER_START):
        sent = [s for s in operands(start) if has_role(s, Role.PAYLOAD)]
        for node in sorted(ancestors(sent) - placed, key=positions.__getitem__):
            start.prepend(node)
            placed.add(node)
    put_behind_inputs(graph, first)


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
        put_behind_inputs(graph, ancestors(values))
        with graph.fx_graph.inserting_before(behind(graph, values, graph.positions())):
            together = graph.call(dialect.reduce_payloads, (values, *nodes[0].args[1:]), name="reduced_payloads")
            names = tuple(name for node in nodes for name in node.meta["fsdp"].params)
            recorded(together, NodeRecord(Role.PAYLOAD_REDUCE, "", "payloads", names), Role.PAYLOAD_REDUCE)
            ends = itertools.accumulate((node.meta["val"].numel() for node in nodes), initial=0)
            pieces = dict(zip(nodes, itertools.pairwise(ends), strict=True))
            slice_of = torch.ops.aten.slice.Tensor
            replaced = {node: graph.call(slice_of, (together, 0, *piece), like=node) for node, piece in pieces.items()}
        graph.replace(replaced)
