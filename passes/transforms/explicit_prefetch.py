"""Gathers that start where the user says: FSDP2's ``set_modules_to_forward_prefetch`` and ``…_backward_prefetch``.

When the first bucket of a unit has arrived, the gathers of the units that it names start. A gather that stands before
one of them in the plan's order starts no later, since the order of the collectives stays. Units that nobody names start
as the prefetch pass has it.
"""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.settings import Prefetches, SettingError
from graph_fsdp.passes.transforms.schedule import After


def prefetch_explicitly(graph: Graph, waits: list[fx.Node], after: After, context: PassContext) -> tuple[After, bool]:
    """``after`` (see schedule.py) with what the user has set for this graph, and whether that is anything.

    Raises:
        SettingError: a unit is to be gathered when one that is used after it has arrived.
    """
    settings = context.settings
    lists = settings.backward_prefetch if graph.phase == "backward" else settings.forward_prefetch
    if not lists or not waits:
        return after, False
    of_unit: dict[str, list[int]] = {}
    for k, wait in enumerate(waits):
        for unit in dict.fromkeys(context.model.spec_of(name).unit for name in wait.meta["fsdp"].params):
            of_unit.setdefault(unit, []).append(k)
    arrivals = _arrivals(graph, waits, of_unit, lists, context)
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
    for k in reversed(range(len(after) - 1)):
        after[k] = min(after[k], after[k + 1])
    return after, found


def _arrivals(
    graph: Graph, waits: list[fx.Node], of_unit: dict[str, list[int]], lists: Prefetches, context: PassContext
) -> dict[str, int]:
    """Unit → the wait at which it is there: its own first one, or, where nothing of it is gathered (it was kept, or
    whole before), the last one before its first use; -1 for the beginning."""
    found = {unit: of_unit[unit][0] for unit, _ in lists if unit in of_unit}
    positions = graph.positions()
    for node in graph.with_role(Role.KEPT, Role.UNSHARDED):
        units = {context.model.spec_of(name).unit for name in node.meta["fsdp"].params}
        users = [positions[user] for user in node.users if user.op != "output"]
        for unit in units.intersection(unit for unit, _ in lists):
            if users and unit not in of_unit:
                before = sum(positions[wait] < min(users) for wait in waits) - 1
                found[unit] = min(found.get(unit, before), before)
    return found
