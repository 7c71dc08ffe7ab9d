"""The executor generates one Python function from a scheduled graph.

The function has one line per region and per communication node, in the verified order, and drops every value after its
last use; ``Program.source`` is its text. A run keeps its state in a ``Frame`` of its own, so that runs may nest and a
run that raises leaves nothing behind.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.canonical_form import digest
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import begins_of
from graph_fsdp.passes.ir.operands import argument, operand
from graph_fsdp.runtime.comm.collectives import AllGather, Comms, Pending, ReduceScatter
from graph_fsdp.runtime.comm.quantized import QuantizedReduceScatter
from graph_fsdp.runtime.cuda.cuda_graphs import ProgramGraphs
from graph_fsdp.runtime.frame import Frame, StartPlan, start_copy, start_gather, start_reduction
from graph_fsdp.runtime.observe import Event, MakeObserver, Watcher, observed, ranges, seen_by
from graph_fsdp.runtime.operators import FUNCTIONS, arguments_of, bound
from graph_fsdp.runtime.regions.regions import Region, RegionCache, unit_of
from graph_fsdp.runtime.slots import GatheredBytes, SlotMemory, SlotPlan, Slots, by_device
from graph_fsdp.runtime.withheld_gradients import KeptGradients, keep_plan, owned_gradients


class Program:
    """Runs a compiled graph. Call it with the list of the graph's inputs, which it empties. ``kept`` holds gradients
    that other graphs did not reduce, ``comms`` the user's collectives; ``graphs`` captures regions as CUDA graphs;
    ``memory`` keeps registered slots, and ``memory.others`` allocates the buffers of reductions."""

    def __init__(
        self,
        graph: Graph,
        cache: RegionCache,
        counter: GatheredBytes,
        kept: KeptGradients,
        comms: Comms,
        graphs: ProgramGraphs | None,
        memory: SlotMemory | None = None,
    ) -> None:
        self.graph, self.counter, self.kept = graph, counter, kept
        self.check: Callable[[], None] | None = None  # before each run
        records = [start.meta["fsdp"] for start in graph.with_role(Role.GATHER_START)]
        uses = Counter(slot for record in records for slot in (record.slot, record.landing_slot))
        allocate = by_device if memory is None else memory.others
        self.slots = SlotPlan(tuple(graph.slots), tuple(uses[i] for i, _ in enumerate(graph.slots)), allocate=allocate)
        self.graphs, self.memory = graphs, memory
        text = ProgramText(graph, cache, comms, graphs, registered=allocate is not by_device)
        self.source, self.constants, self.places = "\n".join([*text.lines, ""]), text.constants, text.places
        self._kernels = text.kernels
        self.observers: list[MakeObserver] = []  # of each run that begins
        self.watchers: Sequence[Watcher] = ()
        namespace: dict[str, Any] = dict(self.constants)
        exec(compile(self.source, f"<graph_fsdp {graph.phase} program>", "exec"), namespace)
        self.ordinary = with_room_for_calls(namespace["run"])

    def __call__(self, args: list[Any]) -> Any:
        if self.check is not None:
            self.check()
        # A graph that is replayed shows a dispatch mode nothing.
        if self.graphs is not None and not self.observers and not compat.dispatch_modes():
            return self.graphs.run(self, args)
        if self.memory is None:
            return self.execute(self.ordinary, self.slots, args)
        with self.memory.lent_to(self.slots) as slots:
            return self.execute(self.ordinary, slots, args)

    def execute(self, run: Callable[..., Any], slots: SlotPlan, args: list[Any]) -> Any:
        """Run ``run``: this program's function, or one of the same code with other regions."""
        observers = [*(make(self) for make in self.observers), *ranges(self.graph.phase)]
        if observers:
            run = observed(run, self._kernels, observers)
        observers += [see for watcher in self.watchers if (see := watcher.run(self)) is not None]
        # Bytes and collectives of runs that are measured are not counted: reports tell of training.
        counter = GatheredBytes() if self.observers else self.counter
        frame = Frame(Slots(counter, slots), self.kept, observers)
        return seen_by(observers, Event("run"), frame.run, run, args)


class ProgramText:
    """Writes a program: its ``lines``, the ``constants`` that they name, what each line does for error messages
    (``places``), and ``kernels``: index of each region that has kernels → the units that it computes with. A method
    that takes a node writes the call that its operator becomes."""

    def __init__(
        self, graph: Graph, cache: RegionCache, comms: Comms, graphs: ProgramGraphs | None, registered: bool
    ) -> None:
        self.graph, self.comms, self.graphs, self.registered = graph, comms, graphs, registered
        own = ("frame", "args", "inputs")  # FX makes no name a keyword
        self.names = {n: f"{n.name}_" if n.name in own else n.name for n in graph.fx_graph.nodes}
        # CUDA graphs write to their results again.
        self.owned: frozenset[fx.Node] = owned_gradients(graph) if graphs is None else frozenset()
        self.lines = [f"def run(frame, args):  # {graph.phase}"]
        self.constants: dict[str, Any] = {}
        self.places: dict[int, str] = {}
        self.kernels: dict[int, str] = {}
        self.index = 0  # of the step that is written
        self._write(cache)

    def _write(self, cache: RegionCache) -> None:
        steps, placeholders = cache.cut(self.graph), self.graph.placeholders
        for node in self.graph.output.all_input_nodes:
            if node.op == "get_attr":  # the mesh of a DTensor that is returned
                owner = self.graph.fx_graph.owning_module
                self.constants[self.names[node]] = operator.attrgetter(str(node.target))(owner)
        ends = [*steps, self.graph.output]
        read = [step.inputs if isinstance(step, Region) else step.all_input_nodes for step in ends]
        last = {node: index for index, nodes in enumerate(read) for node in nodes}
        if placeholders:
            self.lines.append(f"    {', '.join(self.names[p] for p in placeholders)}, = args")
        self.lines.append("    args.clear()")
        self._drop(p for p in placeholders if p not in last)
        for self.index, step in enumerate(steps):
            dropped = [n for n in read[self.index] if last[n] == self.index]
            if isinstance(step, Region):
                self.lines.append(f"    inputs = {self._render(step.inputs)}")
                self._drop(dropped)
                self._call_region(step, cache)
                self._drop(n for n in step.outputs if n not in last)
                continue
            if called := _CALLS[step.target](self, step):
                value = "" if step.target is dialect.free else f"{self.names[step]} = "
                self.lines.append(f"    {value}{called}")
                self.places[len(self.lines)] = _place_of_node(step)
            self._drop(dropped)
        self.lines.append(f"    return {self._render(self.graph.outputs)}")

    def _call_region(self, region: Region, cache: RegionCache) -> None:
        function = self._constant("region", cache.compile(region, self.graph.phase))
        results = "".join(f"{self.names[n]}, " for n in region.outputs)
        note = f"  # {self.graphs.note(self.index)}" if self.graphs is not None else ""
        self.lines.append(f"    {f'{results}= ' if results else ''}{function}(inputs){note}")
        units = unit_of(region)
        self.places[len(self.lines)] = f"region {self.index}" + (f" (unit {units})" if units else "")
        if not region.is_view_only:
            self.kernels[self.index] = units

    def _drop(self, nodes: Iterable[fx.Node]) -> None:
        if names := ", ".join(self.names[node] for node in nodes):
            self.lines.append(f"    del {names}")

    def free(self, node: fx.Node) -> str:
        handle = operand(node)
        # A kept buffer is given back when its last reference is dropped.
        return "" if has_role(handle, Role.KEPT) else f"frame.free({self.names[handle]})"

    def wait(self, node: fx.Node) -> str:
        return f"frame.wait({self._given(node)})"

    def offload(self, node: fx.Node) -> str:
        return f"frame.offload({self._given(node)})"

    def reload(self, node: fx.Node) -> str:
        self.constants["device"] = torch.device  # as its repr is written
        return f"frame.reload({self._given(node)}, {argument(node, 'device')!r})"

    def keep_shard(self, node: fx.Node) -> str:
        return f"{self._constant('keep', _bound(node))}({self._given(node)})  # {node.meta['fsdp'].bucket}"

    def reduce_payloads(self, node: fx.Node) -> str:
        return f"frame.reduce_payloads({self._constant('reduce', _bound(node))}, {self._given(node)})"

    def keep(self, node: fx.Node) -> str:
        return f"frame.keep({self._constant('keep', keep_plan(node, self.owned))}, {self._given(node)})"

    def update(self, node: fx.Node) -> str:
        param, last = argument(node, "param"), argument(node, "last")
        return f"frame.update({param!r}, {self._given(node)}, {last})"

    def mean_over_groups(self, node: fx.Node) -> str:
        bucket, means = argument(node, "bucket"), self.graph.with_role(Role.MEAN_OVER_GROUPS)
        values = [(argument(mean, "bucket"), mean.meta["val"]) for mean in means]
        order = digest([f"{name} {value.numel()} {value.dtype}" for name, value in values])
        of_all = f"{len(means)} buckets, {order[:16]}" if node is means[0] else ""
        return f"frame.mean_over_groups({bucket!r}, {of_all!r}, {self._given(node)})"

    def hook(self, node: fx.Node) -> str:
        return f"frame.hook({argument(node, 'unit')!r}, {self._given(node)})"

    def copy_start(self, node: fx.Node) -> str:
        fetches = node.target is dialect.fetch_start
        ends_with_run = fetches and self.graph.phase != "forward"
        begin = partial(start_copy, copy=_bound(node), ends_with_run=ends_with_run)
        return self._start(node, "fetch" if fetches else "offload", begin)

    def gather_start(self, node: fx.Node) -> str:
        comms = self.comms if argument(node, "custom") else None
        given = _arguments(node)
        gather = bound(AllGather, given)(given["shards"])
        begin = partial(start_gather, gather=gather, record=node.meta["fsdp"], comms=comms)
        return self._start(node, "gather", begin)

    def reduce_start(self, node: fx.Node) -> str:
        again = node.target is dialect.all_reduce_shard_start
        reduce: Callable[[Any], Pending] = _bound(node)
        if node.target is dialect.reduce_scatter_start:
            given = _arguments(node)
            given["comms"], given["registered"] = self.comms if given["custom"] else None, self.registered
            made = QuantizedReduceScatter if given["sent_as"] else ReduceScatter
            reduce = bound(made, given)(given["grads"]).start
        begins = tuple(begins_of(operand(operand(node)))) if again else ()  # in the shard of the first reduction
        begin = partial(start_reduction, reduce=reduce, params=node.meta["fsdp"].params, begins=begins)
        return self._start(node, "reduce over replicas" if again else "reduce", begin)

    def _start(self, node: fx.Node, kind: str, begin: Callable[..., Pending]) -> str:
        bucket, method = node.meta["fsdp"].bucket, _CALLS[node.target].__name__
        plan = self._constant("plan", StartPlan(self.index, bucket, kind, begin))
        return f"frame.{method}({plan}, {self._given(node)})  # {bucket}"

    def _given(self, node: fx.Node) -> str:
        return self._render(node.args[0])

    def _constant(self, kind: str, value: Any) -> str:
        self.constants[f"{kind}_{self.index}"] = value
        return f"{kind}_{self.index}"

    def _render(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._render, value))}]"
        return repr(value)


_CALLS: dict[Any, Callable[[ProgramText, fx.Node], str]] = {
    **dict.fromkeys([*dialect.TRANSFER_WAITS, *dialect.ACTIVATION_WAITS], ProgramText.wait),
    **dict.fromkeys(dialect.COPY_STARTS, ProgramText.copy_start),
    dialect.all_gather_start: ProgramText.gather_start,
    dialect.reduce_scatter_start: ProgramText.reduce_start,
    dialect.all_reduce_start: ProgramText.reduce_start,
    dialect.all_reduce_shard_start: ProgramText.reduce_start,
    dialect.free: ProgramText.free,
    dialect.keep_shard: ProgramText.keep_shard,
    dialect.accumulate_grad: ProgramText.keep,
    dialect.update_shard: ProgramText.update,
    dialect.mean_over_groups: ProgramText.mean_over_groups,
    dialect.reduce_hook: ProgramText.hook,
    dialect.reduce_payloads: ProgramText.reduce_payloads,
    dialect.offload_activation: ProgramText.offload,
    dialect.reload_activation: ProgramText.reload,
}
CALLED = _CALLS.keys()  # operators that the executor runs


def with_room_for_calls(run: Any) -> Any:
    """Return a function whose frame Python puts into a new piece of its stack, with room for what it calls.

    Python (3.11 and later) has pieces of 16 KiB or more for frames. A call that does not fit into the rest of a piece
    maps another one, and unmaps it when it returns. Where the frame of a program ends near the end of a piece, that
    happened to each of its calls. A frame of more than 16 KiB gets a piece that is larger than itself.
    """
    run.__code__ = run.__code__.replace(co_stacksize=run.__code__.co_stacksize + _PIECE // 8)
    return run


_PIECE = 2**14  # bytes


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the operator's arguments by name, tensors as fake ones."""
    return arguments_of(node.target, *fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"]))


def _bound(node: fx.Node) -> Callable[[Any], Any]:
    """Return the function that runs a node's operator on its first argument."""
    return bound(FUNCTIONS[node.target], _arguments(node))


def _place_of_node(node: fx.Node) -> str:
    source = operand(node) if _CALLS[node.target] is ProgramText.wait else node
    what = _CALLS[source.target].__name__.replace("_", " ")
    bucket = f" of bucket {source.meta['fsdp'].bucket}" if what.endswith(" start") else ""
    return f"wait for {what.removesuffix(' start')}{bucket}" if source is not node else f"{what}{bucket}"
