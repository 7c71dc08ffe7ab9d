"""Where reductions are waited for: as late as the number of them that may be under way allows."""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes.dialect import Role
from graph_fsdp.passes.graph import Graph


def defer_reductions(graph: Graph, starts: list[fx.Node], in_flight: int) -> None:
    """Reductions start in the order given and are waited for as late as ``in_flight`` of them allow."""
    # A later reduction of the plan starts no earlier than the one before it: where this graph's gradients come
    # in another order, a start moves down to its predecessor.
    positions = graph.positions()
    latest = None
    for start in starts:
        if latest is not None and positions[start] < positions[latest]:
            _move_group(wait_of(start), before=latest.next)
            latest.append(start)
            positions[start] = positions[latest]
        latest = start
    for index, start in enumerate(starts):
        due = index + in_flight
        _move_group(wait_of(start), before=starts[due] if due < len(starts) else graph.output)


def wait_of(start: fx.Node) -> fx.Node:
    return next(user for user in start.users if user.meta["fsdp"].role in (Role.GATHER_WAIT, Role.REDUCE_WAIT))


def _move_group(wait: fx.Node, before: fx.Node) -> None:
    """Move a wait and the views and casts of its result, which only the output reads."""
    group, frontier = [wait], [wait]
    while frontier:
        users = [user for node in frontier for user in node.users if user.op != "output"]
        frontier = list(dict.fromkeys(users))
        group += frontier
    for node in dict.fromkeys(group):
        before.prepend(node)
