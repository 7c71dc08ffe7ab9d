"""Inductor's scheduler: graphs in their own order, and the kernels that became of them. Private names of torch, as in
compat/.

| name | for | torch |
|---|---|---|
| ``_inductor.config``, the names in ``_IN_ORDER`` | Inductor moves no collective | 2.9, 2.13 |
| ``_inductor.config._pre_fusion_custom_pass`` | likewise, before anything is fused | 2.9, 2.13 |
| ``_inductor.config._post_fusion_custom_pass`` | kernels | 2.9, 2.13 |
| ``_inductor.custom_graph_pass.CustomSchedulerPass`` | likewise, for its cache; another name in 2.9 | 2.9, 2.13 |
| ``_inductor.dependencies.WeakDep``, ``BaseSchedulerNode.add_fake_dep`` | order without data | 2.9, 2.13 |
| ``Scheduler.compute_ancestors`` | what must not be fused | 2.9, 2.13 |
| ``_inductor.ir._CollectiveKernel``, ``MultiOutput`` | which nodes are communication | 2.9, 2.13 |
| ``BaseSchedulerNode.read_writes``, ``Dep.numbytes_hint``, ``SchedulerBuffer.users`` | bytes of a kernel | 2.9, 2.13 |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch._inductor import config, custom_graph_pass, ir
from torch._inductor.dependencies import MemoryDep, StarDep, WeakDep
from torch._inductor.scheduler import NopKernelSchedulerNode

# What would move collectives, waits or what runs between them; a release without a name does not do that.
_IN_ORDER: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
    "_micro_pipeline_tp": False,
    "_fuse_ddp_communication": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "dedup_reduce_scatters": False,
    "_collective.auto_select": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_low_contention_collectives": False,
    "aten_distributed_optimizations.allow_comms_decompositions": False,
}


_Pass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)


class _KeepOrder(_Pass):
    def __call__(self, nodes: list[Any]) -> list[Any]:
        return _keep_order(nodes)

    def uuid(self) -> str:
        """For the key of Inductor's cache, which then finds a graph again that was compiled in this order."""
        return "graph_fsdp: keep order, 1"


def graph_order() -> contextlib.AbstractContextManager[Any]:
    """Inductor's configuration under which the collectives of a graph, the waits for them, and the kernels that it
    does not generate itself (products, attention) run in the graph's order. Generated kernels stand where their data
    lets them; those that would have to run both before and after a collective are not fused."""
    known = {name: value for name, value in _IN_ORDER.items() if _has_setting(name)}
    return config.patch({**known, "_pre_fusion_custom_pass": _KeepOrder()})


def _has_setting(name: str) -> bool:
    *path, last = name.split(".")
    section: Any = config
    for part in path:
        section = getattr(section, part, None)
    return hasattr(section, last)


def _keep_order(nodes: list[Any]) -> list[Any]:
    """Inductor's scheduler nodes, in the graph's order, with dependencies that keep collectives and waits in place
    among each other and among external kernels. ``decide_global_ordering_of_comms`` does so for collectives alone."""

    def after(node: Any, earlier: Sequence[Any]) -> None:
        own = next(iter(node.get_buffer_names()))
        for name in [name for other in earlier for name in other.get_buffer_names()]:
            node.add_fake_dep(WeakDep(name, mutating_buf=own, is_fake=True))

    communication: list[Any] = []  # the last one
    since: list[Any] = []  # external kernels after it
    for node in nodes:
        if _is_communication(node):
            after(node, communication + since)
            communication, since = [node], []
        elif _is_external(node):
            after(node, communication)
            since.append(node)
    if communication:
        nodes[0].scheduler.compute_ancestors()  # by which Inductor knows what it must not fuse
    return nodes


def _is_communication(node: Any) -> bool:
    return isinstance(node.node, ir._CollectiveKernel)  # a wait is one too


def _is_external(node: Any) -> bool:
    return (node.is_extern() or node.is_template()) and not isinstance(node.node, ir.MultiOutput)


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
            if not _is_communication(node) and not isinstance(node, NopKernelSchedulerNode):
                origins = {origin.name: None for part in node.get_nodes() for origin in part.node.get_origins()}
                generated = not node.is_extern()
                if generated or _is_external(node):
                    found.append(Kernel(generated, _nbytes(node) if generated else 0, tuple(origins)))
        return nodes

    with config.patch({"_post_fusion_custom_pass": look, "fx_graph_cache": False}):
        yield found


def _nbytes(node: Any) -> int:
    """``get_read_write_buffers_sizes`` counts all of a buffer where a kernel reads a slice of it."""
    parts, buffers = set(node.get_nodes()), node.scheduler.name_to_buf
    accesses: dict[str, dict[Any, int]] = {}
    for dep in node.read_writes.reads | node.read_writes.writes:
        own = dep.name in buffers and all(user.node in parts for user in buffers[dep.name].users)
        if isinstance(dep, (MemoryDep, StarDep)) and not own:  # what no other node reads is never stored
            normal = dep.normalize() if isinstance(dep, MemoryDep) else dep
            key = (str(normal.index), str(normal.ranges)) if isinstance(normal, MemoryDep) else ()
            accesses.setdefault(dep.name, {})[key] = int(dep.numbytes_hint())
    return sum(min(sum(sizes.values()), int(StarDep(name).numbytes_hint())) for name, sizes in accesses.items())
