"""The text of a program: one line per compute region and per communication node, in the verified order.

Every value is dropped after its last use.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.runtime.comm.collectives import Pending, ReduceScatter
from graph_fsdp.runtime.comm.custom_collectives import Comms
from graph_fsdp.runtime.cuda.cuda_graphs import ProgramGraphs
from graph_fsdp.runtime.frame import CopyPlan, GatherPlan, ReducePlan
from graph_fsdp.runtime.kept_gradients import begins_in_shard, keep_plan, owned_gradients
from graph_fsdp.runtime.operators import FUNCTIONS, arguments_of, bound
from graph_fsdp.runtime.regions.regions import Region, RegionCache, cut, unit_of


class ProgramText:
    """The text of a program (``lines``), the ``constants`` that it names, and what each of its lines does, for error
    messages (``places``). Each method that takes a node of the dialect is what an operator becomes; it returns the
    call, and puts what that needs beside tensors into ``constants``."""

    def __init__(self, graph: Graph, cache: RegionCache, comms: Comms | None, graphs: ProgramGraphs | None) -> None:
        self.graph, self.comms, self.graphs = graph, comms, graphs
        self.names = _variable_names(graph)
        # CUDA graphs write to their results again.
        self.owned: frozenset[fx.Node] = owned_gradients(graph) if graphs is None else frozenset()
        self.lines = [f"def run(frame, args):  # {graph.phase}"]
        self.constants: dict[str, Any] = {}
        self.places: dict[int, str] = {}
        self.index = 0  # of the step that is written
        self._write(cache)

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"

    def _write(self, cache: RegionCache) -> None:
        steps, placeholders = cut(self.graph), self.graph.placeholders
        last = _last_uses(steps, self.graph)
        if placeholders:
            self.lines.append(f"    {', '.join(self.names[p] for p in placeholders)}, = args")
        self.lines.append("    args.clear()")
        self._drop(p for p in placeholders if p not in last)
        for self.index, step in enumerate(steps):
            inputs = step.inputs if isinstance(step, Region) else list(dict.fromkeys(step.all_input_nodes))
            dropped = [n for n in inputs if last[n] == self.index]
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
        self.lines.append(f"    return {self._render(self.graph.output.args[0])}")

    def _call_region(self, region: Region, cache: RegionCache) -> None:
        function = self._constant("region", cache.compile(region, self.graph.phase))
        results = "".join(f"{self.names[n]}, " for n in region.outputs)
        note = f"  # {self.graphs.note(self.index)}" if self.graphs is not None else ""
        self.lines.append(f"    {f'{results}= ' if results else ''}{function}(inputs){note}")
        units = unit_of(region)
        self.places[len(self.lines)] = f"region {self.index}" + (f" (unit {units})" if units else "")

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
        return f"frame.reload({self._given(node)}, {dialect.argument(node, 'device')!r})"

    def keep_shard(self, node: fx.Node) -> str:
        return f"{self._constant('keep', _bound(node))}({self._given(node)}){_bucket(node)}"

    def reduce_payloads(self, node: fx.Node) -> str:
        return f"frame.reduce_payloads({self._constant('reduce', _bound(node))}, {self._given(node)})"

    def keep(self, node: fx.Node) -> str:
        return f"frame.keep({self._constant('keep', keep_plan(node, self.owned))}, {self._given(node)})"

    def hook(self, node: fx.Node) -> str:
        return f"frame.hook({dialect.argument(node, 'unit')!r}, {self._given(node)})"

    def copy_start(self, node: fx.Node) -> str:
        fetches = node.target is dialect.fetch_start
        ends_with_run = fetches and self.graph.phase != "forward"
        plan = CopyPlan(*self._step(node, "fetch" if fetches else "offload"), _bound(node), ends_with_run)
        return f"frame.copy_start({self._constant('plan', plan)}, {self._given(node)}){_bucket(node)}"

    def gather_start(self, node: fx.Node) -> str:
        given, record = _arguments(node), node.meta["fsdp"]
        what = (given["layout"], given["dtype"], given["group"], record.escapes, record.slot, record.landing_slot)
        plan = GatherPlan(*self._step(node, "gather"), *what, self.comms if given["custom"] else None)
        return f"frame.gather_start({self._constant('plan', plan)}, {self._given(node)}){_bucket(node)}"

    def reduce_start(self, node: fx.Node) -> str:
        again = node.target is dialect.all_reduce_shard_start
        reduce: Callable[[Any], Pending] = _bound(node)
        if node.target is dialect.reduce_scatter_start:
            given = _arguments(node)
            given["comms"] = self.comms if given["custom"] else None
            reduce = bound(ReduceScatter, given)(given["grads"]).start
        place = self._step(node, "reduce over replicas" if again else "reduce")
        plan = ReducePlan(*place, reduce, node.meta["fsdp"].params, begins_in_shard(node) if again else ())
        return f"frame.reduce_start({self._constant('plan', plan)}, {self._given(node)}){_bucket(node)}"

    def _given(self, node: fx.Node) -> str:
        """The tensor, or the list of them, that the operator takes first."""
        return self._render(node.args[0])

    def _constant(self, kind: str, value: Any) -> str:
        self.constants[f"{kind}_{self.index}"] = value
        return f"{kind}_{self.index}"

    def _step(self, node: fx.Node, kind: str) -> tuple[int, str, str]:
        return self.index, node.meta["fsdp"].bucket, kind

    def _render(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._render, value))}]"
        return repr(value)


_CALLS: dict[Any, Callable[[ProgramText, fx.Node], str]] = {
    **dict.fromkeys(dialect.TRANSFER_WAITS, ProgramText.wait),
    **dict.fromkeys(dialect.COPY_STARTS, ProgramText.copy_start),
    dialect.all_gather_start: ProgramText.gather_start,
    dialect.reduce_scatter_start: ProgramText.reduce_start,
    dialect.all_reduce_start: ProgramText.reduce_start,
    dialect.all_reduce_shard_start: ProgramText.reduce_start,
    dialect.free: ProgramText.free,
    dialect.keep_shard: ProgramText.keep_shard,
    dialect.accumulate_grad: ProgramText.keep,
    dialect.reduce_hook: ProgramText.hook,
    dialect.reduce_payloads: ProgramText.reduce_payloads,
    dialect.offload_activation: ProgramText.offload,
    dialect.activation_offloaded: ProgramText.wait,
    dialect.reload_activation: ProgramText.reload,
    dialect.activation_reloaded: ProgramText.wait,
}
CALLED = _CALLS.keys()  # operators that the executor runs


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The operator's, with fake tensors."""
    return arguments_of(node.target, *fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"]))


def _bound(node: fx.Node) -> Callable[[Any], Any]:
    """What runs the operator on what it takes first."""
    return bound(FUNCTIONS[node.target], _arguments(node))


def _bucket(node: fx.Node) -> str:
    return f"  # {node.meta['fsdp'].bucket}"


def _place_of_node(node: fx.Node) -> str:
    source = operand(node) if _CALLS[node.target] is ProgramText.wait else node
    what = _CALLS[source.target].__name__.replace("_", " ")
    bucket = f" of bucket {source.meta['fsdp'].bucket}" if what.endswith(" start") else ""
    return f"wait for {what.removesuffix(' start')}{bucket}" if source is not node else f"{what}{bucket}"


def _last_uses(steps: Sequence[Region | fx.Node], graph: Graph) -> dict[fx.Node, int]:
    last: dict[fx.Node, int] = {}
    for index, step in enumerate(steps):
        for node in step.inputs if isinstance(step, Region) else step.all_input_nodes:
            last[node] = index
    for node in graph.output.all_input_nodes:
        last[node] = len(steps)
    return last


def _variable_names(graph: Graph) -> dict[fx.Node, str]:
    return {
        n: f"{n.name}_" if keyword.iskeyword(n.name) or n.name in ("frame", "args", "inputs") else n.name
        for n in graph.fx_graph.nodes
    }
