"""The memory model says which bytes are live at each node of a scheduled graph, and what holds the most of them.

Let node ``i`` be the one that runs. A storage is live from the node that allocates it to the last node that uses it
through any alias, both included (``storages.py``). With ``S_c`` the storages of category ``c``, one walk and a prefix
sum per category give, linear in the graph,

    live_c(i) = Σ nbytes(s) for s in S_c with begin(s) <= i <= end(s)        (``_timeline``)
    peak      = max over i of Σ over c of live_c(i)                          (``memory_profile``)

What is offloaded counts only where the device is the CPU, and is planned for as one (``copies_are_elsewhere``). Values
are counted as if every operator wrote its result to memory, as ``backend="eager"`` does; a compiler that fuses needs
less. What operators and collectives allocate inside (workspace) and what the caller computes between forward and
backward is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from graph_fsdp.passes.analysis.storages import CATEGORIES, Category, GraphStorage, copies_are_elsewhere, storages
from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir.dialect import aligned
from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.passes.ir.spec import ParameterSpec

MAX_HOLDERS = 20


@dataclass(frozen=True)
class Holder:
    """Describes a live storage: the name of the node that allocated it, its category and its bytes."""

    node: str
    category: Category
    nbytes: int


@dataclass(frozen=True)
class MemoryProfile:
    """Describes the live bytes of one graph on one rank.

    ``peak``: most bytes live at any node; ``peak_node`` is the first node with as many, ``peak_index`` its position.
    ``by_category``: bytes per category at the peak, of those with any.
    ``holders``: the largest storages that are live at the peak, at most 20. All shards are one, as are whole units.
    ``timeline``: category → bytes at each node, in the graph's order.
    """

    phase: Phase
    peak: int
    peak_node: str
    peak_index: int
    by_category: dict[Category, int]
    holders: tuple[Holder, ...]
    timeline: dict[Category, tuple[int, ...]]

    @property
    def peak_gathered(self) -> int:
        return max(self.timeline["gathered"])

    @property
    def peak_landing(self) -> int:
        return max(self.timeline["landing"])

    @property
    def total(self) -> list[int]:
        """Return the bytes live at each node, over all categories."""
        return [sum(values) for values in zip(*self.timeline.values(), strict=True)]

    def __str__(self) -> str:
        shown = {name: nbytes for name, nbytes in self.by_category.items() if nbytes >= self.peak / 20}
        other = self.peak - sum(shown.values())
        parts = [*sorted(shown.items(), key=lambda item: -item[1]), *([("other", other)] if other else [])]
        largest = [holder for holder in self.holders if holder.category != "shards"][:3]
        categories = ", ".join(f"{name} {nbytes:,}" for name, nbytes in parts)
        lines = [f"predicted peak: {self.peak:,} bytes at {self.peak_node}: {categories}"]
        held = ", ".join(f"{holder.node} {holder.nbytes:,} ({holder.category})" for holder in largest)
        return "\n".join([*lines, f"held most by: {held}"] if held else lines)


def memory_profile(graph: Graph, context: PassContext, keep_slots: bool = False) -> MemoryProfile:
    """Predict the live bytes at each node of a scheduled graph. Linear in the graph.

    Symbolic sizes count with the values that the graph was traced with, sizes that depend on data as 0.

    Args:
        graph: forward, backward or inference, after the pass that makes it "freed".
        context: the context that the passes ran with.
        keep_slots: slots stay allocated between runs, as CUDA graphs need them.

    Raises:
        ValueError: the graph is of another phase, or buffers are not freed yet.
    """
    if "freed" not in graph.facts:
        raise ValueError(
            f"graph: a {graph.phase} graph before its buffers are freed has no lifetimes; run the pipeline on the "
            "forward, backward or inference graph first"
        )
    nodes = graph.nodes
    found = storages(graph, context, keep_slots).found
    shards, whole = shards_on_device(context), whole_nbytes(context)
    timeline = _timeline(found, len(nodes), shards=shards, gathered=whole)
    total = [sum(values) for values in zip(*timeline.values(), strict=True)]
    at = max(range(len(nodes)), key=total.__getitem__)
    live = [Holder(s.node.name, s.category, s.nbytes) for s in found if s.begin <= at <= s.end and s.nbytes]
    live += [h for h in (Holder("shards", "shards", shards), Holder("whole units", "gathered", whole)) if h.nbytes]
    return MemoryProfile(
        graph.phase,
        total[at],
        nodes[at].name,
        at,
        {category: values[at] for category, values in timeline.items() if values[at]},
        tuple(sorted(live, key=lambda holder: -holder.nbytes)[:MAX_HOLDERS]),
        timeline,
    )


def shard_nbytes(parameters: Iterable[ParameterSpec]) -> int:
    """Count the bytes of the storage of parameters on one rank, with its padding."""
    return sum(aligned(p.shard_numel, p.dtype) * p.dtype.itemsize for p in parameters)


def whole_nbytes(context: PassContext) -> int:
    """Count the bytes of units that are whole before the forward begins."""
    units, buckets = context.settings.unsharded, context.model.buckets
    return sum(b.gathered_nbytes for b in buckets if units & {p.unit for p in b.parameters})


def shards_on_device(context: PassContext) -> int:
    """Count the bytes of the parameters' storage on one rank, and 0 where it is on the CPU beside a device."""
    offloaded = context.model.offload is not None and copies_are_elsewhere(context)
    return 0 if offloaded else shard_nbytes(context.model.parameters.values())


def _timeline(found: Iterable[GraphStorage], length: int, **held: int) -> dict[Category, tuple[int, ...]]:
    changes = {category: [held.get(category, 0), *[0] * length] for category in CATEGORIES}
    for storage in found:
        if storage.begin <= storage.end:
            changes[storage.category][storage.begin] += storage.nbytes
            changes[storage.category][storage.end + 1] -= storage.nbytes
    return {category: tuple(accumulate(change[:length])) for category, change in changes.items()}
