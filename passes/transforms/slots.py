"""Gathered buffers are freed, and get slots: a fixed set of pieces of memory for each graph, before it runs.

A buffer is freed after its last use through any alias, just before the next collective starts or is waited for: nothing
is allocated in between, and a free in the middle of a unit's computation would cut its compute region.

A buffer occupies its slot while the nodes ``begin`` to ``end`` run, both included: a bucket's buffer from the start of
its gather to its free, a landing buffer from the start to the wait. Buffers that are live at one node get different
slots. Taken in order of ``begin``, each with any free slot, they need as many slots as are live at once, the fewest
possible (the left-edge algorithm: Hashimoto and Stevens 1971; Golumbic 1980, chapter 8).

A buffer takes the smallest free slot that is large enough, else the largest, which grows (``colour``). We colour all
buffers together and those of each power of two by themselves, and take the assignment with fewer bytes allocated at
once, of equals the one that holds them for fewer nodes (``assign``). With maxima over all nodes:

    max live bytes  <=  bytes allocated at once  <=  bytes of the k largest buffers, where k are live at once,
                                                     and 2 * (the sum over powers of two of max live of that size)

The first holds because each slot has the size of one of its buffers, the second because those of a power of two are as
many as are live at once and less than twice as large as any of them.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, aligned, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.layout import landing_nbytes
from graph_fsdp.passes.ir.operands import argument
from graph_fsdp.passes.transforms.edits import mark_escaping

_SHOWN = 4  # buffers per slot in the report


class Free(GraphPass):
    """Frees buffers. One that the graph returns (kept for backward, or given out by the model) is not freed: its record
    says that it escapes, and it is given back when nobody holds it any more."""

    name = "free"
    requires = ("bucketed",)
    provides = ("freed",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        next_communication = graph.next_of(dialect.COMMUNICATION)
        gathers, inputs = graph.gathers, graph.placeholders
        freed = 0
        for gather in gathers:
            if gather.escapes:
                mark_escaping(gather.buffer)
                continue
            # A bucket that was received and is not used is freed at once.
            last = [gather.wait or inputs[-1], *gather.reads][-1]
            with graph.fx_graph.inserting_before(next_communication[last]):
                node = graph.call(dialect.free, (gather.buffer,), name=f"free_{gather.bucket}")
            set_record(node, dataclasses.replace(gather.buffer.meta["fsdp"], role=Role.FREE, escapes=False))
            freed += 1
        return f"{freed} of {len(gathers)} buffers freed in this graph"


class AssignSlots(GraphPass):
    """Gives a slot to every gathered buffer that does not outlive the graph, and to every landing buffer.

    The records of the gathers say which, ``graph.slots`` how many bytes each slot has. Equal graphs get equal slots.
    """

    name = "slots"
    requires = ("freed",)
    provides = ("slotted",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        buffers = lifetimes(graph)
        slots, sizes = assign([(b.begin, b.end, b.nbytes) for b in buffers])
        for buffer, slot in zip(buffers, slots, strict=True):
            change = {"landing_slot": slot} if buffer.landing else {"slot": slot}
            set_record(buffer.start, dataclasses.replace(buffer.start.meta["fsdp"], **change))
        graph.slots = tuple(sizes)
        return f"{len(buffers)} buffers in {len(sizes)} slots of {sum(sizes):,} bytes"


@dataclass(frozen=True)
class Lifetime:
    """A buffer that wants a slot is live while the nodes at the positions ``begin`` to ``end`` run."""

    start: fx.Node
    landing: bool
    used_nbytes: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes of a slot: rounded up to ALIGNMENT."""
        return aligned(self.used_nbytes, torch.uint8)

    @property
    def slot(self) -> int | None:
        """Return the slot that the gather's record gives it."""
        record: NodeRecord = self.start.meta["fsdp"]
        return record.landing_slot if self.landing else record.slot

    def __str__(self) -> str:
        bucket = self.start.meta["fsdp"].bucket
        return f"landing of {bucket}" if self.landing else bucket


def lifetimes(graph: Graph) -> list[Lifetime]:
    """Return the buffers of a freed graph's gathers that do not outlive it, in the order of their allocation."""
    positions, output = graph.positions(), graph.output
    found = []
    for gather in graph.gathers:
        if (start := gather.start) is None:
            continue
        begin, end, wait = positions[start], positions[gather.free or output], positions[gather.wait or output]
        if not start.meta["fsdp"].escapes:
            found.append(Lifetime(start, False, nbytes(start.meta["val"]), begin, end))
        if (landing := landing_nbytes(start)) and not argument(start, "custom"):  # whose memory is its own
            found.append(Lifetime(start, True, landing, begin, wait))
    return found


Interval = tuple[int, int, int]  # begin, end, nbytes; both ends included
Assignment = tuple[list[int], list[int]]  # the slot of each interval, the bytes of each slot


def assign(intervals: Sequence[Interval]) -> Assignment:
    """Assign slots to intervals, which may share memory where they do not overlap. O(n log n) comparisons."""
    together = colour(intervals, [0] * len(intervals))
    apart = colour(intervals, [nbytes.bit_length() for _, _, nbytes in intervals])
    return min(together, apart, key=lambda assignment: _cost(intervals, assignment))


def colour(intervals: Sequence[Interval], classes: Sequence[int]) -> Assignment:
    """Colour in order of ``begin``, best fit; only intervals of one class share slots."""
    slots = [0] * len(intervals)
    sizes: list[int] = []
    busy: list[tuple[int, int, int]] = []  # a heap of (end, slot, class)
    free: dict[int, list[tuple[int, int]]] = {of_class: [] for of_class in classes}  # (bytes, slot), sorted
    for index in sorted(range(len(intervals)), key=lambda i: intervals[i][0]):
        begin, end, nbytes = intervals[index]
        while busy and busy[0][0] < begin:
            _, slot, of_class = heapq.heappop(busy)
            insort(free[of_class], (sizes[slot], slot))
        if fits := free[classes[index]]:
            _, slot = fits.pop(min(bisect_left(fits, (nbytes, -1)), len(fits) - 1))
            sizes[slot] = max(sizes[slot], nbytes)
        else:
            slot = len(sizes)
            sizes.append(nbytes)
        slots[index] = slot
        heapq.heappush(busy, (end, slot, classes[index]))
    return slots, sizes


def _cost(intervals: Sequence[Interval], assignment: Assignment) -> tuple[int, int]:
    """Return the most bytes allocated at once, and the sum over nodes of the bytes allocated."""
    slots, sizes = assignment
    spans: dict[int, Interval] = {}
    for (begin, end, _), slot in zip(intervals, slots, strict=True):
        first, last, _ = spans.get(slot, (begin, end, 0))
        spans[slot] = (min(first, begin), max(last, end), sizes[slot])
    return most_at_once(spans.values()), sum((end + 1 - begin) * nbytes for begin, end, nbytes in spans.values())


def most_at_once(intervals: Iterable[Interval]) -> int:
    """Return the most bytes of intervals at any node."""
    changes = [change for begin, end, nbytes in intervals for change in ((begin, nbytes), (end + 1, -nbytes))]
    # What ends before a node comes before what begins at it.
    return max(itertools.accumulate((change for _, change in sorted(changes)), initial=0))


# What is there to read


@dataclass(frozen=True)
class Slot:
    """A slot holds ``buffers`` in order, and is allocated while the nodes at the positions ``begin`` to ``end`` run."""

    nbytes: int
    buffers: tuple[Lifetime, ...]

    @property
    def begin(self) -> int:
        return self.buffers[0].begin

    @property
    def end(self) -> int:
        return self.buffers[-1].end

    @property
    def buckets(self) -> tuple[str, ...]:
        """Name the buckets whose buffers it holds; ``landing of …`` for their landing buffers."""
        return tuple(map(str, self.buffers))


@dataclass(frozen=True)
class SlotTable:
    """Lists the slots of one graph. ``nbytes``: of all slots; ``peak``: most bytes that are allocated at once."""

    slots: tuple[Slot, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    @property
    def peak(self) -> int:
        return most_at_once((slot.begin, slot.end, slot.nbytes) for slot in self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def __str__(self) -> str:
        lines = [f"slots: {len(self)}, {self.nbytes:,} bytes, at most {self.peak:,} at once"]
        for index, slot in enumerate(self.slots):
            shown, more = slot.buckets[:_SHOWN], len(slot.buckets) - _SHOWN
            held = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
            lines.append(f"  slot {index}, {slot.nbytes:,} bytes: {held}")
        return "\n".join(lines)


def slot_table(graph: Graph) -> SlotTable:
    """Return the slots of a graph after all passes; none without the pass that assigns them."""
    held: list[list[Lifetime]] = [[] for _ in graph.slots]
    for buffer in lifetimes(graph) if graph.slots else ():
        if buffer.slot is not None:
            held[buffer.slot].append(buffer)
    slots = (Slot(size, tuple(buffers)) for size, buffers in zip(graph.slots, held, strict=True) if buffers)
    return SlotTable(tuple(slots))
