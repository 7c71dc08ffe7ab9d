"""The schedule: gathers start early, reductions are waited for late.

One rule for each, in one walk of the graph. Let the buckets be ``b0, b1, …`` in the plan's order. The gather of
``b_k`` starts as soon as ``b_(k - distance)`` has arrived, so that it runs while that bucket's unit computes; the
first ones start at the top. Under a budget, a gather starts later where it would otherwise not fit. A reduction is
waited for when ``reductions_in_flight`` later ones would otherwise be under way, and at the end.

A wait that only cheap operators separate from the communication before it moves up to it: a compute region of a
residual addition alone costs more than the overlap that it gives.
"""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes import dialect
from graph_fsdp.passes.dialect import Role, has_role
from graph_fsdp.passes.graph import Graph, is_cheap
from graph_fsdp.passes.pipeline import GraphPass, PassContext
from graph_fsdp.passes.reductions import defer_reductions, wait_of


class BudgetError(ValueError):
    """The budget of gathered bytes is smaller than what has to be gathered at once."""


class Prefetch(GraphPass):
    """``distance``: how many buckets ahead a gather starts; 0 gathers just before the use, with nothing to hide it.
    ``reductions_in_flight``: reductions that may be under way at once, at least 1.
    ``budget``: most bytes of gathered parameters at any point, under way or arrived; None for no limit.

    The collectives keep the order of ``context.plan`` where the graph uses the same buckets as when the plan was
    made, whatever the order of this graph's nodes: a rank that recompiles alone must not reorder them.
    """

    name = "prefetch"
    requires = ("bucketed",)
    provides = ("scheduled",)

    def __init__(self, distance: int = 1, reductions_in_flight: int = 2, budget: int | None = None) -> None:
        if distance < 0:
            raise ValueError(f"distance must be 0 or more buckets, got {distance}")
        if reductions_in_flight < 1:
            raise ValueError(f"reductions_in_flight must be 1 or more, got {reductions_in_flight}")
        if budget is not None and budget <= 0:
            raise ValueError(f"budget must be a positive number of bytes or None, got {budget}")
        self.distance = distance
        self.budget = budget
        self.reductions_in_flight = reductions_in_flight

    def run(self, graph: Graph, context: PassContext) -> str | None:
        context.budget = self.budget
        gathers = _in_plan_order(graph, "gather_start", graph.with_role(Role.GATHER_START), context)
        reductions = _in_plan_order(graph, "reduce_start", graph.with_role(Role.REDUCE_START), context)
        self._move_gathers(graph, gathers)
        defer_reductions(graph, reductions, self.reductions_in_flight)
        _hoist_waits(graph)
        limit = "" if self.budget is None else f", at most {self.budget:,} bytes gathered"
        return f"gathers {self.distance} ahead, at most {self.reductions_in_flight} reductions in flight{limit}"

    def _move_gathers(self, graph: Graph, starts: list[fx.Node]) -> None:
        waits = [wait_of(start) for start in starts]
        after = [max(-1, index - self.distance) for index in range(len(starts))]
        if self.budget is not None:
            after = _fit(graph, starts, waits, after, self.budget)
        anchors = [graph.placeholders[-1], *waits]
        for index, start in reversed(list(enumerate(starts))):
            if after[index] == index:
                waits[index].prepend(start)
            else:
                anchors[after[index] + 1].append(start)


def _fit(graph: Graph, starts: list[fx.Node], waits: list[fx.Node], after: list[int], budget: int) -> list[int]:
    """Delay gathers until they fit the budget: ``after[k]`` is the wait after which gather ``k`` starts, -1 for the
    top and ``k`` for just before its own wait.

    Time is counted in intervals: interval ``t`` ends with wait ``t``. A buffer is live from the interval in which its
    gather starts through that of its last use; one that starts just before its own wait, from the interval after it.
    """
    received = graph.with_role(Role.KEPT)
    last = _interval_of_last_use(graph, [*starts, *received], waits)
    live = [0] * (len(waits) + 1)
    for node in received:
        for t in range(last[node] + 1):
            live[t] += node.meta["fsdp"].nbytes
    placed: list[int] = []
    for k, start in enumerate(starts):
        nbytes = start.meta["fsdp"].nbytes
        earliest = max([after[k], *placed[-1:]])  # gathers keep their order
        exceeding = [t for t in range(earliest + 1, last[start] + 1) if live[t] + nbytes > budget]
        first = max(exceeding, default=earliest) + 1
        if first > k + 1:
            needed = max(live[k + 1 : last[start] + 1]) + nbytes
            unit = start.meta["fsdp"].unit or "root"
            raise BudgetError(
                f"budget of {budget:,} bytes is too small for unit {unit!r} in the {graph.phase} graph: it and "
                f"what must be gathered at the same time are {needed:,} bytes"
            )
        placed.append(first - 1)
        for t in range(first, last[start] + 1):
            live[t] += nbytes
    return placed


def _interval_of_last_use(graph: Graph, buffers: list[fx.Node], waits: list[fx.Node]) -> dict[fx.Node, int]:
    roots = graph.alias_roots()
    last = dict.fromkeys(buffers, 0)
    interval, ends = 0, set(waits)
    for node in graph.fx_graph.nodes:
        interval += node in ends
        for root in {root for source in node.all_input_nodes for root in roots[source]}:
            if root in last:
                last[root] = interval
    return last


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
