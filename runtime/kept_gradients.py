"""Gradients that were not reduced, until a graph reduces them: whole ones, and shards that replicas have not seen yet.

They are the model's, not a graph's: one graph keeps a gradient, another adds it to its own. What is kept is in the type
of the reduction, as FSDP2 keeps it, so that the sums have the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.effects import aliased_inputs
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operand, operands


@dataclass(frozen=True)
class KeepPlan:
    """The static part of one ``accumulate_grad``. ``reduced``: what is kept is a shard, reduced over the ranks that
    shard. ``owned``: nothing else uses the gradient's memory."""

    param: str
    dtype: torch.dtype
    reduced: bool
    owned: bool


@dataclass
class KeptGradients:
    """By parameter, and whether it is a reduced shard; and the functions that see reduced gradients, by unit."""

    gradients: dict[tuple[str, bool], Tensor] = field(default_factory=dict)
    hooks: dict[str, Callable[[Tensor], Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.gradients)

    @property
    def nbytes(self) -> int:
        return sum(g.nbytes for g in self.gradients.values())

    def add(self, plan: KeepPlan, grad: Tensor) -> None:
        key = plan.param, plan.reduced
        kept = self.gradients.get(key)
        if kept is not None:
            kept.add_(grad)
        elif plan.owned and grad.dtype is plan.dtype and grad.is_contiguous():
            self.gradients[key] = grad.detach()
        else:
            self.gradients[key] = grad.detach().to(plan.dtype, copy=True, memory_format=torch.contiguous_format)

    def added_to(self, grads: Any, params: tuple[str, ...], begins: tuple[int, ...]) -> Any:
        """``grads``, about to be reduced, and what is kept of them: a list of whole gradients, or, with ``begins``, a
        flat shard of all, which is changed."""
        if begins:
            for name, begin in zip(params, begins, strict=True):
                if (kept := self.gradients.pop((name, True), None)) is not None:
                    grads[begin : begin + kept.numel()].add_(kept.view(-1))
            return grads
        found = [self.gradients.pop((name, False), None) for name in params]
        return [g if kept is None else kept.add_(g) for g, kept in zip(grads, found, strict=True)]


def keep_plan(node: fx.Node, owned: frozenset[fx.Node]) -> KeepPlan:
    source = operand(node)
    while aliased := aliased_inputs(source):
        source = aliased[0]
    reduced = has_role(source, Role.REDUCE_START)
    return KeepPlan(dialect.argument(node, "param"), dialect.argument(node, "reduce_dtype"), reduced, node in owned)


def owned_gradients(graph: Graph) -> frozenset[fx.Node]:
    """The ``accumulate_grad`` nodes whose gradient fills memory of its own, which nothing uses after them."""
    nodes = graph.with_role(Role.ACCUMULATE)
    if not nodes:
        return frozenset()
    roots = graph.alias_roots()
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.fx_graph.nodes:
        last_use.update({root: node for source in node.all_input_nodes for root in roots[source]})
    taken: set[fx.Node] = set()
    owned = set()
    for node in nodes:
        grad = operand(node)
        (root, *others) = roots[grad]
        value = root.meta.get("val")
        fills = root.op == "call_function" and root.target not in dialect.EXECUTED and isinstance(value, Tensor)
        whole = fills and value is not None and not others and value.shape == grad.meta["val"].shape
        if whole and last_use[root] is node and root not in taken:
            owned.add(node)
        taken.add(root)
    return frozenset(owned)


def begins_in_shard(start: fx.Node) -> tuple[int, ...]:
    """For a reduction over the replicas: where in the shard each parameter's gradient begins."""
    first = operand(operand(start))
    values = [grad.meta["val"] for grad in operands(first)]
    world = dialect.argument(first, "world_size")
    if first.target is dialect.reduce_scatter_start:
        dtype, messages = dialect.argument(first, "dtype"), dialect.argument(first, "messages")
        return tuple(dialect.reduced_offsets(values, dtype, world, messages)[:-1])
    return tuple(itertools.accumulate((value.numel() for value in values[:-1]), initial=0))
