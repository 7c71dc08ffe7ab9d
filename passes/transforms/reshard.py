"""Graphs hand gathered buckets to each other, or gather them again.

**From forward to backward**: a bucket stays gathered (ZeRO-2) or is gathered again (ZeRO-3). A kept bucket's whole
buffer becomes one more tensor that forward saves and backward receives, and its gather in backward disappears.

**A shard for a smaller group**: FSDP2's ``reshard_after_forward=<int>``, for groups of ``n`` consecutive ranks. After
its last use in forward a bucket is cut to this rank's 1/n of it; backward gathers that over the small group. Over ``W``
ranks the parameter at element ``o`` of the shard lies at ``W * o`` of the bucket, as ``W`` chunks. With ``s = W/n``, a
rank keeps ``s`` consecutive chunks of each, at ``s * o``: a shard of the same bucket over ``n`` ranks, with every
offset and size ``s`` times as large. A rank's place in its group says at run time which; the graph is the same on all
ranks.

**From one piece of a broken model to a later one** of the same forward call (``fullgraph=False``): a piece *takes* a
bucket as an input in place of a gather, and *gives* one as an output behind all others, which nothing frees.
``PassContext.sharing`` says which; backward, and what forward keeps for it, are the same for all variants of a piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.analysis.room import room_of
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import layout_of
from graph_fsdp.passes.ir.operands import arguments, operand
from graph_fsdp.passes.ir.settings import SettingError
from graph_fsdp.passes.transforms import edits
from graph_fsdp.passes.transforms.schedule import WORTH, Gathers, Segments, at_distance, choose, find_gathers


def keeps_for_backward(pipeline: Iterable[GraphPass]) -> bool:
    """Return whether a pass of the pipeline decides which buckets are kept from forward to backward."""
    return any("resharded" in p.provides for p in pipeline)


@dataclass(frozen=True, repr=False)
class Reshard(GraphPass):
    """Decides which buckets forward keeps for backward, by ``reshard_after_forward`` of the context.

    True gathers every bucket again in backward, False keeps every bucket, None keeps only the unit that forward uses
    last, whose backward comes first, and the one before it where that makes backward a hundredth faster by the clock of
    ``simulate``, without a ``budget``: backward gathers it before it computes. ``"auto"`` keeps, within ``budget``
    bytes of gathered parameters, the buckets whose second gather costs most time per byte. What is not kept is cut to a
    shard where there is a group for it.
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
            edits.mark_escaping(wait)
        saved = list(kept)
        if context.model.reshard_size:
            whole = {wait for wait in waits if _set(wait, context) is True}  # gathered again from all ranks
            saved += _keep_shards(graph, [wait for wait in waits if wait not in kept and wait not in whole], context)
        graph.kept = {node.meta["fsdp"].bucket: node for node in saved}
        edits.add_outputs(graph, context.forward_outputs, saved)
        names = ", ".join(wait.meta["fsdp"].bucket for wait in kept) or "none"
        return f"kept for backward: {names}; gathered again: {len(waits) - len(kept)}"

    def _choose(self, graph: Graph, waits: list[fx.Node], context: PassContext) -> list[fx.Node]:
        """Choose what is kept: what the user has set for a unit since ``compile`` goes before what holds for all."""
        chosen = self._choose_by_policy(graph, waits, context)
        again = {wait: _set(wait, context) for wait in waits}
        kept = [wait for wait in waits if (wait in chosen if again[wait] is None else not again[wait])]
        # The user has said that backward reads nothing of some.
        return [wait for wait in kept if not edits.units_of(wait, context) <= context.settings.not_gathered_in_backward]

    def _choose_by_policy(self, graph: Graph, waits: list[fx.Node], context: PassContext) -> list[fx.Node]:
        if context.reshard_after_forward is True or not waits:
            return []
        if context.reshard_after_forward is False:
            return waits
        if context.reshard_after_forward == "auto":
            starts: list[fx.Node] = [operand(wait) for wait in waits]
            kept = _worth_keeping(find_gathers(graph, starts), starts, self.budget, context.cost)
            return [waits[k] for k in kept]
        last = _used_last(graph, waits)
        room = room_of(context)
        if self.budget is not None or not room or "backward" not in context.graphs:
            return last
        before = _used_last(graph, rest) if (rest := [wait for wait in waits if wait not in last]) else []
        is_worth_it = bool(before) and _is_faster([*before, *last], last, context)
        return [*before, *last] if is_worth_it and room.has(sum(w.meta["fsdp"].nbytes for w in before)) else last


def _receive(graph: Graph, context: PassContext) -> str:
    before = edits.first_saved(graph)
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
        node = edits.add_input(graph, before, name, source.meta["val"], replace(record, role=role, escapes=False))
        if wait is not None and is_shard:
            _gather_from(graph, node, operand(wait), context)
        elif wait is not None:
            edits.use_instead(graph, wait, node)
    _check_needed(graph, context)
    return f"received from forward: {', '.join(received) or 'none'}"


def _set(wait: fx.Node, context: PassContext) -> bool | None:
    """Say whether a bucket is set to be gathered again, which all of its units have to be; None if not set."""
    settings = dict(context.settings.reshard_after_forward)
    found = [settings[unit] for unit in edits.units_of(wait, context) if unit in settings]
    return all(found) if found else None


def _check_needed(graph: Graph, context: PassContext) -> None:
    """Refuse a backward that reads parameters of a unit that ``set_unshard_in_backward(False)`` named."""
    unneeded = context.settings.not_gathered_in_backward
    for node in graph.with_role(Role.UNPACK) if unneeded else ():
        name = node.meta["fsdp"].params[0]
        if (unit := context.model.spec_of(name).unit) in unneeded:
            raise SettingError(
                f"set_unshard_in_backward(False) was called on unit {unit or 'root'!r}, and backward reads its "
                f"parameter {name!r}; call set_unshard_in_backward(True) on it"
            )


def _used_last(graph: Graph, waits: list[fx.Node]) -> list[fx.Node]:
    """Return the buckets of the unit that is used last of these, as far as no other unit is used after them."""
    gathers = find_gathers(graph, [operand(wait) for wait in waits])
    by_use = sorted(range(len(waits)), key=lambda k: (gathers.last[k], k), reverse=True)
    units = [waits[k].meta["fsdp"].unit for k in by_use]
    kept = itertools.takewhile(lambda place: units[place] == units[0], range(len(units)))
    return [waits[k] for k in sorted(by_use[place] for place in kept)]


def _is_faster(kept: list[fx.Node], than: list[fx.Node], context: PassContext) -> bool:
    """Say whether a backward that is given the one rather than the other buckets is a hundredth faster by the clock."""
    graph, cost = context.graphs["backward"], context.cost
    assert cost is not None
    gathers = graph.with_role(Role.GATHER_START)
    given, otherwise = ({wait.meta["fsdp"].bucket for wait in waits} for waits in (kept, than))
    spared = [start for start in gathers if start.meta["fsdp"].bucket in given - otherwise]
    packed = sum(cost.packing_seconds(start) + cost.packing_seconds(dialect.wait_of(start)) for start in spared)
    # It takes at least what it computes, and is faster by no more than the gathers that are spared.
    most = packed + sum(map(cost.collective_seconds, spared))
    if most <= (WORTH - 1) * cost.least_seconds(graph):
        return False
    seconds = cost.graph_seconds(graph)
    if most <= (WORTH - 1) * (sum(seconds.values()) - packed):
        return False

    def taken(names: set[str]) -> float:
        starts = [start for start in gathers if start.meta["fsdp"].bucket not in names]
        segments = Segments.of(graph.nodes, starts, cost, seconds)
        return segments.seconds(choose(find_gathers(graph, starts), segments, None, room_of(context)))

    return taken(given) * WORTH < taken(otherwise)


def _worth_keeping(gathers: Gathers, starts: list[fx.Node], budget: int | None, cost: CostModel | None) -> list[int]:
    """Choose greedily by seconds per byte; of equals the one used later, whose memory is held for less time. What is
    kept is live to the end of forward, beside what is gathered one bucket ahead."""
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


# Shards for a smaller group


def scale_of(context: PassContext) -> int:
    """Return how many chunks of a parameter a rank keeps, by which offsets and sizes grow."""
    return context.model.mesh.world_size // context.model.reshard_size


def _keep_shards(graph: Graph, waits: list[fx.Node], context: PassContext) -> list[fx.Node]:
    """Cut a shard out of each of these buffers, before the first collective after its last use."""
    reads = {gather.wait: gather.reads for gather in graph.gathers}
    next_communication = graph.next_of(dialect.COMMUNICATION)
    found = []
    for wait in waits:
        bucket, model = context.bucket_of(wait.meta["fsdp"].params[0]), context.model
        chunks = (list(bucket.offsets.values()), [p.shard_numel for p in bucket.parameters])
        sizes = (bucket.shard_numel, bucket.world_size, model.reshard_size)
        with graph.fx_graph.inserting_before(next_communication[[wait, *reads[wait]][-1]]):
            given = (wait, *chunks, *sizes, model.reshard_group)
            kept = graph.call(dialect.keep_shard, given, name=f"shard_{bucket.name}")
        found.append(edits.recorded(kept, wait.meta["fsdp"], Role.KEEP_SHARD))
    return found


def _gather_from(graph: Graph, shard: fx.Node, start: fx.Node, context: PassContext) -> None:
    """Gather a bucket of backward from such a shard, over the small group."""
    model, scale, given, layout = context.model, scale_of(context), arguments(start), layout_of(start)
    scaled = ([scale * value for value in values] for values in (layout.offsets, given.messages, layout.numels))
    offsets, messages, numels = scaled
    over = (scale * layout.length, given.dtype, model.reshard_size, model.reshard_group)
    new = ([shard], offsets, *over, messages, numels, given.custom)
    start.args = edits.without_defaults(dialect.all_gather_start, new)
    edits.erase_unread(graph, given.shards)


# Pieces of a broken model


def share_buckets(graph: Graph, context: PassContext) -> None:
    """Take and give a bucketed graph's shared buckets: ``graph.taken`` names those taken, in the order of its last
    inputs, ``graph.given`` those given, in that of its last outputs."""
    sharing = context.sharing
    if not sharing or graph.phase == "backward":
        return
    # What unshard() made whole follows what is shared, see ``UnshardedUnits.feeding``.
    inputs = itertools.takewhile(lambda node: not has_role(node, Role.UNSHARDED), graph.placeholders)
    *_, last = inputs
    buffers: dict[str, fx.Node] = {}
    for wait in graph.with_role(Role.GATHER_WAIT):
        record, bucket = wait.meta["fsdp"], wait.meta["fsdp"].bucket
        buffers[bucket] = wait
        if bucket in sharing.takes:
            name = f"shared_{bucket.replace('.', '_')}"
            kept = replace(record, role=Role.KEPT)
            buffers[bucket] = last = edits.add_input(graph, last.next, name, wait.meta["val"], kept)
            edits.use_instead(graph, wait, last)
    graph.taken = [bucket for bucket in buffers if bucket in sharing.takes]
    graph.given = {bucket: node for bucket, node in buffers.items() if bucket in sharing.gives}
    for node in graph.given.values():
        edits.mark_escaping(node)
    edits.add_outputs(graph, None, graph.given.values())
