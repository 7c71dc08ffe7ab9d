"""The runtime runs scheduled graphs: collectives, regions, buffers and the executor. It never imports the top."""

from graph_fsdp.runtime import operators as operators
from graph_fsdp.runtime.executor import Program
from graph_fsdp.runtime.regions.regions import RegionCache
from graph_fsdp.runtime.slots import GatheredBytes
from graph_fsdp.runtime.whole import WholeProgram

__all__ = ["GatheredBytes", "Program", "RegionCache", "WholeProgram"]
