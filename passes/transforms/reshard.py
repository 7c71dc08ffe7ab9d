"""Which buckets stay gathered from forward to backward (ZeRO-2) and which are gathered again (ZeRO-3).

A kept bucket becomes one more tensor that forward saves and backward receives: its buffer, whole. Its gather in
backward disappears.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.passes.ir.settings import SettingError
from graph_fsdp.passes.transforms.edits import add_input, add_outputs, mark_escaping, units_of, use_instead
from graph_fsdp.passes.transforms.keep_shard import gather_from, keep_shards
from graph_fsdp.passes.transforms.schedule import Gathers, at_distance, find_gathers


@dataclass(frozen=True, repr=False)
class Reshard(GraphPass):
    """``reshard_after_forward``: True gathers every bucket again in backward, False keeps every bucket, None keeps
    only the unit that forward uses last, whose backward comes first and would gather it again at once. ``"auto"``
    keeps, within ``budget`` bytes of gathered parameters, the buckets whose second gather costs most time per byte.
    Where the model has a group to reshard to, what is not kept is cut to a shard over it (``keep_shard.py``).
    """

    budget: int | None = None

    name = "reshard"
    phases = ("forward", "backward")
    requires = ("bucketed",)
    provides = ("resharded",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        return self._keep(graph, context) if graph.phase == "forward" else _receive(graph, context)

    def _keep(self, graph: Graph, context: PassContext) -> str:
        waits = graph.with_role(Role.GATHER_WAIT)
        if context.plan.kept is None:
            context.plan.kept = [wait.meta["fsdp"].bucket for wait in self._choose(graph, waits, context)]
        kept = [wait for wait in waits if wait.meta["fsdp"].bucket in context.plan.kept]
        if context.sharing:  # what was taken from an earlier piece is kept as if this one had gathered it
            found = {node.meta["fsdp"].bucket: node for node in (*graph.with_role(Role.KEPT), *waits)}
            kept = [found[bucket] for bucket in context.sharing.kept]
        for wait in kept:
            mark_escaping(wait)
        saved = list(kept)
        if context.model.reshard_size:
            whole = {wait for wait in waits if _set(wait, context) is True}  # gathered again from all ranks
            saved += keep_shards(graph, [wait for wait in waits if wait not in kept and wait not in whole], context)
        graph.kept = {node.meta["fsdp"].bucket: node for node in saved}
        # Saved tensors follow the user's outputs; ours come first among them (see [Note: saved tensors]).
        add_outputs(graph, context.forward_outputs, saved)
        names = ", ".join(wait.meta["fsdp"].bucket for wait in kept) or "none"
        return f"kept for backward: {names}; gathered again: {len(waits) - len(kept)}"

    def _choose(self, graph: Graph, waits: list[fx.Node], context: PassContext) -> list[fx.Node]:
        """What the user has set for a unit since ``compile`` goes before what holds for all."""
        chosen = self._choose_by_policy(graph, waits, context)
        again = {wait: _set(wait, context) for wait in waits}
        kept = [wait for wait in waits if (wait in chosen if again[wait] is None else not again[wait])]
        # The user has said that backward reads nothing of some.
        return [wait for wait in kept if not units_of(wait, context) <= context.settings.not_gathered_in_backward]

    def _choose_by_policy(self, graph: Graph, waits: list[fx.Node], context: PassContext) -> list[fx.Node]:
        if context.reshard_after_forward is True or not waits:
            return []
        if context.reshard_after_forward is False:
            return waits
        starts: list[fx.Node] = [operand(wait) for wait in waits]
        gathers = find_gathers(graph, starts, waits)
        if context.reshard_after_forward == "auto":
            return [waits[k] for k in _worth_keeping(gathers, starts, self.budget, context.cost)]
        return _used_last(gathers, waits)


def _receive(graph: Graph, context: PassContext) -> str:
    # [Note: saved tensors] AOTAutograd's backward takes symbolic sizes, then saved tensors, then tangents. Ours
    # go in front of the saved tensors, as they stand in front of them among forward's outputs.
    first_tensor = next(n for n in graph.placeholders if isinstance(n.meta.get("val"), torch.Tensor))
    gathered = {wait.meta["fsdp"].bucket: wait for wait in graph.with_role(Role.GATHER_WAIT)}
    received: list[str] = []
    saved = context.graphs["forward"].kept if "forward" in context.graphs else {}
    for index, (bucket, source) in enumerate(saved.items()):
        record, wait = source.meta["fsdp"], gathered.get(bucket)
        if is_shard := record.role is Role.KEEP_SHARD:
            name, role = f"shard_{index - len(received)}", Role.KEPT_SHARD
        else:
            name, role = f"kept_{index}", Role.KEPT
            received.append(bucket)
        node = add_input(graph, first_tensor, name, source.meta["val"], replace(record, role=role))
        if wait is not None and is_shard:
            gather_from(graph, node, operand(wait), context)
        elif wait is not None:
            use_instead(graph, wait, node)
    _check_needed(graph, context)
    return f"received from forward: {', '.join(received) or 'none'}"


def _set(wait: fx.Node, context: PassContext) -> bool | None:
    """Whether the user has set that a bucket is gathered again; None where nothing was. A bucket of several units is
    kept if one of them is to be."""
    settings = dict(context.settings.reshard_after_forward)
    found = [settings[unit] for unit in units_of(wait, context) if unit in settings]
    return all(found) if found else None


def _check_needed(graph: Graph, context: PassContext) -> None:
    """Backward reads no parameter of a unit that ``set_unshard_in_backward(False)`` named."""
    unneeded = context.settings.not_gathered_in_backward
    for node in graph.with_role(Role.UNPACK) if unneeded else ():
        name = node.meta["fsdp"].params[0]
        if (unit := context.model.spec_of(name).unit) in unneeded:
            raise SettingError(
                f"set_unshard_in_backward(False) was called on unit {unit or 'root'!r}, and backward reads its "
                f"parameter {name!r}; call set_unshard_in_backward(True) on it"
            )


def _used_last(gathers: Gathers, waits: list[fx.Node]) -> list[fx.Node]:
    """The buckets of the unit that is used last, as far as no other unit is used after them."""
    by_use = sorted(range(len(waits)), key=lambda k: (gathers.last[k], k), reverse=True)
    last_unit = waits[by_use[0]].meta["fsdp"].unit
    kept = set(itertools.takewhile(lambda k: waits[k].meta["fsdp"].unit == last_unit, by_use))
    return [wait for k, wait in enumerate(waits) if k in kept]


def _worth_keeping(gathers: Gathers, starts: list[fx.Node], budget: int | None, cost: CostModel | None) -> list[int]:
    """Greedily by seconds per byte; of equals the one used later, whose memory is held for less time.

    What is kept is live to the end of forward, beside what is gathered one bucket ahead.
    """
    if budget is None or cost is None:
        raise ValueError(
            "reshard_after_forward='auto' keeps what a budget of gathered bytes has room for; pass "
            "passes=default_pipeline(budget=…)"
        )
    live = gathers.live(at_distance(len(gathers), 1))
    worth = [cost.collective_seconds(start) / max(1, start.meta["fsdp"].nbytes) for start in starts]
    kept = []
    for k in sorted(range(len(starts)), key=lambda k: (-worth[k], -gathers.last[k], -k)):
        nbytes, rest = gathers.nbytes[k], range(gathers.last[k] + 1, len(live))
        if all(live[t] + nbytes <= budget for t in rest):
            for t in rest:
                live[t] += nbytes
            kept.append(k)
    return sorted(kept)
