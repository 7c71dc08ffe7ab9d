"""The kernels that Inductor makes of a graph, as its scheduler has them, and the bytes that they move."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch._inductor import config
from torch._inductor.dependencies import MemoryDep, StarDep
from torch._inductor.scheduler import NopKernelSchedulerNode

from graph_fsdp.compat.inductor.scheduler import is_communication, is_external


@dataclass(frozen=True)
class Kernel:
    """What Inductor runs as one kernel. ``generated``: by itself, and not a product, attention or a fallback.
    ``nbytes``: that a generated one reads and writes, each element once. ``nodes``: names of the FX nodes that it
    computes."""

    generated: bool
    nbytes: int
    nodes: tuple[str, ...]


@contextlib.contextmanager
def inductor_kernels() -> Iterator[list[Kernel]]:
    """For a time: the kernels of each graph that Inductor compiles, in order. Its cache of graphs is not asked."""
    found: list[Kernel] = []

    def look(nodes: list[Any]) -> list[Any]:
        for node in nodes:
            if not is_communication(node) and not isinstance(node, NopKernelSchedulerNode):
                origins = {origin.name: None for part in node.get_nodes() for origin in part.node.get_origins()}
                generated = not node.is_extern()
                if generated or is_external(node):
                    found.append(Kernel(generated, _nbytes(node) if generated else 0, tuple(origins)))
        return nodes

    with config.patch({"_post_fusion_custom_pass": look, "fx_graph_cache": False}):
        yield found


def _nbytes(node: Any) -> int:
    """``get_read_write_buffers_sizes`` counts all of a buffer where a kernel reads a slice of it."""
    parts, buffers = set(node.get_nodes()), node.scheduler.name_to_buf
    accesses: dict[str, dict[Any, int]] = {}
    for dep in node.read_writes.reads | node.read_writes.writes:
        buffer = buffers.get(dep.name)
        own = buffer and buffer.defining_op in parts and all(user.node in parts for user in buffer.users)
        if isinstance(dep, (MemoryDep, StarDep)) and not own:  # what no other node reads is never stored
            normal = dep.normalize() if isinstance(dep, MemoryDep) else dep
            key = (str(normal.index), str(normal.ranges)) if isinstance(normal, MemoryDep) else ()
            accesses.setdefault(dep.name, {})[key] = int(dep.numbytes_hint())
    return sum(min(sum(sizes.values()), int(StarDep(name).numbytes_hint())) for name, sizes in accesses.items())
