"""Which compute regions of a program become CUDA graphs, and the only calls that capture and replay them.

A CUDA graph is a fixed list of kernels on fixed addresses. A region becomes one where its kernels and their sizes are
the same in every run, and what it reads lies where it lay (gathered buffers in kept slots, results of other CUDA
graphs) or can be copied there (a batch, results of regions that are left out). That is read off the graph: ranks with
equal graphs choose alike.

``CudaCapture`` was never run: there was no CUDA device. What is captured, which memory it reads and when it may run
again is decided elsewhere, and tested on the CPU with another class in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.effects import draws, mutated_inputs
from graph_fsdp.passes.ir.fake_values import iterate_tensors
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.runtime.regions.regions import Compiled, Region, Step


class CudaCapture:
    """Captures functions on one device as ``torch.cuda.CUDAGraph``. The process group's threads go on while one is
    captured, hence "thread_local"."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # one for all captures: the pool's memory belongs to it

    def pool(self) -> Any:
        """Memory that several captured functions share, which are replayed in the order of their capture. What a
        result frees is used by those that are captured later; nothing goes back to the device while one exists."""
        return torch.cuda.graph_pool_handle()

    def capture(self, function: Compiled, inputs: list[Any], pool: Any) -> tuple[Callable[[], None], Sequence[Any]]:
        """What replays ``function`` on the memory of these inputs, and its results in the pool, which have values
        only after a replay. Whoever keeps the first keeps the memory."""
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps its workspace from call to call: each graph takes one from the pool, and gives it back.
        compat.clear_cublas_workspaces()
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            outputs = function(list(inputs))
        compat.clear_cublas_workspaces()
        return graph.replay, outputs


CAPTURES: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaCapture}

VIEWS = "views alone"


@dataclass(frozen=True)
class RegionChoice:
    """``reason``: why the region is no CUDA graph; empty where it is one. ``copied``: by index, inputs that lie
    elsewhere in each run. ``saved``: for each output, whether its memory outlives the run."""

    reason: str = ""
    copied: tuple[int, ...] = ()
    saved: tuple[bool, ...] = ()


class ProgramChoice:
    """What of a program becomes CUDA graphs. ``regions``: by index of the step. ``read``: placeholders that CUDA graphs
    read, by index; ``written``: those of them that are written to, and so are never copied. ``saved``: placeholders
    whose memory outlives the run. ``user_outputs``: number of outputs that are not saved for backward. Linear in the
    graph."""

    def __init__(self, graph: Graph, steps: Sequence[Step], device_type: str, user_outputs: int) -> None:
        self.device_type, self._roots = device_type, graph.alias_roots()
        self._moving: set[fx.Node] = set()  # what allocates memory that is elsewhere in each run
        self._foreign = {n: reason for n in graph.with_role(Role.GATHER_START) if (reason := _foreign(n))}
        self._saved = self._roots_of(o for o in operands(graph.output)[user_outputs:] if isinstance(o, fx.Node))
        self.regions: dict[int, RegionChoice] = {}
        read: set[fx.Node] = set()
        written: set[fx.Node] = set()
        for index, step in enumerate(steps):
            if isinstance(step, fx.Node):
                if step.target is not dialect.all_gather_start:
                    self._moving |= self._roots[step] & {step}
                continue
            changed = self._roots_of(n for node in step.body for n in mutated_inputs(node))
            self.regions[index] = choice = self._choice(step, changed)
            if not choice.reason:
                read |= self._roots_of(step.inputs)
                written |= changed
            elif choice.reason != VIEWS:
                self._moving |= {node for node in step.nodes if node in self._roots[node]}
        places = {node: index for index, node in enumerate(graph.placeholders)}
        self.read = sorted(places[node] for node in read if node in places)
        self.written = {places[node] for node in written if node in places}
        self.saved = {places[node] for node in self._saved if node in places}
        self._roots.clear()  # a set for each node

    @property
    def captured(self) -> list[int]:
        return [index for index, choice in self.regions.items() if not choice.reason]

    @property
    def reasons(self) -> dict[int, str]:
        """Of the regions that have kernels and are left out."""
        return {i: choice.reason for i, choice in self.regions.items() if choice.reason not in ("", VIEWS)}

    def _choice(self, region: Region, changed: set[fx.Node]) -> RegionChoice:
        if region.is_view_only:
            return RegionChoice(VIEWS)
        reason = _values(region, self.device_type) or next(filter(None, map(_operator, region.body)), "")
        roots, foreign = self._roots, self._foreign
        reason = reason or next((foreign[root] for n in region.inputs for root in roots[n] if root in foreign), "")
        if reason:
            return RegionChoice(reason)
        copied = [index for index, node in enumerate(region.inputs) if roots[node] & self._moving]
        for node in (region.inputs[index] for index in copied):
            if roots[node] & changed:
                return RegionChoice(f"writes to {node}, which lies elsewhere in each run")
        for node in region.outputs:
            if roots[node] & self._moving:
                return RegionChoice(f"returns a view of what lies elsewhere in each run ({node})")
        return RegionChoice("", tuple(copied), tuple(bool(roots[node] & self._saved) for node in region.outputs))

    def _roots_of(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        return {root for node in nodes for root in self._roots[node]}


def _values(region: Region, device_type: str) -> str:
    for node in [*region.inputs, *region.body]:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"reads a number that is none of the graph's constants ({node})"
        for tensor in iterate_tensors(value):
            if compat.free_symbols(tensor):
                return f"has sizes that are not fixed ({node})"
            if tensor.device.type != device_type:
                return f"has a tensor on {tensor.device.type} ({node})"
    return ""


def _operator(node: fx.Node) -> str:
    if isinstance(node.target, compat.HigherOrderOperator):
        return f"calls other graphs ({node})"
    tags = getattr(node.target, "tags", ())
    if draws(node):
        return f"draws random numbers ({node})"
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return f"makes the host wait for values ({node})"
    if str(getattr(node.target, "namespace", "")).startswith("_c10d"):
        return f"communicates ({node})"
    return ""


def _foreign(start: fx.Node) -> str:
    """Why a gathered buffer lies elsewhere in each run, if it does. It is too large to be copied."""
    record = start.meta["fsdp"]
    if dialect.argument(start, "custom"):
        return f"reads bucket {record.bucket}, which the user's own all-gather allocates"
    if record.slot is None and not record.escapes:
        return f"reads bucket {record.bucket}, which has no slot: the pipeline is without its pass 'slots'"
    return ""
