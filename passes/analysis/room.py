"""Memory that a schedule may spend on having more run beside compute than FSDP2 has.

It is a twentieth of the device's memory, as far as a step leaves that: what the step holds by the memory model, with a
unit that is gathered ahead, and a gradient and two states of an optimizer for each parameter that is trained, as AdamW
keeps them; and a tenth of the device's memory for what that model does not see, such as kernels' workspaces, buffers of
the process group, and what the allocator cannot use. Half of what is left is for gathers, and half for reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from graph_fsdp.passes.analysis.memory import shard_nbytes, shards_on_device, whole_nbytes
from graph_fsdp.passes.analysis.storages import most_bytes_at_once
from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir.dialect import Role

_SPENT, _UNSEEN = 0.05, 0.1
_OF_TRAINED = 3  # bytes for each of a shard: the gradient and the two states


@dataclass(frozen=True)
class Room:
    """Holds what may be spent: ``most`` bytes, and half of what the device has ``left`` beside a step, which takes long
    to say and is asked for where spending would be faster."""

    most: int = 0
    left: Callable[[], float] = lambda: math.inf

    def __bool__(self) -> bool:
        return self.most > 0

    def has(self, nbytes: int) -> bool:
        return nbytes <= self.most and 2 * nbytes <= self.left()


NO_ROOM = Room()


def room_of(context: PassContext) -> Room:
    """Return what may be spent; nothing where nothing runs beside compute."""
    hardware = context.cost.hardware if context.cost is not None else None
    if hardware is None or not hardware.overlaps:
        return NO_ROOM
    seen = hardware.memory * (1 - _UNSEEN)

    def left() -> float:
        if context.step_nbytes is None:
            context.step_nbytes = _step_nbytes(context)
        return seen - context.step_nbytes

    return Room(int(hardware.memory * _SPENT), left)


def _step_nbytes(context: PassContext) -> int:
    """Return the bytes at the peak of a step, of the graphs as they are before their schedule."""
    graphs = [graph for phase in ("forward", "backward", "inference") if (graph := context.graphs.get(phase))]
    peaks = [most_bytes_at_once(graph, context) for graph in graphs]
    specs = context.model.parameters
    if backward := context.graphs.get("backward"):
        reduced = backward.with_role(Role.REDUCE_START)
        specs = {name: specs[name] for start in reduced for name in start.meta["fsdp"].params}
    shards = shards_on_device(context)
    trained = _OF_TRAINED * shard_nbytes(specs.values()) if shards else 0  # the optimizer's state is where they are
    ahead = max((gather.nbytes for graph in graphs for gather in graph.gathers), default=0)
    return max(peaks) + ahead + whole_nbytes(context) + shards + trained
