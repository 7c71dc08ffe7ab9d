"""The schedule: gathers start early, reductions are waited for late.

One rule for each, in one walk of the graph. Let the buckets be ``b0, b1, …`` in the plan's order. The gather of
``b_k`` starts as soon as ``b_(k - distance)`` has arrived, so that it runs while that bucket's unit computes; the
first ones start at the top. A reduction is waited for when ``reductions_in_flight`` later ones would otherwise be
under way, and at the end.

A wait that only cheap operators separate from the communication before it moves up to it: a compute region of a
residual addition alone costs more than the overlap that it gives.
"""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes import dialect
from graph_fsdp.passes.dialect import Role, has_role
from graph_fsdp.passes.graph import Graph, is_cheap
from graph_fsdp.passes.pipeline import GraphPass, PassContext


class Prefetch(GraphPass):
    """``distance``: how many buckets ahead a gather starts; 0 gathers just before the use, with nothing to hide it.
    ``reductions_in_flight``: reductions that may be under way at once, at least 1.

    The collectives keep the order of ``context.plan`` where the graph uses the same buckets as when the plan was
    made, whatever the order of this graph's nodes: a rank that recompiles alone must not reorder them.
    """

    name = "prefetch"
    requires = ("bucketed",)
    provides = ("scheduled",)

    def __init__(self, distance: int = 1, reductions_in_flight: int = 2) -> None:
        if distance < 0:
            raise ValueError(f"distance must be 0 or more buckets, got {distance}")
        if reductions_in_flight < 1:
            raise ValueError(f"reductions_in_flight must be 1 or more, got {reductions_in_flight}")
        self.distance = distance
        self.reductions_in_flight = reductions_in_flight

    def run(self, graph: Graph, context: PassContext) -> str | None:
        gathers = _in_plan_order(graph, "gather_start", graph.with_role(Role.GATHER_START), context)
        reductions = _in_plan_order(graph, "reduce_start", graph.with_role(Role.REDUCE_START), context)
        self._move_gathers(graph, gathers)
        self._move_reductions(graph, reductions)
        _hoist_waits(graph)
        return f"gathers {self.distance} ahead, at most {self.reductions_in_flight} reductions in flight"

    def _move_gathers(self, graph: Graph, starts: list[fx.Node]) -> None:
        if self.distance == 0 or not starts:
            return
        waits = [_wait_of(start) for start in starts]
        top = graph.placeholders[-1]
        for start in reversed(starts[: self.distance]):
            top.append(start)
        for start, earlier in zip(starts[self.distance :], waits, strict=False):
            earlier.append(start)

    def _move_reductions(self, graph: Graph, starts: list[fx.Node]) -> None:
        # A later reduction of the plan starts no earlier than the one before it: where this graph's gradients come
        # in another order, a start moves down to its predecessor.
        positions = graph.positions()
        latest = None
        for start in starts:
            if latest is not None and positions[start] < positions[latest]:
                _move_group(_wait_of(start), before=latest.next)
                latest.append(start)
                positions[start] = positions[latest]
            latest = start
        for index, start in enumerate(starts):
            due = index + self.reductions_in_flight
            _move_group(_wait_of(start), before=starts[due] if due < len(starts) else graph.output)


def _wait_of(start: fx.Node) -> fx.Node:
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


def _hoist_waits(graph: Graph) -> None:
    for wait in graph.with_role(Role.GATHER_WAIT):
        start = wait.args[0]
        before = wait.prev
        while is_cheap(before):
            before = before.prev
        reached = before.target in dialect.EXECUTED or before.op == "placeholder"
        if reached and before is not wait.prev and before is not start:
            started_with_it = wait.next
            before.append(wait)
            if has_role(started_with_it, Role.GATHER_START):
                wait.append(started_with_it)


def _in_plan_order(graph: Graph, kind: str, starts: list[fx.Node], context: PassContext) -> list[fx.Node]:
    planned = [bucket for k, bucket in context.plan.get(graph.phase, ()) if k == kind]
    if {start.meta["fsdp"].bucket for start in starts} != set(planned):
        return starts
    rank = {bucket: index for index, bucket in enumerate(planned)}
    return sorted(starts, key=lambda start: rank[start.meta["fsdp"].bucket])
