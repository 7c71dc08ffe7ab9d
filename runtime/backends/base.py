"""A backend turns a compute region, or a whole graph, into a function. The simplest one runs it as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from graph_fsdp.runtime.regions.regions import Compiled, Region, RegionKey, run_as_graph


class Backend:
    """Compiles regions, and says how the joint graph is prepared for it."""

    name: str
    compiles_whole = False  # whether there is a compile_whole
    captures_regions = False  # whether compiled regions can become CUDA graphs
    keeps_mutations = True  # whether an inference graph writes to its inputs itself

    def compile_region(self, region: Region, kind: str) -> Compiled:
        """A function from a list of inputs, which it may clear, to the outputs. ``kind`` is the graph's phase."""
        raise NotImplementedError(f"backend {self.name!r} compiles graphs whole")

    def compile_regions(self, regions: Mapping[RegionKey, Region]) -> dict[RegionKey, Compiled]:
        """All regions that are new to a program, of which no two are equal."""
        return {key: self.compile_region(region, key.kind) for key, region in regions.items()}

    def compile_whole(self, module: fx.GraphModule, kind: str) -> Compiled:
        """A function of a graph's inputs that runs all of it, functional collectives included, in its order."""
        raise NotImplementedError(f"backend {self.name!r} compiles regions alone")

    def decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        """Operator → decomposition, for AOTAutograd; None keeps the operators that eager PyTorch runs."""
        return None

    def prepare(self, module: fx.GraphModule) -> fx.GraphModule:
        """Rewrites of the whole graph before it is partitioned (joint graph) or bucketed (inference graph)."""
        return module


class EagerBackend(Backend):
    """The FX graph as it is, operator by operator. For debugging and for bitwise comparison."""

    name = "eager"
    captures_regions = True

    def compile_region(self, region: Region, kind: str) -> Compiled:
        return run_as_graph(region.module)
