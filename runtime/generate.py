"""The text of a program: one line per compute region and per communication node, in the verified order.

Every value is dropped after its last use.
"""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import layout_of
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.runtime.comm import collectives, custom_collectives
from graph_fsdp.runtime.comm.collectives import Pending
from graph_fsdp.runtime.comm.copies import copy_plan
from graph_fsdp.runtime.comm.custom_collectives import Comms
from graph_fsdp.runtime.cuda.cuda_graphs import ProgramGraphs
from graph_fsdp.runtime.frame import GatherPlan, ReducePlan
from graph_fsdp.runtime.kept_gradients import begins_in_shard, keep_plan, owned_gradients
from graph_fsdp.runtime.regions.region_cache import RegionCache
from graph_fsdp.runtime.regions.regions import Region, cut


def generate(
    graph: Graph, cache: RegionCache, comms: Comms | None, graphs: ProgramGraphs | None
) -> tuple[str, dict[str, Any]]:
    """The text of a program, and the constants that it names."""
    names = _variable_names(graph)
    steps = cut(graph)
    last = _last_uses(steps, graph)
    owned: frozenset[fx.Node] = (
        owned_gradients(graph) if graphs is None else frozenset()
    )  # CUDA graphs write there again
    constants: dict[str, Any] = {}
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
            _drop(lines, [names[n] for n in step.outputs if n not in last])
            continue
        if line := _Line(step, index, graph, names, constants, owned, comms).line():
            lines.append(line)
        _drop(lines, dropped)
    lines.append(f"    return {_render(graph.output.args[0], names)}")
    return "\n".join(lines) + "\n", constants


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

    def offload_activation(self) -> str:
        return f"frame.offload({self._given()})"

    def reload_activation(self) -> str:
        self.constants["device"] = torch.device  # as its repr is written
        return f"frame.reload({self._given()}, {dialect.argument(self.node, 'device')!r})"

    def keep_shard(self) -> str:
        return f"{self._constant('keep', _keep_plan(self.node))}({self._given()}){self._bucket()}"

    def reduce_payloads(self) -> str:
        static = {"op": dialect.argument(self.node, "op"), "group": compat.resolve_group(dialect.group_of(self.node))}
        reduce = self._constant("reduce", functools.partial(collectives.reduce_payloads, **static))
        return f"frame.reduce_payloads({reduce}, {self._given()})"

    def accumulate_grad(self) -> str:
        return f"frame.keep({self._constant('keep', keep_plan(self.node, self.owned))}, {self._given()})"

    def reduce_hook(self) -> str:
        return f"frame.hook({dialect.argument(self.node, 'unit')!r}, {self._given()})"

    def copy_start(self) -> str:
        plan = self._constant("plan", copy_plan(self.node, self.index, self.graph))
        return f"frame.copy_start({plan}, {self._given()}){self._bucket()}"

    def gather_start(self) -> str:
        plan = self._constant("plan", _gather_plan(self.node, self.index, self.comms))
        return f"frame.gather_start({plan}, {self._given()}){self._bucket()}"

    def reduce_start(self) -> str:
        plan = self._constant("plan", _reduce_plan(self.node, self.index, self.comms))
        return f"frame.reduce_start({plan}, {self._given()}){self._bucket()}"

    def _given(self) -> str:
        """The tensor, or the list of them, that the operator takes first."""
        return _render(self.node.args[0], self.names)

    def _constant(self, kind: str, value: Any) -> str:
        self.constants[f"{kind}_{self.index}"] = value
        return f"{kind}_{self.index}"

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
    dialect.accumulate_grad: _Line.accumulate_grad,
    dialect.reduce_hook: _Line.reduce_hook,
    dialect.reduce_payloads: _Line.reduce_payloads,
    dialect.offload_activation: _Line.offload_activation,
    dialect.activation_offloaded: _Line.wait,
    dialect.reload_activation: _Line.reload_activation,
    dialect.activation_reloaded: _Line.wait,
}
CALLED = _CALLS.keys()  # operators that the executor runs


def _gather_plan(node: fx.Node, step: int, comms: Comms | None) -> GatherPlan:
    record, dtype, group = node.meta["fsdp"], dialect.argument(node, "dtype"), dialect.group_of(node)
    slots = (record.slot, record.landing_slot)
    own = comms if dialect.argument(node, "custom") else None
    place = (step, record.bucket, "gather")
    return GatherPlan(*place, layout_of(node), dtype, compat.resolve_group(group), record.escapes, *slots, own)


def _keep_plan(node: fx.Node) -> Callable[[Tensor], Tensor]:
    scale = dialect.argument(node, "world_size") // dialect.argument(node, "ranks")
    static = {name: dialect.argument(node, name) for name in ("offsets", "numels", "length")}
    group = compat.resolve_group(dialect.group_of(node))
    return functools.partial(collectives.keep_shard, **static, scale=scale, group=group)


def _reduce_plan(node: fx.Node, step: int, comms: Comms | None) -> ReducePlan:
    bucket, group = node.meta["fsdp"].bucket, compat.resolve_group(dialect.group_of(node))
    params = node.meta["fsdp"].params
    options = {name: dialect.argument(node, name) for name in ("factor", "summed")}
    if node.target is dialect.all_reduce_shard_start:
        again = functools.partial(
            collectives.start_shard_all_reduce, ranks=dialect.argument(node, "ranks"), group=group, **options
        )
        return ReducePlan(step, bucket, "reduce over replicas", again, params, begins_in_shard(node))
    static = {"group": group, **options, **{name: dialect.argument(node, name) for name in ("dtype", "replicas")}}
    if node.target is dialect.reduce_scatter_start and dialect.argument(node, "custom"):
        assert comms is not None
        start: Callable[[Any], Pending] = functools.partial(_reduce_by, comms, **static)
    elif node.target is dialect.reduce_scatter_start:
        grads = [grad.meta["val"] for grad in dialect.argument(node, "grads")]
        messages = tuple(dialect.argument(node, "messages"))
        start = collectives.ReduceScatter.of(grads, messages=messages, **static).start
    else:
        start = functools.partial(collectives.start_all_reduce, **static)
    return ReducePlan(step, bucket, "reduce", start, params)


def _reduce_by(comms: Comms, grads: list[Tensor], **static: Any) -> Pending:
    if comms.reduce_scatter is None:  # taken away between forward and backward
        return collectives.start_reduce_scatter(grads, **static)
    return custom_collectives.start_reduce_scatter(grads, comm=comms.reduce_scatter, **static)


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
