"""``backend="inductor"``: each region, or each graph whole, through Inductor (CUDA, XPU, CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from graph_fsdp.passes import compat
from graph_fsdp.runtime.backends.base import Backend
from graph_fsdp.runtime.regions import Compiled, Region


class InductorBackend(Backend):
    name = "inductor"
    compiles_whole = True

    def compile_region(self, region: Region, kind: str) -> Compiled:
        inputs = [node.meta["val"] for node in region.inputs]
        return compat.inductor_compile(
            region.module, inputs, is_backward=kind == "backward", is_inference=kind == "inference"
        )

    def compile_whole(self, module: fx.GraphModule, kind: str) -> Compiled:
        inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        return compat.inductor_compile(
            module, inputs, is_backward=kind == "backward", is_inference=kind == "inference", keep_order=True
        )

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        return compat.inductor_decompositions()

    def prepare(self, module: fx.GraphModule) -> fx.GraphModule:
        return compat.inductor_joint_passes(module)
