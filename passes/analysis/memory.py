"""The memory model: which bytes are live at each node of a scheduled graph, and what holds the most of them.

Let node ``i`` be the one that runs. A storage is live from the node that allocates it to the last node that uses it
through any alias, both included (while a node runs, its inputs and its outputs exist). With ``S_c`` the storages of
category ``c``, the bytes of a category at ``i`` and the peak are

    live_c(i) = Σ nbytes(s) for s in S_c with begin(s) <= i <= end(s)        (``_timeline``)
    peak      = max over i of Σ over c of live_c(i)                          (``memory_profile``)

which takes one walk to find the storages and one prefix sum per category: linear in the graph.

Which storages there are and how long each is live, ``storages.py`` says.

Where shards are kept on the CPU, the bytes are the device's, and what is on the CPU is not counted; unless the device
is the CPU itself.

Values are counted as if every operator writes its result to memory: so ``backend="eager"`` runs, and it is more than a
compiler that fuses needs. What an operator or a collective allocates inside itself (workspace: convolutions, bfloat16
products on the CPU, gloo's reductions) and what the caller computes between forward and backward is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from graph_fsdp.passes.analysis.storages import CATEGORIES, Category, GraphStorage, storages
from graph_fsdp.passes.context import PassContext
from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.passes.ir.spec import ModelSpec, aligned

MAX_HOLDERS = 20


@dataclass(frozen=True)
class Holder:
    """A live storage: the name of the node that allocated it, its category and its bytes."""

    node: str
    category: Category
    nbytes: int


@dataclass(frozen=True)
class MemoryProfile:
    """Live bytes of one graph on one rank.

    ``peak``: most bytes live at any node; ``peak_node`` is the first node with as many, ``peak_index`` its position.
    ``by_category``: bytes per category at the peak; categories without any are left out.
    ``holders``: the largest storages that are live at the peak, largest first, at most 20. All shards are one.
    ``timeline``: category → bytes at each node, in the graph's order.
    ``peak_gathered``, ``peak_landing``: most bytes of the category at any node.
    """

    phase: Phase
    peak: int
    peak_node: str
    peak_index: int
    by_category: dict[Category, int]
    holders: tuple[Holder, ...]
    timeline: dict[Category, tuple[int, ...]]
    peak_gathered: int
    peak_landing: int

    @property
    def total(self) -> list[int]:
        """Bytes live at each node, over all categories."""
        return [sum(values) for values in zip(*self.timeline.values(), strict=True)]

    def __str__(self) -> str:
        shown = {name: nbytes for name, nbytes in self.by_category.items() if nbytes >= self.peak / 20}
        other = self.peak - sum(shown.values())
        parts = [*sorted(shown.items(), key=lambda item: -item[1]), *([("other", other)] if other else [])]
        largest = [holder for holder in self.holders if holder.category != "shards"][:3]
        lines = [
            f"predicted peak: {self.peak:,} bytes at {self.peak_node}: "
            + ", ".join(f"{name} {nbytes:,}" for name, nbytes in parts)
        ]
        if largest:
            held = ", ".join(f"{holder.node} {holder.nbytes:,} ({holder.category})" for holder in largest)
            lines.append(f"held most by: {held}")
        return "\n".join(lines)


def memory_profile(graph: Graph, context: PassContext, keep_slots: bool = False) -> MemoryProfile:
    """Predict the live bytes at each node of a scheduled graph. Symbolic sizes count with the values that the graph
    was traced with, sizes that depend on data as 0. Linear in the graph.

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
    on_host = context.model.offload is not None and context.model.offload.device.type != "cpu"
    timeline = _timeline(found, len(nodes), 0 if on_host else shard_nbytes(context.model))
    total = [sum(values) for values in zip(*timeline.values(), strict=True)]
    at = max(range(len(nodes)), key=total.__getitem__)
    live = [Holder(s.node.name, s.category, s.nbytes) for s in found if s.begin <= at <= s.end and s.nbytes]
    shards = [Holder("shards", "shards", timeline["shards"][at])] if timeline["shards"][at] else []
    return MemoryProfile(
        graph.phase,
        total[at],
        nodes[at].name,
        at,
        {category: values[at] for category, values in timeline.items() if values[at]},
        tuple(sorted([*shards, *live], key=lambda holder: -holder.nbytes)[:MAX_HOLDERS]),
        timeline,
        max(timeline["gathered"]),
        max(timeline["landing"]),
    )


def shard_nbytes(model: ModelSpec) -> int:
    """Bytes of the storage of all parameters on one rank, with its padding."""
    return sum(aligned(p.shard_numel, p.dtype) * p.dtype.itemsize for p in model.parameters.values())


def _timeline(found: Iterable[GraphStorage], length: int, shards: int) -> dict[Category, tuple[int, ...]]:
    changes: dict[Category, list[int]] = {category: [0] * (length + 1) for category in CATEGORIES}
    changes["shards"][0] = shards
    for storage in found:
        if storage.begin <= storage.end:
            changes[storage.category][storage.begin] += storage.nbytes
            changes[storage.category][storage.end + 1] -= storage.nbytes
    return {category: tuple(accumulate(change[:length])) for category, change in changes.items()}
