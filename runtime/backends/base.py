"""A backend turns a compute region, or a whole graph, into a function. Eager PyTorch runs it as it is, and for XLA,
which compiles each graph whole, as one program of all of its devices, it is only prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import fx

from graph_fsdp.runtime.regions.regions import Compiled, Region, RegionKey, run_as_graph
from graph_fsdp.runtime.xla.decompositions import decompositions
from graph_fsdp.runtime.xla.host_fallbacks import OnHostFallback, refuse_sizes_of_values
from graph_fsdp.runtime.xla.random import number_random_operators


class Backend:
    """Compiles regions, and prepares the joint graph for that."""

    name: str
    compiles_whole = False  # whether there is a compile_whole
    captures_regions = False  # whether compiled regions can become CUDA graphs
    keeps_mutations = True  # whether an inference graph writes to its inputs itself

    def compile_region(self, region: Region, kind: str) -> Compiled:
        """Return a function from a list of inputs, which it may clear, to the outputs. ``kind`` is the phase."""
        raise NotImplementedError(f"backend {self.name!r} compiles graphs whole")

    def compile_regions(self, regions: Mapping[RegionKey, Region]) -> dict[RegionKey, Compiled]:
        """Compile all regions that are new to a program, of which no two are equal."""
        return {key: self.compile_region(region, key.kind) for key, region in regions.items()}

    def compile_whole(self, module: fx.GraphModule, kind: str) -> Compiled:
        """Return a function of a graph's inputs that runs all of it in its order, functional collectives included."""
        raise NotImplementedError(f"backend {self.name!r} compiles regions alone")

    def programs_folder(self) -> Path | None:
        """Return the folder in which programs are kept where the user names none; None for nowhere."""
        return None

    def decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        """Return operator → decomposition, for AOTAutograd; None keeps the operators that eager PyTorch runs."""
        return None

    def prepare(self, module: fx.GraphModule) -> fx.GraphModule:
        """Rewrite the whole graph before it is partitioned (joint graph) or bucketed (inference graph)."""
        return module


class EagerBackend(Backend):
    """Runs the FX graph as it is, operator by operator, for debugging and for bitwise comparison."""

    name = "eager"
    captures_regions = True

    def compile_region(self, region: Region, kind: str) -> Compiled:
        return run_as_graph(region.module)


class XlaBackend(Backend):
    """Prepares graphs for XLA. They are not cut, so there are no regions: ``runtime/xla`` makes the programs."""

    name = "xla"
    compiles_whole = True
    keeps_mutations = False  # what is written leaves the part of the program that each device runs by itself

    def __init__(self, on_host_fallback: OnHostFallback = "error") -> None:
        self.on_host_fallback = on_host_fallback

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        return decompositions()

    def prepare(self, module: fx.GraphModule) -> fx.GraphModule:
        refuse_sizes_of_values(module.graph)
        return number_random_operators(module)
