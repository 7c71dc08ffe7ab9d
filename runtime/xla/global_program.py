"""A graph of the global view as a program: compiled by XLA at its first run, replayed afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from graph_fsdp.passes import compat_xla, compat_xla_hlo, dialect
from graph_fsdp.passes.dialect import Role, has_role
from graph_fsdp.passes.graph import Graph
from graph_fsdp.passes.stage import readable
from graph_fsdp.runtime.slots import GatheredBytes
from graph_fsdp.runtime.whole import COUNTED_AS, WholeProgram
from graph_fsdp.runtime.xla.hlo import OptimizedHlo, optimized_hlo


class GlobalProgram(WholeProgram):
    """Call it with the list of the lowered graph's inputs, which it empties. ``compilations`` counts the shardings of
    inputs that it has met: XLA compiles a program for each."""

    def __init__(self, scheduled: Graph, lowered: fx.GraphModule, counter: GatheredBytes) -> None:
        self._boxed_call = True  # see Program
        self.graph, self.counter, self.lowered = scheduled, counter, lowered
        self.source = readable(lowered.graph)
        self.collectives = Counter(COUNTED_AS[n.target] for n in scheduled.fx_graph.nodes if n.target in dialect.STARTS)
        self._compiled: dict[tuple[str, ...], Callable[..., Any]] = {}
        self._inputs: list[Any] = []  # like those of the latest compilation
        # Shards and what forward has saved are sharded as they ever were; what the user gives may not be.
        own = (Role.TANGENT,) if scheduled.phase == "backward" else ()
        names = [n.name for n in scheduled.placeholders if has_role(n, *own) or not (own or has_role(n, Role.SHARD))]
        placeholders = [n for n in lowered.graph.nodes if n.op == "placeholder"]
        self._from_user = [place for place, node in enumerate(placeholders) if node.name in names]

    @property
    def compilations(self) -> int:
        return len(self._compiled)

    def __call__(self, args: list[Any]) -> Any:
        for kind, count in self.collectives.items():
            self.counter.count(kind, count)
        tensors = [args[place] for place in self._from_user if isinstance(args[place], Tensor)]
        key = tuple(compat_xla.sharding_specs(tensors))
        if compat_xla.pending([value for value in args if isinstance(value, Tensor)]):
            compat_xla.sync()  # all that is pending, or the optimizer's state would be computed from its first value
        if key not in self._compiled:
            self._inputs = compat_xla_hlo.descriptions(args)
            self._compiled[key] = compat_xla_hlo.replayed(self.lowered, args)
        found = self._compiled[key](*args)
        args.clear()
        return found if isinstance(found, (list, tuple)) else (found,)

    def hlo(self) -> OptimizedHlo:
        """What XLA made of the graph, compiled once more for its text."""
        if not self._compiled:
            raise RuntimeError(f"the {self.graph.phase} graph has not run yet; run the model, then ask for its HLO")
        return optimized_hlo(self.lowered, self._inputs)
