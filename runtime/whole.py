"""``regions="whole"``: a scheduled graph as one compiled function, collectives and all.

What the executor does between regions is in the function then: buffers are the compiler's to allocate and to free, and
there are no slots. The order of the collectives and of the waits for them is the scheduled graph's: the compiler keeps
it (``keep_order`` in ``compat.inductor_compile``).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.stage import readable
from graph_fsdp.runtime.functional import ShardSlice, lower
from graph_fsdp.runtime.observe.observer import recording
from graph_fsdp.runtime.regions.region_cache import RegionCache
from graph_fsdp.runtime.regions.regions import Compiled
from graph_fsdp.runtime.slots import GatheredBytes

# As the executor counts them.
COUNTED_AS = {
    dialect.all_gather_start: "all_gather",
    dialect.reduce_scatter_start: "reduce",
    dialect.all_reduce_start: "reduce",
    dialect.all_reduce_shard_start: "reduce over replicas",
}


def collectives_of(graph: Graph) -> Counter[str]:
    """Count the collectives of each kind that a run of the graph starts."""
    return Counter(COUNTED_AS[n.target] for n in graph.fx_graph.nodes if n.target in dialect.STARTS)


class WholeProgram:
    """A graph compiled whole. Call it with the list of the graph's inputs, which it empties. ``source``: the lowered
    graph as Python. It counts collectives, by the graph, and no bytes: what is held when is the compiler's choice."""

    def __init__(self, graph: Graph, cache: RegionCache, counter: GatheredBytes) -> None:
        self._boxed_call = True  # see Program
        self.graph, self.counter = graph, counter
        lowered = lower(graph)
        self.inputs = lowered.inputs
        self.source = readable(lowered.module.graph)
        self.collectives = collectives_of(graph)
        self.function: Compiled = cache.compile_whole(lowered.module, graph.phase)

    def __call__(self, args: list[Any]) -> Any:
        for kind, count in self.collectives.items():
            self.counter.count(kind, count)
        inputs = [i.of(args) if isinstance(i, ShardSlice) else args[i] for i in self.inputs]
        args.clear()
        open_range = recording() or contextlib.nullcontext
        with open_range(f"FSDP::{self.graph.phase}"):
            return self.function(inputs)
