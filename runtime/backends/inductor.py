"""``backend="inductor"``: each region, or each graph whole, through Inductor (CUDA, XPU, CPU)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx

from graph_fsdp import compat
from graph_fsdp.runtime.backends.base import Backend
from graph_fsdp.runtime.regions.regions import Compiled, Region, RegionKey
from graph_fsdp.runtime.regions.share_compilation import divide, own_folder


class InductorBackend(Backend):
    name = "inductor"
    compiles_whole = True
    captures_regions = True

    def compile_region(self, region: Region, kind: str) -> Compiled:
        inputs = [node.meta["val"] for node in region.inputs]
        return compat.inductor_compile(
            region.module, inputs, is_backward=kind == "backward", is_inference=kind == "inference"
        )

    def compile_regions(self, regions: Mapping[RegionKey, Region]) -> dict[RegionKey, Compiled]:
        """The ranks of a host share Inductor's cache on its disk, and compile about the same regions at the same time:
        each compiles a part of them, and finds the rest in the cache."""
        directory, keys = _cache_directory(), _dissimilar_first(regions)
        tasks = [(key.digest, partial(self.compile_region, regions[key], key.kind)) for key in keys]
        with compat.built_together():
            if directory is None:
                return super().compile_regions(regions)
            return dict(zip(keys, divide(tasks, directory / "graph_fsdp"), strict=True))

    def compile_whole(self, module: fx.GraphModule, kind: str) -> Compiled:
        _cache_directory()
        inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        with compat.built_together():
            return compat.inductor_compile(
                module, inputs, is_backward=kind == "backward", is_inference=kind == "inference", keep_order=True
            )

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        return compat.inductor_decompositions()

    def prepare(self, module: fx.GraphModule) -> fx.GraphModule:
        return compat.inductor_joint_passes(module)


def _cache_directory() -> Path | None:
    """As of ``compat``, once nobody else can put anything into it."""
    default = compat.default_inductor_cache_directory()
    if default is not None:
        own_folder(default)
    return compat.inductor_cache_directory()


def _dissimilar_first(regions: Mapping[RegionKey, Region]) -> list[RegionKey]:
    """The order in which ranks look for work: large regions first, so that all end together, and the largest of each
    kind before the second largest. Regions that are alike (a layer in the middle and the first one) have most of their
    kernels in common, and ranks that compile them at the same time wait for each other's."""
    ranked: list[tuple[int, RegionKey]] = []
    for kind in dict.fromkeys(key.kind for key in regions):
        of_kind = sorted((k for k in regions if k.kind == kind), key=lambda k: len(regions[k].nodes), reverse=True)
        ranked += enumerate(of_kind)
    return [key for _, key in sorted(ranked, key=lambda pair: pair[0])]
