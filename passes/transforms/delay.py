"""Products that are gradients of weights move behind the start of backward's last reduction, which runs beside them.

Nothing is computed behind the last gradient of backward, an embedding's as a rule, so that nothing hides its reduction.
The gradients of activations, of which it is made, need none of the products that are gradients of weights. Those of the
buckets before it can wait, and their reductions, which are smaller, follow. Zero Bubble (Qi et al. 2023) does the same
for pipelines. Compute and link, each of a bucket's products before its reduction, are done soonest in Johnson's order
(1954): products that take less than their reduction come first, shortest first, then the others, longest reduction
first.

*How many.* The clock of ``simulate`` decides, among the last bucket, the last two and so on, up to products that take
twice as long as the last reduction, and as long as the memory model sees no more at the peak. A rank that is given a
plan delays what its order of reductions says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.analysis.kernels import Kind, kind_of
from graph_fsdp.passes.analysis.room import room_of
from graph_fsdp.passes.analysis.storages import most_bytes_at_once
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, wait_of
from graph_fsdp.passes.ir.effects import is_random, is_view, mutated_inputs
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.settings import is_count
from graph_fsdp.passes.transforms.edits import with_results
from graph_fsdp.passes.transforms.schedule import Segments, choose, find_gathers

Products = dict[fx.Node, list[fx.Node]]  # the start of a reduction → the nodes that may be delayed with it

_WORTH = 1.001  # so many times faster is worth it
_NEAR = 0.05  # what is left of the gain is not worth that the regions of one more unit differ from those of the others
_ENOUGH = 2  # products that take so many times as long as the last reduction hide it, or nothing does


@dataclass(frozen=True, repr=False)
class DelayWeightGradients(GraphPass):
    """Delays the products of the last ``buckets`` buckets that have any, without the very last: a number, or ``"auto"``
    for what the cost model says; 0 where nothing runs beside a collective."""

    buckets: int | Literal["auto"] = "auto"
    budget: int | None = None

    name = "delay_wgrad"
    phases = ("backward",)
    requires = ("bucketed",)
    provides = ("wgrad_delayed",)

    def __post_init__(self) -> None:
        number = self.buckets
        if number != "auto" and not is_count(number, least=0):
            raise ValueError(f"delay_wgrad must be 0 or more buckets or 'auto', got {number!r}")

    def run(self, graph: Graph, context: PassContext) -> str | None:
        reductions = graph.with_role(Role.REDUCE_START)
        if not reductions or self.buckets == 0 or (self.buckets == "auto" and not room_of(context)):
            return "none delayed"
        *starts, last = reductions
        products = _products(graph, starts)
        buckets = {_bucket(start): start for start in products}
        planned = context.plan.collectives.get("backward")
        if planned is not None:
            names = [name for role, name in planned if role == Role.REDUCE_START.value]
            later = names[names.index(_bucket(last)) + 1 :] if _bucket(last) in names else []
            chosen = [buckets[name] for name in later if name in buckets]
        elif self.buckets == "auto":
            chosen = self._fastest(graph, products, last, context)
        else:
            chosen = list(products)[-self.buckets :]
        if not chosen:
            return "none delayed"
        graph.reorder(_behind(graph, last, chosen, products))
        graph.delayed = [_bucket(start) for start in chosen]
        moved = sum(kind_of(node) is Kind.KERNEL for start in chosen for node in products[start])
        return f"{moved} products of {', '.join(graph.delayed)} follow the reduction of {_bucket(last)}"

    def _fastest(self, graph: Graph, products: Products, last: fx.Node, context: PassContext) -> list[fx.Node]:
        """Return the reductions whose products are worth delaying: the fewest that bring most of what can be gained,
        and fewer where the peak of memory would be higher."""
        assert context.cost is not None
        starts = graph.with_role(Role.GATHER_START)
        gathers, seconds, before = find_gathers(graph, starts), context.cost.graph_seconds(graph), graph.nodes
        taken = {start: sum(seconds[node] for node in (*nodes, start)) for start, nodes in products.items()}
        link = {start: context.cost.collective_seconds(start) for start in (*products, last)}

        def johnson(start: fx.Node) -> tuple[bool, float]:
            hides = taken[start] >= link[start]
            return hides, -link[start] if hides else taken[start]

        counts = range(len(products) + 1)
        sets = [sorted(list(products)[len(products) - count :], key=johnson) for count in counts]
        orders: list[list[fx.Node]] = []
        timed: list[float] = []
        for chosen in sets:
            orders.append(order := _behind(graph, last, chosen, products))
            segments = Segments.of(order, starts, context.cost, seconds)
            timed.append(segments.seconds(choose(gathers, segments, self.budget, room_of(context))))
            if sum(map(taken.__getitem__, chosen)) > _ENOUGH * link[last]:
                break

        def peak(count: int) -> int:
            graph.reorder(orders[count])
            return most_bytes_at_once(graph, context)

        fastest = min(timed)
        due = fastest + _NEAR * (timed[0] - fastest)
        count = next(n for n, each in enumerate(timed) if each <= due) if fastest * _WORTH < timed[0] else 0
        limit = peak(0) if count else 0
        while count and peak(count) > limit:
            count -= 1
        graph.reorder(before)
        return sets[count]


def _products(graph: Graph, starts: list[fx.Node]) -> Products:
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


def _behind(graph: Graph, last: fx.Node, chosen: list[fx.Node], products: Products) -> list[fx.Node]:
    """Return the order in which the products of the chosen reductions, each with its reduction, follow the last one,
    and the waits for all of these end the graph."""
    tail = [node for start in chosen for node in (*products[start], start)]
    waits = [node for start in (last, *chosen) for node in with_results(wait_of(start))]
    away = {*tail, *waits}
    before = [node for node in graph.nodes if node not in away]
    place = before.index(last) + 1
    return [*before[:place], *tail, *before[place:-1], *waits, graph.output]


def _bucket(start: fx.Node) -> str:
    bucket: str = start.meta["fsdp"].bucket
    return bucket
