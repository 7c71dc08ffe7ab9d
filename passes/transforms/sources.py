"""What gathers send is made and placed: copies of shards on the CPU, and payloads of tensor extensions.

A schedule lifts these sources out of its way (``lift``), moves collectives as if they were not there, and then places
them (``place_copies``, ``place_payloads``).

**Shards and gradients on the CPU** (FSDP2's ``CPUOffloadPolicy``). The bucket pass copies a bucket's shards to the
device before they are gathered, and what a reduction yields to the CPU, where the gradients of the shards are views of
the copy. What is used without a gather is copied too. A fetch is waited for right before its gather starts, and starts
behind the gathers before it, so that it runs beside them; the host waits for gradients at the graph's end. Ranks need
not agree on the order of copies.

**Payloads** (FSDP2's tensor extensions). ``fsdp_pre_all_gather`` makes payloads of a shard (int8 values and scales,
say), each with a ``gather_param`` of its own; ``fsdp_post_all_gather`` makes the parameter of what was gathered. Both
are traced like the model. The payloads of a unit are in buckets of their own, by dtype; the parameter's shard stays in
a bucket that is reduced and never gathered. Where an extension all-reduces over the ranks that shard (torchao's float8,
for the largest value of a weight), a graph's reductions become one, right behind the inputs; backward has what forward
found, and reduces nothing. Where shards are on the CPU, payloads are made of a copy, which the bucket pass makes of a
``gather_param`` over this rank alone.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import arguments, operand, operands
from graph_fsdp.passes.transforms.edits import ancestors, behind, move_with_results, put_behind_inputs, recorded


def lift(graph: Graph) -> None:
    """Put what feeds gathers right behind the inputs."""
    sent = [shard for start in graph.with_role(Role.GATHER_START) for shard in operands(start)]
    put_behind_inputs(graph, ancestors([*sent, *graph.with_role(Role.PAYLOAD)]))


def place_copies(graph: Graph) -> None:
    """Put the copies of shards and of gradients where the schedule has room for them. Linear."""
    runs: list[list[tuple[fx.Node, fx.Node]]] = []  # gathers of copies with no computation in between; other copies
    previous: fx.Node | None = None
    for node in graph.with_role(Role.GATHER_START, Role.FETCH_WAIT):
        gathers = has_role(node, Role.GATHER_START)
        wait = operands(node)[0] if gathers else node
        is_gathered = not gathers and any(has_role(user, Role.GATHER_START) for user in node.users)
        if is_gathered or not has_role(wait, Role.FETCH_WAIT):  # placed with its gather, or no copy
            continue
        if not gathers or node.prev is not previous:
            runs.append([])
        runs[-1].append((node, wait))
        previous = node
        if gathers:
            node.prepend(wait)
    for before, run in zip([None, *runs], runs, strict=False):
        starts = [operand(wait) for _, wait in run]
        for start in starts if before is None else reversed(starts):
            if before is None:
                run[0][1].prepend(start)
            else:
                before[-1][0].append(start)
    for wait in graph.with_role(Role.OFFLOAD_WAIT):
        move_with_results(wait, before=graph.output)


def place_payloads(graph: Graph) -> None:
    """Put what computes payloads right in front of the first gather that sends any of it, with the copies it is made
    of, which ``place_copies`` then starts earlier."""
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
    """Return the reductions that this graph runs; what backward receives of forward's has their records too."""
    return [node for node in graph.with_role(Role.PAYLOAD_REDUCE) if node.target is dialect.reduce_payloads]


def combine_reductions(graph: Graph) -> None:
    """Make one all-reduce of all that extensions reduce alike, in front of every other collective."""
    alike: dict[tuple[str, str, torch.dtype], list[fx.Node]] = {}
    for node in _reductions(graph):
        given = arguments(node)
        alike.setdefault((given.op, given.group, node.meta["val"].dtype), []).append(node)
    for (op, group, _), nodes in alike.items():
        values: list[fx.Node] = [value for node in nodes for value in operands(node)]
        put_behind_inputs(graph, ancestors(values))
        with graph.fx_graph.inserting_before(behind(graph, values, graph.positions())):
            together = graph.call(dialect.reduce_payloads, (values, op, group), name="reduced_payloads")
            names = tuple(name for node in nodes for name in node.meta["fsdp"].params)
            recorded(together, NodeRecord(Role.PAYLOAD_REDUCE, "", "payloads", names), Role.PAYLOAD_REDUCE)
            ends = itertools.accumulate((node.meta["val"].numel() for node in nodes), initial=0)
            pieces = dict(zip(nodes, itertools.pairwise(ends), strict=True))
            slice_of = torch.ops.aten.slice.Tensor
            replaced = {node: graph.call(slice_of, (together, 0, *piece), like=node) for node, piece in pieces.items()}
        graph.replace(replaced)
