"""A backend that runs graphs whole, operator by operator: what is lowered to functional collectives, uncompiled."""

from __future__ import annotations

from torch import fx

from graph_fsdp.runtime.backends import BACKENDS, EagerBackend
from graph_fsdp.runtime.regions.regions import Compiled, run_as_graph


class FunctionalBackend(EagerBackend):
    name = "functional"
    compiles_whole = True

    def compile_whole(self, module: fx.GraphModule, kind: str) -> Compiled:
        return run_as_graph(module)


def register() -> None:
    """On a rank, whose process ends with the test."""
    BACKENDS["functional"] = FunctionalBackend
