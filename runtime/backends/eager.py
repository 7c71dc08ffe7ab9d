"""``backend="eager"``: the FX graph as it is, operator by operator. For debugging and for bitwise comparison."""

from __future__ import annotations

from graph_fsdp.runtime.backends.base import Backend
from graph_fsdp.runtime.regions.regions import Compiled, Region, run_as_graph


class EagerBackend(Backend):
    name = "eager"
    captures_regions = True

    def compile_region(self, region: Region, kind: str) -> Compiled:
        return run_as_graph(region.module)
