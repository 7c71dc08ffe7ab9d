"""What Inductor would make of graphs, on the virtual device: each is launched as one operation that takes the seconds
of its fused kernels by the cost model of ``graph_fsdp.passes``.

Inductor generates no code for the device. What it does before that, it does here: its decompositions, its passes over
joint graphs and torch's min-cut partitioner. ``compiled_regions`` has graph_fsdp's ``backend="inductor"`` compile its
regions so, and ``backend`` is one of ``torch.compile``, for blocks that FSDP2 shards: the same kernels cost both the
same. Python between the graphs is the program's own, and the host's time of Inductor's own launchers is not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from graph_fsdp import compat
from graph_fsdp.passes import Graph
from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.analysis.kernels import graph_work
from graph_fsdp.passes.analysis.storages import Storages, value_storages
from graph_fsdp.passes.ir.effects import draws, mutated_inputs
from graph_fsdp.runtime.backends import BACKENDS, Backend, InductorBackend
from graph_fsdp.runtime.regions.regions import Compiled, Region, RegionKey, run_as_graph
from virtual import library
from virtual.kernels import tensors_of
from virtual.machine import Machine


class CompiledGraph:
    """A graph of tensors with static shapes. Takes a list of inputs, which it empties, and returns the outputs."""

    def __init__(self, module: fx.GraphModule, kind: str) -> None:
        # AOTAutograd then hands over the list itself. On the instance: its wrappers copy nothing else.
        self._boxed_call = True
        graph = Graph(module, "backward" if kind == "backward" else "forward")
        self.name = f"compiled {kind}"
        self.inputs = {node: index for index, node in enumerate(graph.placeholders)}
        (outputs,) = graph.output.args
        self.outputs: Sequence[Any] = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
        self.written = {self.inputs[n] for node in graph.nodes for n in mutated_inputs(node) if n in self.inputs}
        self.roots = {node: roots for node, roots in graph.alias_roots().items() if node in set(self.outputs)}
        ends = [node for node in (*self.outputs, *self.inputs) if isinstance(node, fx.Node)]
        self.values = {node: node.meta.get("val") for node in ends}
        # Outputs in memory of their own, each once.
        self.fresh = dict.fromkeys(
            node for node, roots in self.roots.items() if self._is_tensor(node) and not set(roots) & set(self.inputs)
        )
        machine = Machine.current
        assert machine is not None, "graphs are compiled for the device of a machine"
        self.seconds = sum(CostModel(machine.hardware, {}).graph_seconds(graph).values())
        self.run = run_as_graph(module) if machine.numbers else None
        self.changes = [] if machine.numbers else list(self._memory(graph))

    def _is_tensor(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and isinstance(self.values.get(node), Tensor)

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        machine = Machine.current
        if machine is None:
            raise RuntimeError("a graph that was compiled for the virtual device runs on a machine; there is none")
        given = list(inputs)
        machine.enter()
        try:
            if self.run is None:
                inputs.clear()
                return self._without_numbers(machine, given)
            paused, machine.paused = machine.paused, True
            found = self.run(inputs)
            machine.paused = paused
            inputs.clear()
            written = [given[index] for index in self.written]
            fresh = [t for t in tensors_of(found) if not any(t is other for other in given)]
            machine.launch(self.name, list(tensors_of(given)), [*written, *fresh], self.seconds)
        finally:
            machine.leave()
        return found

    def _without_numbers(self, machine: Machine, given: list[Any]) -> Sequence[Any]:
        """Allocate and drop what the graph's kernels do, in their order; inputs too, where nobody else holds them."""
        machine.launch(self.name, list(tensors_of(given)), [given[index] for index in self.written], self.seconds)
        made: dict[fx.Node, Tensor] = {}
        # What is no new tensor: views of inputs, and numbers. They hold their inputs.
        found = {node: self._shaped(given, node) for node in self.outputs if node not in self.fresh}
        held: dict[int, Tensor] = {}
        for change, key, value in self.changes:
            if change == "output":
                made[value] = self._shaped(given, value)
            elif change == "allocate":
                held[key] = torch.empty(value, dtype=torch.uint8, device=library.NAME)
            elif change == "free":
                del held[key]
            else:
                given[value] = None
        machine.launch(f"results of {self.name}", [], list(made.values()), 0.0)
        return [made[node] if node in made else found[node] for node in self.outputs]

    def _memory(self, graph: Graph) -> Iterator[tuple[str, int, Any]]:
        """What running the graph does to memory, in order: (change, key, value). Values that fused kernels never write
        have no memory. Inputs that outputs view are not dropped."""
        storages, work = value_storages(graph), graph_work(graph, fused=True)
        # Of a storage the inputs, or the outputs, that lie in it.
        received, returned = _by_storage(storages, self.inputs), _by_storage(storages, self.roots)
        changes: list[tuple[int, int, str, int, Any]] = []
        for storage in storages.found:
            key, node = id(storage), storage.node
            if key in received:
                dropped = received[key] if key not in returned else []
                changes += [(storage.end, 1, "drop", key, self.inputs[node]) for node in dropped]
            elif key in returned:
                changes += [(storage.begin, 0, "output", key, node) for node in returned[key]]
            elif work[node].written and storage.nbytes:
                changes.append((storage.begin, 0, "allocate", key, storage.nbytes))
                changes.append((storage.end, 1, "free", key, None))
        for *_, change, key, value in sorted(changes, key=lambda each: each[:2]):
            yield change, key, value

    def _shaped(self, given: Sequence[Any], node: Any) -> Any:
        """An output without numbers: an input, a view of one, or a new tensor."""
        value = self.values.get(node) if isinstance(node, fx.Node) else node
        if not isinstance(node, fx.Node) or not isinstance(value, Tensor):
            return given[self.inputs[node]] if node in self.inputs else value
        owner = next((root for root in self.roots[node] if root in self.inputs), None)
        if owner is None:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        base: Tensor = given[self.inputs[owner]]
        if node is owner:
            return base
        like = base if base.dtype is value.dtype else base.view(value.dtype)
        offset = value.storage_offset() - self.values[owner].storage_offset()
        return like.detach().as_strided(value.shape, value.stride(), like.storage_offset() + offset)


def _by_storage(storages: Storages, nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        for storage in storages.of[node]:
            found.setdefault(id(storage), []).append(node)
    return found


class CompiledBetween(fx.Interpreter):
    """A graph with collectives of torch's functional ones: what is computed between two of them is a compiled graph,
    and they run on the group, in the graph's order. Takes and returns what ``CompiledGraph`` does."""

    def __init__(self, module: fx.GraphModule, kind: str) -> None:
        self._boxed_call = True
        places: dict[fx.Node, int] = {}
        place, before = 0, False
        for node in module.graph.nodes:
            alone = _is_collective(node)
            place += alone or before
            places[node], before = place, alone
        super().__init__(split_module(module, module, places.__getitem__))
        self.compiled: dict[str, tuple[CompiledGraph, bool]] = {}
        for name, part in self.module.named_children():
            assert isinstance(part, fx.GraphModule)
            if not any(map(_is_collective, part.graph.nodes)):
                (outputs,) = part.graph.output_node().args
                if not (several := isinstance(outputs, (list, tuple))):
                    part.graph.output_node().args = ((outputs,),)
                    part.recompile()
                self.compiled[name] = CompiledGraph(part, kind), several

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        given = list(inputs)
        inputs.clear()
        found: Sequence[Any] = self.run(*given)
        return found

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in self.compiled:
            return super().call_module(target, args, kwargs)
        compiled, several = self.compiled[target]
        found = compiled(list(args))
        return tuple(found) if several else found[0]


def _is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional"


class VirtualInductor(InductorBackend):
    """Inductor, but for the code."""

    compiles_whole = False

    def compile_region(self, region: Region, kind: str) -> Compiled:
        return CompiledGraph(region.module, kind)

    def compile_regions(self, regions: Mapping[RegionKey, Region]) -> dict[RegionKey, Compiled]:
        return Backend.compile_regions(self, regions)


@contextlib.contextmanager
def compiled_regions() -> Iterator[None]:
    """While open, models that are compiled with ``backend="inductor"`` have it compile for the virtual device."""
    before = BACKENDS["inductor"]
    BACKENDS["inductor"] = VirtualInductor
    try:
        yield
    finally:
        BACKENDS["inductor"] = before


def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs: a backend of ``torch.compile``."""

    def compiler(kind: str) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Sequence[Any]]]:
        def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
            return (CompiledBetween if any(map(_is_collective, graph.graph.nodes)) else CompiledGraph)(graph, kind)

        return compile_graph

    def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        prepared = compat.inductor_joint_passes(joint)
        with compat.random_states_only_where(
            draws
        ):  # attention without dropout is no random operator to the cost model
            return compat.min_cut_rematerialization_partition(prepared, joint_inputs, compiler="inductor", **options)

    compiled: Callable[..., Any] = compat.aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        decompositions=compat.inductor_decompositions(),
    )(module, inputs)
    return compiled
