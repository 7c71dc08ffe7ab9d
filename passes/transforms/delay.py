"""Products that are gradients of weights move behind the start of backward's last reduction, which runs beside them.

Nothing is computed behind the last gradient of backward, an embedding's as a rule, and its reduction is long. No other
gradient of an activation needs the products that are gradients of weights, so that those of the buckets before it can
wait. Their reductions follow it in the same order.

*How many.* The clock of ``simulate`` decides: one bucket more as long as that is faster, and as long as what the
products read and what their reductions send is within the room that hardware leaves for running beside compute. Ranks
that are given a plan delay what its order of reductions says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.analysis.kernels import Kind, kind_of, value_nbytes
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role, wait_of
from graph_fsdp.passes.ir.effects import is_random, is_view, mutated_inputs
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import packed_nbytes
from graph_fsdp.passes.transforms.edits import with_results
from graph_fsdp.passes.transforms.schedule import Segments, choose, find_gathers, room_of

_NEAR = 0.1  # what is left of the gain is not worth that the regions of one more unit differ from those of the others
_ENOUGH = 2  # products that take so many times as long as the last reduction hide it, or nothing does


@dataclass(frozen=True, repr=False)
class DelayWeightGradients(GraphPass):
    """Delays the products of the last ``buckets`` buckets that have any, without the very last: a number, or ``"auto"``
    for what the cost model says; 0 where nothing runs beside a collective."""

    buckets: int | Literal["auto"] = "auto"
    budget: int | None = None

    name = "delay_weight_gradients"
    phases = ("backward",)
    requires = ("bucketed",)

    def __post_init__(self) -> None:
        number = self.buckets
        if number != "auto" and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise ValueError(f"delayed_weight_gradients must be 0 or more buckets or 'auto', got {number!r}")

    def run(self, graph: Graph, context: PassContext) -> str | None:
        delayed, last = self._delayed(graph, context)
        graph.delayed = [start.meta["fsdp"].bucket for start in delayed]
        if last is None or not delayed:
            return "no products are delayed"
        moved = sum(kind_of(node) is Kind.KERNEL for nodes in delayed.values() for node in nodes)
        return f"{moved} products of {', '.join(graph.delayed)} follow the reduction of {last.meta['fsdp'].bucket}"

    def _delayed(self, graph: Graph, context: PassContext) -> tuple[dict[fx.Node, list[fx.Node]], fx.Node | None]:
        """Move products; return those that did by the start of their reduction, and the start that they follow."""
        *starts, last = graph.with_role(Role.REDUCE_START) or [None]
        planned = context.plan.collectives.get("backward")
        room = room_of(context)
        if last is None or not starts or self.buckets == 0 or (self.buckets == "auto" and not planned and not room):
            return {}, None
        products = _products(graph, starts)
        buckets = {start.meta["fsdp"].bucket: start for start in products}
        if planned is not None:
            names = [bucket for role, bucket in planned if role == Role.REDUCE_START.value]
            place = names.index(last.meta["fsdp"].bucket) if last.meta["fsdp"].bucket in names else len(names)
            chosen = [buckets[name] for name in names[place + 1 :] if name in buckets]
        elif self.buckets == "auto":
            chosen = self._fastest(graph, products, last, context)
        else:
            chosen = list(products)[-self.buckets :]
        graph.reorder(_behind(graph, last, {start: products[start] for start in chosen}))
        return {start: products[start] for start in chosen}, last

    def _fastest(
        self, graph: Graph, products: dict[fx.Node, list[fx.Node]], last: fx.Node, context: PassContext
    ) -> list[fx.Node]:
        assert context.cost is not None
        gathers = graph.with_role(Role.GATHER_START)
        waits = [wait_of(start) for start in gathers]
        seconds, room = context.cost.graph_seconds(graph), room_of(context)
        described, hidden = find_gathers(graph, gathers, waits), context.cost.collective_seconds(last)
        timed: list[tuple[float, list[fx.Node]]] = []
        for count in range(len(products) + 1):
            chosen = list(products)[len(products) - count :]
            delayed = {start: products[start] for start in chosen}
            if _held(delayed) > room:
                break
            segments = Segments.of(_behind(graph, last, delayed), gathers, waits, context.cost, seconds)
            timed.append((segments.seconds(choose(described, segments, self.budget, room)), chosen))
            if sum(seconds[node] for nodes in delayed.values() for node in nodes) > _ENOUGH * hidden:
                break
        slowest, fastest = timed[0][0], min(each for each, _ in timed)
        return next(chosen for each, chosen in timed if each <= fastest + _NEAR * (slowest - fastest))


def _products(graph: Graph, starts: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Find for each of these reductions the kernels that it alone needs, with views of what they read, and what is
    computed of them; no reductions whose kernels have to stay."""
    owner: dict[fx.Node, fx.Node | None] = {start: start for start in starts}
    for node in reversed(graph.nodes):
        users = {owner.get(user) for user in node.users}
        if node not in owner and node.op == "call_function" and len(users) == 1:
            owner[node] = users.pop()
    roots = graph.alias_roots()
    writes = (node for node in graph.nodes if mutated_inputs(node) and node.target not in dialect.EXECUTED)
    fixed = {root for node in writes for source in mutated_inputs(node) for root in roots[source]}
    fixed |= set(graph.with_role(Role.GATHER_START, Role.KEPT))  # what reads parameters would hold them
    found: dict[fx.Node, dict[fx.Node, None]] = {start: {} for start in starts}
    for node in graph.nodes:
        start = owner.get(node)
        if start is None or node is start:
            continue
        if kind_of(node) is Kind.KERNEL or not found[start].keys().isdisjoint(node.all_input_nodes):
            views = (source for source in node.all_input_nodes if owner.get(source) is start and is_view(source))
            found[start].update(dict.fromkeys((*views, node)))
    return {start: nodes for start, group in found.items() if (nodes := _movable(list(group), roots, fixed))}


def _movable(nodes: list[fx.Node], roots: dict[fx.Node, frozenset[fx.Node]], fixed: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes if all of them may run at the end of the graph, else none."""
    for node in nodes:
        reads = {root for source in node.all_input_nodes for root in roots[source]}
        own = node.target in dialect.EXECUTED or getattr(node.target, "namespace", "") == "_c10d_functional"
        if own or is_random(node) or isinstance(node.target, compat.HigherOrderOperator) or reads & fixed:
            return []
    return nodes


def _behind(graph: Graph, last: fx.Node, delayed: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
    """Return the order in which products, each with the reduction that needs them, follow the last reduction."""
    moved = {s: [*nodes, s, *with_results(wait_of(s))] for s, nodes in delayed.items()}
    away = {node for nodes in moved.values() for node in nodes}
    tail = [node for nodes in moved.values() for node in nodes]
    before = [node for node in graph.nodes if node not in away]
    results = set(with_results(wait_of(last)))
    place = max(index for index, node in enumerate(before) if node is last or node in results) + 1
    return [*before[:place], *tail, *before[place:]]


def _held(delayed: dict[fx.Node, list[fx.Node]]) -> int:
    """Count the bytes that delayed products read, and that their reductions send."""
    products = [node for nodes in delayed.values() for node in nodes]
    read = {source for node in products for source in node.all_input_nodes} - set(products)
    packed = (packed_nbytes(start) for start in delayed if start.target is dialect.reduce_scatter_start)
    return sum(value_nbytes(node.meta["val"]) for node in read) + sum(packed)
