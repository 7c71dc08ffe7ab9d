"""The text of a program: one line per compute region and per communication node, in the verified order.

Every value is dropped after its last use.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from graph_fsdp.runtime.regions.region_cache import RegionCache
from graph_fsdp.runtime.regions.regions import Region, cut, unit_of


def generate(
    graph: Graph, cache: RegionCache, comms: Comms | None, graphs: ProgramGraphs | None
) -> tuple[str, dict[str, Any], dict[int, str]]:
    """The text of a program, the constants that it names, and what each of its lines does, for error messages."""
    names = _variable_names(graph)
    steps = cut(graph)
    last = _last_uses(steps, graph)
    # CUDA graphs write to their results again.
    owned: frozenset[fx.Node] = owned_gradients(graph) if graphs is None else frozenset()
    constants: dict[str, Any] = {}
    places: dict[int, str] = {}
    lines = [f"def run(frame, args):  # {graph.phase}"]
    if graph.placeholders:
        lines.append(f"    {', '.join(names[p] for p in graph.placeholders)}, = args")
    lines.append("    args.clear()")
    _drop(lines, [names[p] for p in graph.placeholders if p not in last])

    for index, step in enumerate(steps):
        inputs = step.inputs if isinstance(step, Region) else list(dict.fromkeys(step.all_input_nodes))
        dropped = [names[n] for n in inputs if last[n] == index]
        if isinstance(step, Region):
            function = f"region_{index}"
            constants[function] = cache.compile(step, graph.phase)
            lines.append(f"    inputs = [{', '.join(names[n] for n in step.inputs)}]")
            _drop(lines, dropped)
            results = "".join(f"{names[n]}, " for n in step.outputs)
            note = f"  # {graphs.note(index)}" if graphs is not None else ""
            lines.append(f"    {f'{results}= ' if results else ''}{function}(inputs){note}")
            units = unit_of(step)
            places[len(lines)] = f"region {index}" + (f" (unit {units})" if units else "")
            _drop(lines, [names[n] for n in step.outputs if n not in last])
            continue
        if line := _Line(step, index, graph, names, constants, owned, comms).line():
            lines.append(line)
            places[len(lines)] = _place_of_node(step)
        _drop(lines, dropped)
    lines.append(f"    return {_render(graph.output.args[0], names)}")
    return "\n".join(lines) + "\n", constants, places


@dataclass(frozen=True)
class _Line:
    """A node of the dialect that becomes a line of the program. Each method is what an operator becomes; it returns
    the call, and puts what that needs beside tensors into ``constants``."""

    node: fx.Node
    index: int
    graph: Graph
    names: Mapping[fx.Node, str]
    constants: dict[str, Any]
    owned: frozenset[fx.Node]
    comms: Comms | None

    def line(self) -> str:
        called = _CALLS[self.node.target](self)
        value = "" if self.node.target is dialect.free else f"{self.names[self.node]} = "
        return f"    {value}{called}" if called else ""

    def free(self) -> str:
        handle = operand(self.node)
        # A kept buffer is given back when its last reference is dropped.
        return "" if has_role(handle, Role.KEPT) else f"frame.free({self.names[handle]})"

    def wait(self) -> str:
        return f"frame.wait({self._given()})"

    def offload(self) -> str:
        return f"frame.offload({self._given()})"

    def reload(self) -> str:
        self.constants["device"] = torch.device  # as its repr is written
        return f"frame.reload({self._given()}, {dialect.argument(self.node, 'device')!r})"

    def keep_shard(self) -> str:
        return f"{self._constant('keep', self._bound())}({self._given()}){self._bucket()}"

    def reduce_payloads(self) -> str:
        return f"frame.reduce_payloads({self._constant('reduce', self._bound())}, {self._given()})"

    def keep(self) -> str:
        return f"frame.keep({self._constant('keep', keep_plan(self.node, self.owned))}, {self._given()})"

    def hook(self) -> str:
        return f"frame.hook({dialect.argument(self.node, 'unit')!r}, {self._given()})"

    def copy_start(self) -> str:
        fetches = self.node.target is dialect.fetch_start
        ends_with_run = fetches and self.graph.phase != "forward"
        plan = CopyPlan(*self._step("fetch" if fetches else "offload"), self._bound(), ends_with_run)
        return f"frame.copy_start({self._constant('plan', plan)}, {self._given()}){self._bucket()}"

    def gather_start(self) -> str:
        given, record = self._arguments(), self.node.meta["fsdp"]
        what = (given["layout"], given["dtype"], given["group"], record.escapes, record.slot, record.landing_slot)
        plan = GatherPlan(*self._step("gather"), *what, self._comms(given))
        return f"frame.gather_start({self._constant('plan', plan)}, {self._given()}){self._bucket()}"

    def reduce_start(self) -> str:
        again = self.node.target is dialect.all_reduce_shard_start
        begins = begins_in_shard(self.node) if again else ()
        place = self._step("reduce over replicas" if again else "reduce")
        plan = ReducePlan(*place, self._reduction(), self.node.meta["fsdp"].params, begins)
        return f"frame.reduce_start({self._constant('plan', plan)}, {self._given()}){self._bucket()}"

    def _reduction(self) -> Callable[[Any], Pending]:
        if self.node.target is not dialect.reduce_scatter_start:
            return self._bound()
        given = self._arguments()
        reduction: ReduceScatter = bound(ReduceScatter, {**given, "comms": self._comms(given)})(given["grads"])
        return reduction.start

    def _comms(self, given: Mapping[str, Any]) -> Comms | None:
        return self.comms if given["custom"] else None

    def _arguments(self) -> dict[str, Any]:
        """The operator's, with fake tensors."""
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), lambda node: node.meta["val"])
        return arguments_of(self.node.target, args, kwargs)

    def _bound(self) -> Callable[[Any], Any]:
        """What runs the operator on what it takes first."""
        return bound(FUNCTIONS[self.node.target], self._arguments())

    def _given(self) -> str:
        """The tensor, or the list of them, that the operator takes first."""
        return _render(self.node.args[0], self.names)

    def _constant(self, kind: str, value: Any) -> str:
        self.constants[f"{kind}_{self.index}"] = value
        return f"{kind}_{self.index}"

    def _step(self, kind: str) -> tuple[int, str, str]:
        return self.index, self.node.meta["fsdp"].bucket, kind

    def _bucket(self) -> str:
        return f"  # {self.node.meta['fsdp'].bucket}"


_CALLS: dict[Any, Callable[[_Line], str]] = {
    **dict.fromkeys(dialect.TRANSFER_WAITS, _Line.wait),
    **dict.fromkeys(dialect.COPY_STARTS, _Line.copy_start),
    dialect.all_gather_start: _Line.gather_start,
    dialect.reduce_scatter_start: _Line.reduce_start,
    dialect.all_reduce_start: _Line.reduce_start,
    dialect.all_reduce_shard_start: _Line.reduce_start,
    dialect.free: _Line.free,
    dialect.keep_shard: _Line.keep_shard,
    dialect.accumulate_grad: _Line.keep,
    dialect.reduce_hook: _Line.hook,
    dialect.reduce_payloads: _Line.reduce_payloads,
    dialect.offload_activation: _Line.offload,
    dialect.activation_offloaded: _Line.wait,
    dialect.reload_activation: _Line.reload,
    dialect.activation_reloaded: _Line.wait,
}
CALLED = _CALLS.keys()  # operators that the executor runs


def _place_of_node(node: fx.Node) -> str:
    source = operand(node) if _CALLS[node.target] is _Line.wait else node
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


def _drop(lines: list[str], names: Sequence[str]) -> None:
    if names:
        lines.append(f"    del {', '.join(names)}")


def _render(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_render(v, names) for v in value) + "]"
    return repr(value)
