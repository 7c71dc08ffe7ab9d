"""The executor: a scheduled graph as one Python function.

The function is generated from the graph: one line per region and per communication node, in the verified order,
and every value dropped after its last use. ``Program.source`` is its text. A run keeps its state (buffers,
collectives under way) in a ``Frame`` of its own, so that runs may nest and a run that raises leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import functools
import keyword
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import GatherLayout, layout_of
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.runtime.comm import collectives, custom_collectives, host_copies
from graph_fsdp.runtime.comm.collectives import Pending
from graph_fsdp.runtime.comm.copies import Copies, CopyPlan, copy_plan
from graph_fsdp.runtime.comm.custom_collectives import Comms
from graph_fsdp.runtime.cuda.cuda_graphs import ProgramGraphs
from graph_fsdp.runtime.kept_gradients import KeepPlan, KeptGradients, begins_in_shard, keep_plan, owned_gradients
from graph_fsdp.runtime.observe.ranges import ProgramRanges
from graph_fsdp.runtime.ranks.failure import OUT_OF_STEP
from graph_fsdp.runtime.regions.region_cache import RegionCache
from graph_fsdp.runtime.regions.regions import Compiled, Region, cut
from graph_fsdp.runtime.slots import GatheredBytes, SlotPlan, Slots


@dataclass(frozen=True)
class GatherPlan:
    """The static part of one ``all_gather_start``."""

    bucket: str
    layout: GatherLayout
    dtype: torch.dtype
    group: dist.ProcessGroup
    escapes: bool
    slot: int | None
    landing_slot: int | None
    comms: Comms | None = None  # where the user's own runs it


@dataclass(frozen=True)
class ReducePlan:
    """The static part of one reduction. ``start`` takes the gradients, or the shard that is reduced again."""

    bucket: str
    kind: str  # as it is counted
    start: Callable[[Any], Pending]
    params: tuple[str, ...] = ()
    begins: tuple[int, ...] = ()  # in a shard that is reduced again: where each parameter's gradient begins


class Frame:
    """One run of a program."""

    def __init__(self, counter: GatheredBytes, plan: SlotPlan, kept: KeptGradients) -> None:
        self.counter, self.kept = counter, kept
        self.slots = Slots(counter, plan)
        self.pending: dict[int, Pending] = {}
        self.copies = Copies()

    def gather_start(self, plan: GatherPlan, shards: list[Tensor]) -> Tensor:
        self.counter.count("all_gather")
        taken: list[Tensor] = []

        def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            # The first allocation is the bucket's buffer, the second the landing buffer.
            if taken:
                taken.append(self.slots.take_landing(numel, dtype, device, plan.landing_slot))
            elif plan.escapes:
                taken.append(self.slots.take_escaping(plan.bucket, numel, dtype, device))
            else:
                taken.append(self.slots.take(numel, dtype, device, plan.slot))
            return taken[-1]

        comm = plan.comms.all_gather if plan.comms is not None else None
        if comm is not None:
            arguments = (shards, plan.layout, plan.dtype, plan.group, allocate)
            pending = custom_collectives.start_all_gather(*arguments, comm)
        else:
            pending = collectives.start_all_gather(
                shards, plan.layout, plan.dtype, plan.group, allocate, self.slots.give_landing
            )
        self.slots.hold(pending.buffer, plan.escapes)
        self.pending[id(pending.buffer)] = pending
        return pending.buffer

    def reduce_start(self, plan: ReducePlan, grads: list[Tensor] | Tensor) -> Tensor:
        self.counter.count(plan.kind)
        if self.kept:
            grads = self.kept.added_to(grads, plan.params, plan.begins)
        pending = plan.start(grads)
        self.pending[id(pending.buffer)] = pending
        return pending.buffer

    def reduce_payloads(self, reduce: Callable[[list[Tensor]], Tensor], values: list[Tensor]) -> Tensor:
        self.counter.count("payload_reduce")
        return reduce(values)

    def offload(self, value: Tensor) -> Tensor:
        return self._copying(host_copies.start_offload(value))

    def reload(self, host: Tensor, device: torch.device) -> Tensor:
        return self._copying(host_copies.start_reload(host, device))

    def _copying(self, pending: Pending) -> Tensor:
        self.pending[id(pending.buffer)] = pending
        return pending.buffer

    def copy_start(self, plan: CopyPlan, tensors: list[Tensor]) -> Tensor:
        self.counter.count(plan.kind)
        copy = self.copies.start(plan, tensors)
        self.pending[id(copy.buffer)] = copy
        return copy.buffer

    def wait(self, buffer: Tensor) -> Tensor:
        self.pending.pop(id(buffer)).finish()
        return buffer

    def keep(self, plan: KeepPlan, grad: Tensor) -> None:
        """Autograd gets no gradient."""
        self.kept.add(plan, grad)

    def hook(self, unit: str, buffer: Tensor) -> Tensor:
        self.kept.hooks[unit](buffer)
        return buffer

    def free(self, buffer: Tensor) -> None:
        self.slots.free(buffer)

    def close(self) -> None:
        """End of the run. What is still under way may write into the run's buffers: it ends before those go."""
        try:
            while self.pending:
                self.pending.popitem()[1].finish()
            self.copies.close()
        finally:
            self.slots.close()

    def abandon(self, error: BaseException) -> None:
        """End of a run that raised ``error``, which nothing that fails here hides. Collectives in which other ranks do
        not take part are not waited for (those of a rank that the user interrupts may be such): the process group holds
        their memory until they end."""
        try:
            while self.pending and isinstance(error, Exception) and not isinstance(error, OUT_OF_STEP):
                try:
                    self.pending.popitem()[1].finish()
                except OUT_OF_STEP:
                    break
            self.pending.clear()
            self.copies.close()
        finally:
            self.slots.close()


MakeFrame = Callable[[GatheredBytes, SlotPlan, KeptGradients], Frame]


class Program:
    """A compiled graph. Call it with the list of the graph's inputs, which it empties. ``slots``: bytes of each slot
    that the records of the graph's gathers name. ``kept``: gradients that other graphs of the model did not reduce.
    ``comms``: what the user has brought. ``graphs``: captures its regions as CUDA graphs."""

    def __init__(
        self,
        graph: Graph,
        cache: RegionCache,
        counter: GatheredBytes,
        slots: Sequence[int] = (),
        kept: KeptGradients | None = None,
        comms: Comms | None = None,
        graphs: ProgramGraphs | None = None,
    ) -> None:
        # AOTAutograd then hands over the list itself, so that inputs can be dropped early. On the instance, because
        # the wrappers that torch puts around backward copy instance attributes only.
        self._boxed_call = True
        self.graph, self.counter, self.kept = graph, counter, kept if kept is not None else KeptGradients()
        self.check: Callable[[], None] | None = None  # before each run
        self.slots = SlotPlan(tuple(slots), _slot_uses(graph, len(slots)))
        self.graphs = graphs
        self.ranges = ProgramRanges(graph)
        self.source, self.constants = _generate(graph, cache, comms, graphs)
        self._frame: MakeFrame = Frame
        namespace: dict[str, Any] = dict(self.constants)
        exec(compile(self.source, f"<graph_fsdp {graph.phase} program>", "exec"), namespace)
        self._run = self.ordinary = namespace["run"]

    def __call__(self, args: list[Any]) -> Any:
        if self.check is not None:
            self.check()
        # A graph that is replayed shows a dispatch mode nothing.
        if self.graphs is not None and self._run is self.ordinary and not compat.dispatch_modes():
            return self.graphs.run(self, args)
        return self.execute(self._run, self.slots, args)

    def execute(self, run: Callable[..., Any], slots: SlotPlan, args: list[Any]) -> Any:
        run = self.ranges.around(run)
        frame = self._frame(self.counter, slots, self.kept)
        try:
            outputs = run(frame, args)
        except BaseException as error:
            frame.abandon(error)
            raise
        frame.close()
        return outputs

    @contextlib.contextmanager
    def instrumented(self, regions: Mapping[str, Compiled], frame: MakeFrame) -> Iterator[None]:
        """For a time, the same program with other functions for ``regions`` (``"region_3"``, as in ``source``) and
        frames of another kind. Runs that are under way go on as they began."""
        before = self._run, self._frame
        namespace = {**self._run.__globals__, **regions}
        self._run, self._frame = types.FunctionType(self._run.__code__, namespace), frame
        try:
            yield
        finally:
            self._run, self._frame = before


def _slot_uses(graph: Graph, slots: int) -> tuple[int, ...]:
    """How many buffers each slot holds in a run."""
    records = [start.meta["fsdp"] for start in graph.with_role(Role.GATHER_START)]
    uses = Counter(slot for record in records for slot in (record.slot, record.landing_slot))
    return tuple(uses[slot] for slot in range(slots))


def _generate(
    graph: Graph, cache: RegionCache, comms: Comms | None, graphs: ProgramGraphs | None
) -> tuple[str, dict[str, Any]]:
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
        _generate_call(step, graph, index, names, constants, lines, owned, comms)
        _drop(lines, dropped)
    lines.append(f"    return {_render(graph.output.args[0], names)}")
    return "\n".join(lines) + "\n", constants


def _generate_call(
    node: fx.Node,
    graph: Graph,
    index: int,
    names: dict[fx.Node, str],
    constants: dict[str, Any],
    lines: list[str],
    owned: frozenset[fx.Node],
    comms: Comms | None,
) -> None:
    if node.target is dialect.free:
        handle = node.args[0]
        assert isinstance(handle, fx.Node)
        if not has_role(handle, Role.KEPT):  # a kept buffer is given back when its last reference is dropped
            lines.append(f"    frame.free({names[handle]})")
        return
    if node.target in (dialect.offload_activation, dialect.reload_activation):
        method = "offload" if node.target is dialect.offload_activation else "reload"
        inputs = ", ".join(_render(argument, names) for argument in node.args)
        constants["device"] = torch.device
        lines.append(f"    {names[node]} = frame.{method}({inputs})")
        return
    if node.target in dialect.WAITS | dialect.COPY_WAITS | dialect.ACTIVATION_COPIES:
        lines.append(f"    {names[node]} = frame.wait({names[operand(node)]})")
        return
    if node.target is dialect.keep_shard:
        constants[f"keep_{index}"] = _keep_plan(node)
        lines.append(f"    {names[node]} = keep_{index}({_render(node.args[0], names)})  # {node.meta['fsdp'].bucket}")
        return
    if node.target is dialect.reduce_payloads:
        static = {"op": dialect.argument(node, "op"), "group": compat.resolve_group(dialect.group_of(node))}
        constants[f"reduce_{index}"] = functools.partial(collectives.reduce_payloads, **static)
        lines.append(f"    {names[node]} = frame.reduce_payloads(reduce_{index}, {_render(node.args[0], names)})")
        return
    if node.target is dialect.accumulate_grad:
        constants[f"keep_{index}"] = keep_plan(node, owned)
        lines.append(f"    {names[node]} = frame.keep(keep_{index}, {_render(node.args[0], names)})")
        return
    if node.target is dialect.reduce_hook:
        lines.append(f"    {names[node]} = frame.hook({node.args[1]!r}, {_render(node.args[0], names)})")
        return
    plan = f"plan_{index}"
    if node.target in dialect.COPY_STARTS:
        constants[plan] = copy_plan(node, graph)
        tensors = _render(node.args[0], names)
        lines.append(f"    {names[node]} = frame.copy_start({plan}, {tensors})  # {node.meta['fsdp'].bucket}")
        return
    gathers = node.target is dialect.all_gather_start
    constants[plan] = _gather_plan(node, comms) if gathers else _reduce_plan(node, comms)
    method = "gather_start" if node.target is dialect.all_gather_start else "reduce_start"
    comment = f"  # {node.meta['fsdp'].bucket}"
    lines.append(f"    {names[node]} = frame.{method}({plan}, {_render(node.args[0], names)}){comment}")


def _gather_plan(node: fx.Node, comms: Comms | None) -> GatherPlan:
    record, dtype, group = node.meta["fsdp"], dialect.argument(node, "dtype"), dialect.group_of(node)
    slots = (record.slot, record.landing_slot)
    own = comms if dialect.argument(node, "custom") else None
    return GatherPlan(record.bucket, layout_of(node), dtype, compat.resolve_group(group), record.escapes, *slots, own)


def _keep_plan(node: fx.Node) -> Callable[[Tensor], Tensor]:
    scale = dialect.argument(node, "world_size") // dialect.argument(node, "ranks")
    static = {name: dialect.argument(node, name) for name in ("offsets", "numels", "length")}
    group = compat.resolve_group(dialect.group_of(node))
    return functools.partial(collectives.keep_shard, **static, scale=scale, group=group)


def _reduce_plan(node: fx.Node, comms: Comms | None) -> ReducePlan:
    bucket, group = node.meta["fsdp"].bucket, compat.resolve_group(dialect.group_of(node))
    params = node.meta["fsdp"].params
    options = {name: dialect.argument(node, name) for name in ("factor", "summed")}
    if node.target is dialect.all_reduce_shard_start:
        again = functools.partial(
            collectives.start_shard_all_reduce, ranks=dialect.argument(node, "ranks"), group=group, **options
        )
        return ReducePlan(bucket, "reduce over replicas", again, params, begins_in_shard(node))
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
    return ReducePlan(bucket, "reduce", start, params)


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


def _render(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_render(v, names) for v in value) + "]"
    return repr(value)
