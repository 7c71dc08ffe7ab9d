"""The verifier's checks of gradients: each is reduced, once, over its own ranks, and lies where it is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import fx

from graph_fsdp.compat import inputs_of
from graph_fsdp.passes.context import PassContext, VerificationError
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import begins_of, cut_of
from graph_fsdp.passes.ir.operands import argument, operand
from graph_fsdp.passes.transforms.bucket import is_unreplicated
from graph_fsdp.passes.verify.places import exchanged


class GradientChecks:
    """Checks the gradients of one graph. ``nodes`` and ``recorded``: its nodes, and the records of those that have
    one, as they are when it is checked."""

    pass_name: str
    nodes: list[fx.Node]
    recorded: dict[fx.Node, NodeRecord]
    edited: set[fx.Node]  # since the check before
    gradients: dict[int, str]  # the place of a gradient among the outputs → its parameter

    def __init__(self, graph: Graph, context: PassContext, reduced: set[str] | None) -> None:
        self.graph, self.context = graph, context
        own = {dialect.parameter_of(n): operand(n) for n in graph.fx_graph.nodes if n.target is dialect.reduce_grad}
        self.own = own  # parameter → its gradient, before it is reduced
        self.reduced = set(own) if reduced is None else reduced

    def _fail(self, invariant: str, node: fx.Node | None, detail: str, parameters: tuple[str, ...] = ()) -> NoReturn:
        raise VerificationError(self.pass_name, self.graph, invariant, node, detail, parameters)

    def _with_role(self, *roles: Role) -> list[fx.Node]:
        """Return the nodes of these roles, in graph order."""
        return [node for node, found in self.recorded.items() if found.role in roles]

    def _reductions(self) -> None:
        """Each parameter whose gradient the joint graph reduced is still reduced, exactly once."""
        settings, parameters = self.context.settings, self.context.model.parameters
        may_be_kept = settings.unsynced | settings.unreplicated
        seen: set[str] = set()
        produced: set[str] = set()
        for node in self._with_role(Role.REDUCE, Role.REDUCE_START, Role.SHARD_GRAD, Role.ACCUMULATE):
            names = node.meta["fsdp"].params
            if has_role(node, Role.ACCUMULATE) and node.meta["fsdp"].unit not in may_be_kept:
                self._fail("each gradient is reduced exactly once", node, f"{names[0]} is kept and not reduced", names)
            if has_role(node, Role.SHARD_GRAD) or node.target is dialect.accumulate_grad:
                produced |= set(names)
                if has_role(node, Role.SHARD_GRAD) or is_unreplicated(parameters[names[0]], self.context):
                    continue
            for name in names:
                if name in seen:
                    self._fail("each gradient is reduced exactly once", node, f"{name} is reduced a second time")
                seen.add(name)
        phase = self.graph.phase
        if phase not in ("joint", "backward") or "annotated" not in self.graph.facts:
            return
        bucketed = "bucketed" in self.graph.facts
        if bucketed and self.context.model.mesh.ranks == 1:
            return
        kept = {n for n, p in parameters.items() if p.empty or p.mesh.ranks == 1}
        expected = self.reduced - kept if bucketed else self.reduced
        if expected - seen or seen - expected:
            wrong = sorted(expected - seen) or sorted(seen - expected)
            invariant = "each gradient is reduced exactly once"
            returned = (v for i, v in enumerate(self.graph.outputs) if self.gradients.get(i) == wrong[0])
            node = next((value for value in returned if isinstance(value, fx.Node)), self.graph.output)
            self._fail(invariant, node, f"not reduced as traced: {', '.join(wrong)}", tuple(wrong))
        for start in self._with_role(Role.REDUCE_START):
            dropped = tuple(name for name in start.meta["fsdp"].params if name not in produced)
            if dropped:
                invariant = "each reduced gradient is returned"
                self._fail(invariant, start, f"reduced and dropped: {', '.join(dropped)}", dropped)

    def _reduced_over(self) -> None:
        """Each gradient is reduced once over the group that shards, then once over the replicas, if any."""
        phase, model = self.graph.phase, self.context.model
        if phase != "backward" or "bucketed" not in self.graph.facts:
            return
        invariant = "each gradient is reduced once over each group"
        over: dict[fx.Node, tuple[str, ...]] = {}
        behind: set[fx.Node] = set()  # what reads nodes of ``over``
        for node in self.nodes:
            if node not in behind and node not in self.recorded:
                continue
            sources = [over[source] for source in inputs_of(node) if source in over]
            groups = tuple(dict.fromkeys(itertools.chain.from_iterable(sources)))
            if has_role(node, Role.REDUCE_START, Role.REPLICATE_START):
                groups, due = (*groups, dialect.group_of(node)), self._due(node)
                if groups != due[: len(groups)]:
                    wrong = f"{node} reduces over the groups {groups}, in order; its parameters' are {due}"
                    self._fail(invariant, node, wrong)
            elif has_role(node, Role.SHARD_GRAD) and groups != (due := self._due(node)):
                names = tuple(n for n in node.meta["fsdp"].params if not model.parameters[n].empty)
                missing = "its replicas" if groups and groups[0] == due[0] else "the ranks that shard it"
                if names:
                    self._fail(invariant, node, f"the gradient of {names[0]} is not reduced over {missing}", names)
            if groups:
                over[node] = groups
                behind.update(node.users)

    def _due(self, node: fx.Node) -> tuple[str, ...]:
        """Return the groups over which the gradients of a node are to be reduced."""
        model = self.context.model
        return model.reduce_groups(model.parameters[node.meta["fsdp"].params[0]])

    def _where_gradients_lie(self) -> None:
        """What is reduced as the gradient of a parameter is its own, and what is read of the result is too."""
        if not (self.own and self.edited):
            return
        invariant, found = "each gradient is its parameter's", dict(self._reduced())
        names = [name for name in self.own if name in found]
        place = exchanged([self.own[name] for name in names], [found[name][1] for name in names])
        if place is not None:
            name = names[place]
            wrong = f"{found[name][1]} is reduced as the gradient of {name}, which is {self.own[name]}"
            self._fail(invariant, found[name][0], wrong, (name,))
        begins = {name: span for start in self._with_role(Role.REDUCE_START) for name, span in self._spans(start)}
        for node in self._with_role(Role.SHARD_GRAD):
            piece, (name, *_) = node, node.meta["fsdp"].params
            while piece.target is torch.ops.aten.view.default:
                piece = operand(piece)
            is_cut = name in begins and piece.target is torch.ops.aten.slice.Tensor
            if is_cut and (cut := cut_of(piece)) != begins[name]:
                wrong = f"the gradient of {name} lies at {begins[name]} of its bucket, read at {cut}"
                self._fail(invariant, node, wrong, (name,))

    def _reduced(self) -> Iterator[tuple[str, tuple[fx.Node, fx.Node]]]:
        """Find what is reduced, or kept, of each parameter: the parameter, the node that does so, and the gradient."""
        for node in self._with_role(Role.REDUCE, Role.REDUCE_START, Role.ACCUMULATE):
            names = node.meta["fsdp"].params
            grads = argument(node, "grads") if has_role(node, Role.REDUCE_START) else [operand(node)]
            yield from ((name, (node, grad)) for name, grad in zip(names, grads, strict=False))

    def _spans(self, start: fx.Node) -> Iterator[tuple[str, tuple[int, int]]]:
        """Say from where to where the shards of gradients lie in what a reduction yields."""
        for name, begin in zip(start.meta["fsdp"].params, begins_of(start), strict=False):
            yield name, (begin, begin + self.context.model.parameters[name].shard_numel)
