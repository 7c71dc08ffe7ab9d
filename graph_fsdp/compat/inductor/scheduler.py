"""Inductor's scheduler keeps graphs in their own order, by private names of torch (``docs/private_names.md``)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch._inductor import config, custom_graph_pass, ir
from torch._inductor.dependencies import WeakDep

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
        """Return Inductor's scheduler nodes, in the graph's order, with dependencies that keep collectives and waits in
        place among each other (as ``decide_global_ordering_of_comms`` does) and among external kernels."""

        def after(node: Any, earlier: Sequence[Any]) -> None:
            own = next(iter(node.get_buffer_names()))
            for name in [name for other in earlier for name in other.get_buffer_names()]:
                node.add_fake_dep(WeakDep(name, mutating_buf=own, is_fake=True))

        communication: list[Any] = []  # the last one
        since: list[Any] = []  # external kernels after it
        for node in nodes:
            if is_communication(node):
                after(node, communication + since)
                communication, since = [node], []
            elif is_external(node):
                after(node, communication)
                since.append(node)
        if communication:
            nodes[0].scheduler.compute_ancestors()  # by which Inductor knows what it must not fuse
        return nodes

    def uuid(self) -> str:
        """Return the part of the key of Inductor's cache that finds graphs compiled in this order again."""
        return "graph_fsdp: keep order, 1"


def graph_order() -> contextlib.AbstractContextManager[Any]:
    """Configure Inductor to run a graph's collectives, the waits for them, and the kernels that it does not generate
    itself (products, attention) in the graph's order. Generated kernels stand where their data lets them; those that
    would have to run both before and after a collective are not fused."""
    known = {name: value for name, value in _IN_ORDER.items() if hasattr(config, name)}
    return config.patch({**known, "_pre_fusion_custom_pass": _KeepOrder()})


def is_communication(node: Any) -> bool:
    """Say whether a scheduler node is a collective, or waits for one."""
    return isinstance(node.node, ir._CollectiveKernel)


def is_external(node: Any) -> bool:
    """Say whether a scheduler node runs a kernel that Inductor does not generate: a product, attention, a fallback."""
    return (node.is_extern() or node.is_template()) and not isinstance(node.node, ir.MultiOutput)
