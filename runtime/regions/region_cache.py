"""Compiled regions: each distinct one is compiled once, so that compile time does not grow with depth.

A region that returns less than another one and otherwise computes the same uses the other one's function, and drops
what it does not return: the last layer's result is read by the head, that of the others by the next layer too. Only
where the other one runs at least as often, so that nothing is computed in vain in most layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.runtime.regions.regions import Compiled, Region, RegionKey, cut, region_key, run_as_graph


class RegionCache:
    """Compiled regions of one model, over all its graphs. ``regions`` counts those in programs, ``compiled`` the
    functions that were made for them."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.regions = 0
        self.compiled = 0
        self._cache: dict[RegionKey, Compiled] = {}
        self._alive: list[Region] = []  # keys know operators and constants by their ids

    def prepare(self, graphs: Iterable[Graph]) -> None:
        """Compile what the programs of these graphs will ask for, all at once: a backend can then divide the work."""
        found: dict[RegionKey, Region] = {}
        counts: Counter[RegionKey] = Counter()
        for graph in graphs:
            for region in cut(graph):
                if isinstance(region, Region):
                    key = region_key(region, graph.phase)
                    found.setdefault(key, region)
                    counts[key] += 1
        new = {key: region for key, region in found.items() if key not in self._cache}
        larger = {key: _larger(key, counts) for key in new}
        self._compile({key: region for key, region in new.items() if larger[key] is key})
        for key, other in larger.items():
            if other is not key:
                self._cache[key] = _part_of(self._cache[other], other.returned, key.returned)

    def compile(self, region: Region, kind: Phase) -> Compiled:
        self.regions += 1
        key = region_key(region, kind)
        if key not in self._cache:
            self._compile({key: region})
        return self._cache[key]

    def compile_whole(self, module: fx.GraphModule, kind: Phase) -> Compiled:
        """Compile a graph that is not cut; no other is equal to it."""
        self.regions += 1
        self.compiled += 1
        whole: Compiled = self.backend.compile_whole(module, kind)
        return whole

    def _compile(self, regions: dict[RegionKey, Region]) -> None:
        given = {key: region for key, region in regions.items() if not region.is_view_only}
        compiled = self.backend.compile_regions(given)
        for key, region in regions.items():
            self._cache[key] = compiled[key] if key in given else run_as_graph(region.module)
            self._alive.append(region)
        self.compiled += len(regions)


def _larger(key: RegionKey, counts: Counter[RegionKey]) -> RegionKey:
    """The region whose function serves this one: itself, or one that returns all that it returns and more. The one
    that returns most: no other serves that."""
    mine = set(key.returned)
    serves = [
        other
        for other in counts
        if other.kind == key.kind
        and (other.body, other.called) == (key.body, key.called)
        and mine < set(other.returned)
        and counts[other] >= counts[key]
    ]
    return max(serves, key=lambda other: len(other.returned), default=key)


def _part_of(function: Compiled, returned: Sequence[int], wanted: Sequence[int]) -> Compiled:
    places = [returned.index(node) for node in wanted]

    def part(inputs: list[Any]) -> Sequence[Any]:
        results = function(inputs)
        return [results[place] for place in places]

    return part
