"""Where reductions are waited for: as late as the number of them that may be under way allows.

On a mesh that also replicates, a reduction has two stages: a bucket's gradients are reduced over the group that shards,
and the result is reduced over the replicas. The second stage starts where the first is waited for, which is late, and
is waited for later still, so that both run while other units compute. At most as many of each stage are under way.
"""

from __future__ import annotations

import torch
from torch import fx

from graph_fsdp.passes.analysis.kernels import Kind, kind_of
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role, wait_of
from graph_fsdp.passes.ir.effects import is_view
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.transforms.edits import move_with_results, with_results


def reductions_under_way(starts: list[fx.Node], recomputes_activations: bool) -> int:
    """How many reductions may be under way at once where nobody has said: one where the full gradients that they send
    are what backward holds most of, because activations are computed again or because gradients are copied into a wider
    type to be reduced; else two."""
    return 1 if recomputes_activations or any(map(_widens, starts)) else 2


def _widens(start: fx.Node) -> bool:
    dtype: torch.dtype = dialect.argument(start, "dtype")
    return any(grad.meta["val"].dtype.itemsize < dtype.itemsize for grad in dialect.argument(start, "grads"))


def defer_reductions(graph: Graph, starts: list[fx.Node], in_flight: int) -> None:
    """Reductions start in the order given and are waited for as late as ``in_flight`` of them allow.

    The second stages keep that order too: the sequence of all collectives follows from it. Linear.
    """
    for start in starts:
        _start_behind_fusible(start)
    # A later reduction of the plan starts no earlier than the one before it: where this graph's gradients come
    # in another order, a start moves down to its predecessor.
    positions = graph.positions()
    latest = None
    for start in starts:
        if latest is not None and positions[start] < positions[latest]:
            move_with_results(wait_of(start), before=latest.next)
            latest.append(start)
            positions[start] = positions[latest]
        latest = start
    _defer_waits(graph, starts, in_flight)
    reduced = [user for start in starts for user in wait_of(start).users]
    _defer_waits(graph, [user for user in reduced if has_role(user, Role.REPLICATE_START)], in_flight)


def _start_behind_fusible(start: fx.Node) -> None:
    """Move a start, with its wait, over the pointwise operators and reductions that follow it (the rest of a norm's
    backward, a residual addition). They fuse into the kernels before it; a start in between would cut a compute region
    for them alone."""
    group = [start, *with_results(wait_of(start))]
    node, inside = start, set(group)
    while node in inside:
        inside.discard(node)
        node = node.next
    last = None
    of_inputs: set[fx.Node] = set()  # made of inputs alone: no part of what precedes
    while not inside and (is_view(node) or kind_of(node) is Kind.FUSIBLE):
        if all(source.op == "placeholder" or source in of_inputs for source in node.all_input_nodes):
            of_inputs.add(node)
        elif not is_view(node):
            last = node
        node = node.next
    if last is not None:
        for member in reversed(group):
            last.append(member)


def _defer_waits(graph: Graph, starts: list[fx.Node], in_flight: int) -> None:
    for index, start in enumerate(starts):
        due = index + in_flight
        move_with_results(wait_of(start), before=_ready_for(starts[due]) if due < len(starts) else graph.output)


def _ready_for(start: fx.Node) -> fx.Node:
    """A second stage stands right behind the wait for its first: what comes before it comes before both."""
    return start.prev if has_role(start, Role.REPLICATE_START) and start.prev is start.args[0] else start
