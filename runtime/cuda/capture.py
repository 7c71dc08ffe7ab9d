"""Some compute regions of a program become CUDA graphs; only this file captures and replays them.

A CUDA graph is a fixed list of kernels on fixed addresses. A region becomes one where its kernels and their sizes are
the same in every run, and its inputs stay in place (gathered buffers in kept slots, results of other CUDA graphs) or
can be copied to one (a batch, results of other regions). That is read off the graph, so ranks choose alike.

``CudaCapture`` ran on one H200 (docs/gpu.md). All that decides is tested on the CPU with another class.
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
from graph_fsdp.passes.ir.operands import argument, operands
from graph_fsdp.runtime.regions.regions import Compiled, Region, Step


class CudaCapture:
    """Captures functions on one device as ``torch.cuda.CUDAGraph``; "thread_local", so that other threads go on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # one for all captures: the pool's memory belongs to it

    def pool(self) -> Any:
        """Return memory for several captured functions, which are replayed in the order of their capture. Those
        captured later reuse what a result frees; nothing goes back to the device while one exists. Prepares the thread
        that captures: it waits for the device once for all of them, and cuBLAS makes its handle, which it cannot do in
        a capture."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            one = torch.ones(1, 1, device=self.device)
            torch.mm(one, one)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return torch.cuda.graph_pool_handle()

    def capture(self, function: Compiled, inputs: list[Any], pool: Any) -> tuple[Callable[[], None], Sequence[Any]]:
        """Return a function that replays ``function`` on the memory of these inputs and keeps that of the pool alive,
        and the results in the pool, which have values only after a replay."""
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps its workspace from call to call: each graph takes one from the pool, and gives it back.
        compat.clear_cublas_workspaces()
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            # ``torch.cuda.graph`` would wait for the device, and empty the allocator's cache, before each capture.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = function(list(inputs))
            finally:
                graph.capture_end()
        compat.clear_cublas_workspaces()
        return graph.replay, outputs


CAPTURES: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaCapture}

VIEWS = "views alone"


@dataclass(frozen=True)
class RegionChoice:
    """Says whether a region is a CUDA graph, or the ``reason`` why not. ``copied`` are the indices of inputs that lie
    elsewhere in each run; ``saved`` says of each output whether its memory outlives the run."""

    reason: str = ""
    copied: tuple[int, ...] = ()
    saved: tuple[bool, ...] = ()


class ProgramChoice:
    """Chooses what of a program becomes CUDA graphs, linear in the graph. ``regions`` is by index of the step. Of the
    placeholders, by index, CUDA graphs read ``read`` and write to ``written``, which are never copied, and the memory
    of ``saved`` outlives the run. The first ``user_outputs`` outputs are not saved for backward."""

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
        """Return why regions that have kernels are left out."""
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
    if torch.Tag.cudagraph_unsafe in tags:
        return f"has an operator that no CUDA graph may have ({node})"
    if str(getattr(node.target, "namespace", "")).startswith("_c10d"):
        return f"communicates ({node})"
    return ""


def _foreign(start: fx.Node) -> str:
    """Say why a gathered buffer, which is too large to be copied, lies elsewhere in each run; "" if it does not."""
    record = start.meta["fsdp"]
    if argument(start, "custom"):
        return f"reads bucket {record.bucket}, which the user's own all-gather allocates"
    if record.slot is None and not record.escapes:
        return f"reads bucket {record.bucket}, which has no slot: the pipeline is without its pass 'slots'"
    return ""
