"""A lowered graph, compiled once by XLA and replayed.

[Note: compiled once]
torch_xla makes programs of what is pending on lazy tensors, and knows an argument again by the id of its memory. An
argument that shares memory with another live tensor (after ``clone``, ``copy_`` or a replay that returned it) may not
be found, and would be baked into the program as a constant: training would go on silently with its first value. So a
graph is run lazily on fresh tensors that nothing else refers to, of the same shapes, types and shardings; and what it
is found to be computed from must be these.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.compat import xla_hlo as compat_xla_hlo
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.stage import readable
from graph_fsdp.runtime.regions.region_cache import RegionCache
from graph_fsdp.runtime.slots import GatheredBytes
from graph_fsdp.runtime.whole import WholeProgram, collectives_of
from graph_fsdp.runtime.xla.hlo import OptimizedHlo, optimized_hlo, scheduled_collectives
from graph_fsdp.runtime.xla.host_fallbacks import OnHostFallback, find_host_fallbacks, report
from graph_fsdp.runtime.xla.lower import Lowered, ProgramInput
from graph_fsdp.runtime.xla.placement import Placement, read_placement


class BakedInputError(RuntimeError):
    """XLA would not read an argument of a graph again in later runs."""


FIRST_RUN = "first run"
DROPPED = "torch_xla had dropped it for newer programs (XLA_COMPILATION_CACHE_SIZE)"
FOR_ITS_TEXT = "its HLO was asked for"


@dataclass(frozen=True)
class Compilation:
    """One compilation of a captured graph by XLA. ``cause``: why; ``seconds``: how long it took, tracing included."""

    cause: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.cause} ({self.seconds:.1f} s)"


class XlaProgram(WholeProgram):
    """Call it with the list of the graph's inputs, which it empties. ``source``: the lowered graph as Python.
    ``compilations``: those by XLA, in order. A graph with operators that run on the host is not compiled but runs
    lazily, each time anew."""

    can_run_on_host = False  # what each device runs by itself cannot

    def __init__(
        self,
        graph: Graph,
        lowered: Lowered,
        entries: Sequence[ProgramInput | None],
        cache: RegionCache,
        counter: GatheredBytes,
        *,
        each: Placement | None = None,
        on_host_fallback: OnHostFallback = "error",
    ) -> None:
        self._boxed_call = True  # see Program
        self.cache = cache
        cache.regions += 1
        self.graph, self.lowered, self.entries, self.counter = graph, lowered, list(entries), counter
        self.source = readable(lowered.module.graph)
        self.collectives = collectives_of(graph)
        self.each, self.on_host_fallback = each, on_host_fallback
        if lowered.seeded:
            assert each is not None
            self.entries.append(ProgramInput(each, ()))
        self.compilations: list[Compilation] = []
        self._compiled: tuple[Any, list[int | Tensor]] | None = None
        self._descriptions: list[Any] = []  # of the inputs
        self._on_host = False  # whether operators of it are

    def __call__(self, args: list[Any]) -> Any:
        for kind, count in self.collectives.items():
            self.counter.count(kind, count)
        inputs = list(args)
        args.clear()
        if self.lowered.seeded:
            inputs.append(self._seeds())
        results: list[Tensor] = []
        if any(kind == "result" for kind, _ in self.lowered.returns):
            if self._compiled is None and not self._on_host:
                self._compiled = self._compile(inputs, FIRST_RUN)
            inputs = self._placed(inputs)
            results = self._run(inputs)
        found = {"input": inputs, "result": results}
        return tuple(value if kind == "constant" else found[kind][value] for kind, value in self.lowered.returns)

    def _run(self, inputs: list[Any]) -> list[Tensor]:
        if self._compiled is None:
            return list(self.lowered.module(*inputs))
        try:
            return self._replay(inputs)
        except compat_xla.ProgramDroppedError:
            self._compiled = self._compile(inputs, DROPPED)
        return self._replay(inputs)

    def _replay(self, inputs: list[Any]) -> list[Tensor]:
        assert self._compiled is not None
        key, places = self._compiled
        return compat_xla.run_compiled(key, [inputs[place] if isinstance(place, int) else place for place in places])

    def _seeds(self) -> Tensor:
        """One number for each device, from the CPU's generator. Consecutive ones are as good as any: hashed."""
        assert self.each is not None
        first = torch.randint(2**31 - 1, ())
        numbers = (first + torch.arange(len(self.each.devices))).to(torch.int32).to(compat_xla.device())
        compat_xla.mark_sharding(numbers, self.each.devices, self.each.tiles)
        return numbers

    def _placed(self, inputs: list[Any]) -> list[Any]:
        """In memory, and sharded as the program takes them."""
        places = [(i, entry.placement) for i, entry in enumerate(self.entries) if entry is not None]
        tensors = [inputs[i] for i, _ in places]
        if compat_xla.pending(tensors):  # all that is pending, or an optimizer's state would be computed once more
            compat_xla.sync(wait=True)
        moved = False
        for (i, expected), spec in zip(places, compat_xla.sharding_specs(tensors), strict=True):
            if not _agrees(spec, expected, inputs[i].dim()):
                inputs[i], moved = compat_xla.annotated(inputs[i], expected.devices, expected.tiles), True
        if moved:
            compat_xla.sync(wait=True)
        return inputs

    # --- compiling

    def fresh_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Tensors like the program's inputs that share memory with nothing."""
        made = list(inputs)
        for i, entry in enumerate(self.entries):
            if entry is not None:
                zeros = torch.zeros(inputs[i].shape, dtype=inputs[i].dtype, device=inputs[i].device)
                made[i] = compat_xla.annotated(zeros, entry.placement.devices, entry.placement.tiles)
        compat_xla.sync(wait=True)
        return made

    def _compile(self, inputs: Sequence[Any], cause: str) -> tuple[Any, list[int | Tensor]] | None:
        """What ``run_compiled`` takes; None for a graph with operators that run on the host."""
        begin = time.perf_counter()
        compat_xla.sync(wait=True)  # what is pending now is forgotten below
        on_host = find_host_fallbacks(self.lowered.module.graph)
        report(on_host, self.on_host_fallback, can_run=self.can_run_on_host)
        fresh = self.fresh_inputs(inputs)
        self._descriptions = compat_xla_hlo.descriptions(fresh)
        if on_host:
            self._on_host = True
            return None
        try:
            with torch.no_grad(), compat_xla.lazily():
                outputs = list(self.lowered.module(*fresh))
            places = self._matched(fresh, outputs)
            key = compat_xla.compile_pending(outputs)
        finally:
            compat_xla.drop_pending()
        self.cache.compiled += 1
        self.compilations.append(Compilation(cause, time.perf_counter() - begin))
        return key, places

    def hlo(self) -> OptimizedHlo:
        """What XLA made of the graph, compiled once more for its text."""
        if self._compiled is None:
            raise RuntimeError(f"the {self.graph.phase} graph has not run yet; run the model, then ask for its HLO")
        begin = time.perf_counter()
        found = optimized_hlo(self.lowered.module, self._descriptions)
        self.compilations.append(Compilation(FOR_ITS_TEXT, time.perf_counter() - begin))
        return replace(found, scheduled=scheduled_collectives(self.graph))

    def _matched(self, fresh: Sequence[Any], outputs: Sequence[Tensor]) -> list[int | Tensor]:
        """What each parameter of the XLA program is: the place of an input, or a constant of the graph (XLA makes
        parameters of numbers, so that graphs that differ in them are one program). See [Note: compiled once]."""
        place_of = {compat_xla.tensor_id(t): i for i, t in enumerate(fresh) if isinstance(t, Tensor)}
        found: list[int | Tensor] = []
        constants = []
        for tensor_id, value in zip(*compat_xla.graph_inputs(outputs), strict=True):
            if tensor_id not in place_of:
                constants.append(value)
            found.append(place_of.get(tensor_id, value))
        read = {place for place in found if isinstance(place, int)}
        placeholders = [node for node in self.lowered.module.graph.nodes if node.op == "placeholder"]
        for i, node in enumerate(placeholders):
            if not node.users or i in read:
                continue
            if any(_is_like(value, fresh[i]) for value in constants):
                raise BakedInputError(
                    f"the {self.graph.phase} graph's argument {node.name} of shape {tuple(fresh[i].shape)} is not "
                    "among what XLA reads when the graph runs, and a constant of that shape is: later steps would use "
                    "its first value"
                )
        return found


def _is_like(constant: Tensor, fresh: Tensor) -> bool:
    """Whether a constant may be this input: fresh ones are zeros. (XLA reads some inputs not at all: the weight of the
    mean in ``nll_loss_backward``.)"""
    alike = constant.shape == fresh.shape and constant.dtype == fresh.dtype
    return alike and not bool(constant.cpu().any())


def _agrees(spec: str, expected: Placement, dims: int) -> bool:
    found = read_placement(spec, expected.devices)
    if found is None:
        return False
    return found.is_replicated if expected.is_replicated or dims == 0 else found == expected
