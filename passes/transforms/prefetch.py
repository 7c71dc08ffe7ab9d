"""The prefetch pass starts gathers early enough to be hidden, and waits for reductions late.

Gathers start next to a wait, so that no compute region is cut for them (``schedule.py``), in the plan's order: a rank
that recompiles alone must not reorder collectives. A wait stands where compute regions are best cut: above cheap
operators that would be a region of their own, and above a norm whose weight it brings. Where that keeps a rank, whose
sizes fuse otherwise, from the plan's order, its waits and reductions stay where they are.

On a mesh that also replicates, a gradient is reduced over the group that shards, and the result over the replicas. The
second stage starts where the first is waited for, which is late, and is waited for later still, so that both run beside
compute. At most as many of each stage are under way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import fx
from torch.distributed.fsdp import BackwardPrefetch

from graph_fsdp.passes.analysis.kernels import Kind, kind_of
from graph_fsdp.passes.analysis.room import Room, room_of
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role, wait_of
from graph_fsdp.passes.ir.effects import is_cheap, is_view
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import arguments, operand
from graph_fsdp.passes.ir.settings import SettingError, is_count
from graph_fsdp.passes.transforms.edits import move_with_results, units_of, with_results
from graph_fsdp.passes.transforms.schedule import After, Segments, at_distance, choose, find_gathers, fit
from graph_fsdp.passes.transforms.sources import lift, place_copies, place_payloads

Distance = int | Literal["auto"] | BackwardPrefetch | None


@dataclass(frozen=True, repr=False)
class Prefetch(GraphPass):
    """Schedules gathers and reductions. ``distance`` says how gathers are started ahead of their use:

    - ``"auto"``: as late as still hides them by the cost model, within the budget; without a budget, within the memory
      that one unit ahead takes, two units, or a twentieth of the device's, where more saves a hundredth of the time and
      the step leaves as much (``analysis/room.py``).
    - an int: when the bucket so many before has arrived. 0 gathers right before the use, with nothing to hide it.
    - FSDP1's names, for backward (forward is then one ahead): ``BackwardPrefetch.BACKWARD_PRE``, when the bucket before
      has arrived; ``BACKWARD_POST``, when the bucket before was used last, which never holds two; None, 0.

    ``forward``: the same for forward and inference, where they differ from backward: an int or ``"auto"``.
    ``reductions_in_flight``: reductions that may be under way at once, at least 1; None: see
    :func:`reductions_under_way`.
    ``budget``: most bytes of gathered parameters at any point, under way or arrived; None for no limit.
    """

    distance: Distance = "auto"
    reductions_in_flight: int | None = None
    budget: int | None = None
    forward: int | Literal["auto"] | None = None

    name = "prefetch"
    requires = ("bucketed",)
    provides = ("scheduled",)

    def __post_init__(self) -> None:
        _check_distance("prefetch", self.distance)
        _check_distance("forward_prefetch", self.forward)
        if isinstance(self.forward, BackwardPrefetch):
            raise ValueError(f"forward_prefetch must be a number of buckets, 'auto' or None, got {self.forward}")
        if self.reductions_in_flight is not None and not is_count(self.reductions_in_flight):
            raise ValueError(f"reductions_in_flight must be 1 or more, got {self.reductions_in_flight!r}")
        if self.budget is not None and not is_count(self.budget):
            raise ValueError(f"budget must be a positive number of bytes or None, got {self.budget!r}")

    def run(self, graph: Graph, context: PassContext) -> str | None:
        context.budget = self.budget if self.budget is not None else context.budget
        planned = context.plan.collectives.get(graph.phase)
        gathers = graph.with_role(Role.GATHER_START)
        reductions = _in_plan_order(graph.with_role(Role.REDUCE_START), planned)
        distance = self._distance(graph.phase)
        lift(graph)
        recomputes = "joint" in context.graphs and context.graphs["joint"].recomputes_activations
        given = context.settings.reductions_in_flight or self.reductions_in_flight
        in_flight = given or reductions_under_way(reductions, recomputes, room_of(context))
        readers = {node for gather in graph.gathers for node in gather.reads}
        self._place(graph, gathers, distance, context)
        now = context.settings  # what comes behind a wait is not to come at the end
        over_replicas = given or (2 if now.stepped or now.over_groups or now.hooked else None)
        placed, delayed = graph.nodes, 0 if given else len(graph.delayed)
        defer_reductions(graph, reductions, in_flight, delayed, over_replicas)
        _hoist_waits(graph, readers, within_budget=self.budget is not None)
        if not context.plan.keep(graph):
            # Another rank's kernels fuse elsewhere. With waits as late and reductions as early as the graph has them,
            # its collectives come in the plan's order if they can.
            by_regions = graph.nodes
            graph.reorder(placed)
            defer_reductions(graph, reductions, in_flight, delayed, over_replicas, behind_fusible=False)
            if not context.plan.keep(graph):
                graph.reorder(by_regions)
        place_payloads(graph)
        place_copies(graph)
        limit = "" if self.budget is None else f", at most {self.budget:,} bytes gathered"
        ahead = f"{distance.name} gathers" if isinstance(distance, BackwardPrefetch) else f"gathers {distance} ahead"
        return f"{ahead}, at most {in_flight} reductions in flight{limit}"

    def _distance(self, phase: str) -> int | Literal["auto"] | BackwardPrefetch:
        if phase == "backward":
            return self.distance or 0
        if self.forward is not None:
            return self.forward
        return 1 if self.distance is None or isinstance(self.distance, BackwardPrefetch) else self.distance

    def _place(self, graph: Graph, starts: list[fx.Node], distance: Distance, context: PassContext) -> None:
        waits = [wait_of(start) for start in starts]
        gathers = find_gathers(graph, starts)
        if distance is BackwardPrefetch.BACKWARD_POST:
            after = list(range(len(starts)))
        elif distance == "auto" and context.cost is not None:
            segments = Segments.of(graph.nodes, starts, context.cost, context.cost.graph_seconds(graph))
            after = choose(gathers, segments, self.budget, room_of(context))
        else:
            after = at_distance(len(starts), distance if isinstance(distance, int) else 1)
        after, is_explicit = _explicit(graph, waits, after, context)
        if self.budget is not None:
            after = fit(gathers, after, self.budget)
        _move(graph, starts, waits, after)
        if distance is BackwardPrefetch.BACKWARD_POST and not is_explicit:
            _start_after_last_uses(graph, starts, waits)


def _check_distance(name: str, distance: Distance) -> None:
    if distance is None or distance == "auto" or isinstance(distance, BackwardPrefetch):
        return
    if not is_count(distance, least=0):
        raise ValueError(f"{name} must be 0 or more buckets or 'auto', got {distance!r}")


def _explicit(graph: Graph, waits: list[fx.Node], after: After, context: PassContext) -> tuple[After, bool]:
    """Apply FSDP2's ``set_modules_to_forward_prefetch`` (``…_backward_prefetch``), and say whether any is set.

    When the first bucket of a unit has arrived, the gathers of the units that it names start, and those before them in
    the plan's order no later. Units that nobody names start as they would without.

    Raises:
        SettingError: a unit is to be gathered when one that is used after it has arrived.
    """
    settings = context.settings
    lists = settings.backward_prefetch if graph.phase == "backward" else settings.forward_prefetch
    if not lists or not waits:
        return after, False
    of_unit: dict[str, list[int]] = {}
    for k, wait in enumerate(waits):
        for unit in units_of(wait, context):
            of_unit.setdefault(unit, []).append(k)
    arrivals = _arrivals(graph, waits, of_unit, context)
    after = list(after)
    found = False
    for unit, named in lists:
        if unit not in arrivals:  # this graph uses nothing of it
            continue
        for other in named:
            ahead = [k for k in of_unit.get(other, ()) if k > arrivals[unit]]
            if other in of_unit and not ahead and other != unit:
                raise SettingError(
                    f"set_modules_to_{'backward' if graph.phase == 'backward' else 'forward'}_prefetch of unit "
                    f"{unit or 'root'!r} names {other or 'root'!r}, which the {graph.phase} graph gathers before it; "
                    "name units that are used later"
                )
            for k in ahead:
                after[k], found = arrivals[unit], True
    return list(itertools.accumulate(reversed(after), min))[::-1], found


def _arrivals(
    graph: Graph, waits: list[fx.Node], of_unit: dict[str, list[int]], context: PassContext
) -> dict[str, int]:
    """Return for each unit the wait at which it is there: its own first one, or, where nothing of it is gathered (it
    was kept, or whole before), the last one before its first use; -1 for the beginning."""
    found = {unit: places[0] for unit, places in of_unit.items()}
    positions = graph.positions()
    for node in graph.with_role(Role.KEPT, Role.UNSHARDED):
        users = [positions[user] for user in node.users if user.op != "output"]
        for unit in units_of(node, context) - of_unit.keys() if users else ():
            before = sum(positions[wait] < min(users) for wait in waits) - 1
            found[unit] = min(found.get(unit, before), before)
    return found


def _move(graph: Graph, starts: list[fx.Node], waits: list[fx.Node], after: After) -> None:
    if not starts:  # a piece of Python may have no inputs at all
        return
    anchors = [graph.placeholders[-1], *waits]
    for index, start in reversed(list(enumerate(starts))):
        if after[index] == index:
            waits[index].prepend(start)
        else:
            anchors[after[index] + 1].append(start)


def _start_after_last_uses(graph: Graph, starts: list[fx.Node], waits: list[fx.Node]) -> None:
    """Start each gather at the last use of the bucket before, in front of its reduction: one is held at a time."""
    positions = graph.positions()
    buckets = graph.buckets
    for before, start, wait in zip(starts, starts[1:], waits[1:], strict=False):
        gather, reduction = buckets[before.meta["fsdp"].bucket]
        assert gather is not None
        if gather.escapes:  # it is held to the end
            continue
        last = [gather.buffer, *gather.reads][-1]
        if reduction is not None and positions[last] < positions[reduction.start] < positions[wait]:
            reduction.start.prepend(start)
        elif positions[last] < positions[wait]:
            last.append(start)


def _hoist_waits(graph: Graph, readers: set[fx.Node], within_budget: bool) -> None:
    """Move waits, and the gathers that start with them, up to where compute regions are best cut.

    Where only cheap operators separate a wait from the communication before it, it moves up to that. Where what uses
    the bucket first fuses with what precedes it (the weight of a norm, with the norm and the residual addition in front
    of it), the wait moves up to the last kernel that does not. Never over ``readers`` of other buckets, which would be
    in memory for longer, but for the first case without a budget.
    """
    for wait in graph.with_role(Role.GATHER_WAIT):
        anchor = _before(wait, is_cheap, readers if within_budget else set())
        reached = anchor.target in dialect.EXECUTED or anchor.op == "placeholder"
        if not reached:
            anchor = _before(wait, _fuses, readers) if _fuses_with_first_use(wait) else wait.prev
        if anchor is not wait.prev and anchor is not operand(wait):
            node = wait
            while node is wait or has_role(node, Role.GATHER_START):
                following = node.next
                anchor.append(node)
                anchor, node = node, following


def _before(wait: fx.Node, passes: Callable[[fx.Node], bool], readers: set[fx.Node]) -> fx.Node:
    node = wait.prev
    while passes(node) and node not in readers:
        node = node.prev
    return node


def _fuses(node: fx.Node) -> bool:
    return node.target not in dialect.EXECUTED and (is_view(node) or kind_of(node) is Kind.FUSIBLE)


def _fuses_with_first_use(wait: fx.Node) -> bool:
    node = wait.next
    while is_view(node) or has_role(node, Role.GATHER_START):
        node = node.next
    return kind_of(node) is Kind.FUSIBLE


def _in_plan_order(starts: list[fx.Node], planned: list[tuple[str, str]] | None) -> list[fx.Node]:
    rank = {entry: index for index, entry in enumerate(planned or ())}
    entries = {start: (start.meta["fsdp"].role.value, start.meta["fsdp"].bucket) for start in starts}
    known = all(entry in rank for entry in entries.values())
    return sorted(starts, key=lambda start: rank[entries[start]]) if known else starts


# Reductions


def reductions_under_way(starts: list[fx.Node], recomputes_activations: bool, room: Room) -> int:
    """Return how many reductions may be under way at once where nobody has said: one where full gradients are most of
    what backward holds, because activations are recomputed or gradients are copied into a wider type, unless those of
    each reduction fit into the ``room``; one where the wait for it starts the next stage, over replicas; else two."""
    given = list(map(arguments, starts))
    widens = any(grad.meta["val"].dtype.itemsize < each.dtype.itemsize for each in given for grad in each.grads)
    sent = (sum(grad.meta["val"].numel() for grad in each.grads) * each.dtype.itemsize for each in given)
    is_large = (recomputes_activations or widens) and not room.has(max(sent, default=0))
    return 1 if is_large or _again(starts) else 2


def _again(starts: list[fx.Node]) -> list[fx.Node]:
    """Return the starts over replicas that follow these."""
    users = [user for start in starts for user in wait_of(start).users]
    return [user for user in users if has_role(user, Role.REPLICATE_START)]


def defer_reductions(
    graph: Graph,
    starts: list[fx.Node],
    in_flight: int,
    delayed: int = 0,
    over_replicas: int | None = None,
    *,
    behind_fusible: bool = True,
) -> None:
    """Start reductions in the order given, and wait for them as late as ``in_flight`` of them allow. Linear. The last
    ``delayed`` have nothing behind them that a wait would make room for: they and the one before end the graph.
    ``behind_fusible``: they start behind what fuses into the kernels before them, or else as early as they can.

    The second stages keep that order too: the sequence of all collectives follows from it. ``over_replicas`` of them
    may be under way at once, or with None all of them: what they hold are the gradients' shards, which no wait frees.
    """
    for start in starts if behind_fusible else ():
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
    _defer_waits(graph, starts, in_flight, delayed + 1 if delayed else 0)
    again = _again(starts)
    _defer_waits(graph, again, len(again) if over_replicas is None else over_replicas)


def _start_behind_fusible(start: fx.Node) -> None:
    """Move a start, with its wait, over the pointwise operators and reductions that follow it: they fuse into the
    kernels before it, and a start in between would cut a compute region for them alone."""
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


def _defer_waits(graph: Graph, starts: list[fx.Node], in_flight: int, at_end: int = 0) -> None:
    at_end = max(at_end, in_flight)
    dues = [*starts[in_flight : len(starts) - at_end + in_flight], *[graph.output] * at_end]
    for start, due in zip(starts, dues, strict=False):
        # A second stage stands right behind the wait for its first: what comes before it comes before both.
        both = has_role(due, Role.REPLICATE_START) and due.prev is operand(due)
        move_with_results(wait_of(start), before=due.prev if both else due)
