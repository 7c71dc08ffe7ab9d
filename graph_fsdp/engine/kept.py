"""A start finds the programs of earlier starts, or takes the first rank's, and keeps its own.

[Note: what runs in the place of a graph]
Dynamo has traced the model and guards it. What follows, AOTAutograd's trace, the partition and the passes, is done for
equal graphs once, and its result read from a file (``graph_fsdp/programs``). What AOTAutograd does around a graph when
it runs (saved tensors, gradients of outputs, errors) is left to it: it traces a graph of the same inputs and outputs,
in which one call stands for everything, as for a layer in ``passes/repeat``. Where it would partition the joint graph
of that, the kept forward and backward are put in.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.engine.aot import AotTrace, through_aot_autograd
from graph_fsdp.engine.attention import warn_of_attention
from graph_fsdp.engine.dynamo import Entry
from graph_fsdp.engine.ranks import OtherPlan
from graph_fsdp.engine.sharing import SharedProgram
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes import Graph, PassContext, PassPipeline, Plan
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.passes.ir.portable import Names, NotPortable
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.passes.ir.stage import Snapshot, Stage, readable
from graph_fsdp.passes.ir.traced import TRACED
from graph_fsdp.passes.pipeline import PassesHaveRun, collector_paused
from graph_fsdp.passes.repeat.trace import call, called
from graph_fsdp.passes.transforms.partitioned import take_unsharded
from graph_fsdp.programs.folder import Folder
from graph_fsdp.programs.key import key_of, names_of
from graph_fsdp.programs.plain import Unknown
from graph_fsdp.programs.program import KeptProgram, differentiable_outputs
from graph_fsdp.report.report import CapturedGraph
from graph_fsdp.runtime.backends import Backend
from graph_fsdp.runtime.regions.regions import Step
from graph_fsdp.runtime.withheld_gradients import AbsentGradients, KeptGradients

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine

log = logging.getLogger(__name__)

# What reading of a file raises that another release has written, or another program.
_UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError)


@dataclass
class Lookup:
    """Holds the key of a graph of Dynamo's, and the program that was found for it, or None, which ``made_by`` made.
    ``must``: this one has to be kept. ``whole``: nothing is cut into regions."""

    folder: Folder
    shared: SharedProgram
    must: bool
    whole: bool
    key: dict[str, str]
    names: Names
    dynamo: fx.Graph
    program: KeptProgram | None = None
    made_by: str = "an earlier start"
    differentiable: tuple[bool, ...] | None = field(default=None, init=False)
    refused: str = field(default="", init=False)

    def traced(self, graph: fx.Graph, inputs: int, forward_outputs: int) -> None:
        """Note what AOTAutograd has made of the graph, before the passes."""
        try:
            self.differentiable = differentiable_outputs(self.dynamo, graph, inputs, forward_outputs)
        except NotPortable as reason:
            self.refused = str(reason)

    def keep(self, graphs: list[Graph], kind: str, context: PassContext) -> dict[fx.Graph, list[Step]]:
        """Keep the graphs after all passes, and return those that were cut for it. The log says why, where they cannot
        be kept, or UnsupportedError."""
        try:
            if self.differentiable is None:
                raise NotPortable(self.refused)
            program = KeptProgram.of(graphs, kind, self.differentiable, context)
            text = functools.cache(lambda: _text(program.to_data(self.names, self.whole)))
            self.folder.write(self.key, text)
            self.shared.send(text)
            return program.cuts
        except NotPortable as reason:
            self.shared.send(None)
            if self.must:
                raise UnsupportedError(f"the program of this model cannot be kept: {reason}") from None
            log.info("the program is not kept for later starts: %s", reason)
            return {}


class KeptPrograms:
    """Finds and keeps the programs of one model. ``folder``: where; None for nowhere."""

    def __init__(self, engine: Engine, folder: Callable[[], Folder | None], fullgraph: bool) -> None:
        self._engine, self._folder, self._fullgraph = engine, folder, fullgraph  # a weak proxy
        self._shared = SharedProgram(engine.schedules)
        self.first_graph = self._shared.first_graph

    def look_up(self, module: fx.GraphModule, inputs: list[Any], context: PassContext, entry: Entry) -> Lookup | None:
        """Look for the program of a graph of Dynamo's with gathers. None where none can be found or kept; the log says
        why."""
        found = self._key(module, inputs, context, entry)
        self._shared.announce(None if found is None else found.key)
        if found is None or found.must:
            return found
        if (data := found.folder.read(found.key)) is not None:
            self._read(found, data)
            if found.program is not None:
                self._shared.send(functools.partial(_text, data))
        elif (data := self._shared.take(found.key)) is not None:
            self._read(found, data)
            if found.program is not None:
                found.made_by = "the first rank"
                if not found.folder.file_of(found.key).exists():
                    found.folder.write(found.key, functools.partial(_text, data))
        return found

    def _key(self, module: fx.GraphModule, inputs: list[Any], context: PassContext, entry: Entry) -> Lookup | None:
        engine, folder = self._engine, self._folder()
        if folder is None:
            return None
        try:
            if not self._fullgraph:
                raise Unknown("a model of several graphs (fullgraph=False)")
            names = names_of(context.model, engine.storage.device)
            key = key_of(engine, context, module, inputs, entry.suffix, names)
        except Unknown as reason:
            if engine.run_passes_only:
                raise UnsupportedError(f"the program of this model cannot be kept: it depends on {reason}") from None
            log.info("no program of an earlier start is looked for, and none is kept: it depends on %s", reason)
            return None
        return Lookup(folder, self._shared, engine.run_passes_only, engine.whole, key, names, module.graph)

    def _read(self, found: Lookup, data: dict[str, Any]) -> None:
        try:
            found.program = KeptProgram.from_data(data, found.names, compat.current_fake_mode())
        except _UNREADABLE as error:
            log.info("%s cannot be used: %r", found.folder.file_of(found.key), error)


def _text(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


class KeptTrace(AotTrace):
    """Gives AOTAutograd a graph of one call to trace, and puts the kept ``program`` in the call's place."""

    program: KeptProgram

    @classmethod
    def of(
        cls, engine: Engine, context: PassContext, captured: CapturedGraph, entry: Entry, program: KeptProgram
    ) -> KeptTrace:
        made = cls(engine, context, captured, entry, lambda module: module)
        made.program, made._cuts = program, program.cuts
        return made

    def run(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.captured.remake = Remake.of(self, module)
        returned = operands(module.graph.output_node())
        stack_traces = [node.meta.get("stack_trace") for node in returned]
        with called({0: _stand_in(self.program)}), compat.without_joint_trace(call, stack_traces):
            return super().run(_contracted(module), inputs)

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._alive = self._owner()
        self.context.forward_outputs = num_fwd_outputs
        warn_of_attention(self.program.graphs[0])
        self._put_in()
        forward, backward = map(_outline, self.program.graphs)
        return forward, backward

    def compile_inference(self, inference: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        self._put_in()
        return self._first_program(inference, "inference")

    def _module(self, given: fx.GraphModule, phase: Phase) -> fx.GraphModule:
        return self.context.graphs[phase].module

    def _put_in(self) -> None:
        """Have ranks agree on the program, as on one that passes have made."""
        engine, program = self.engine, self.program
        if program.absent is not None:
            program.graphs[-1].absent = AbsentGradients(*program.absent, program.tangents, self.context, engine.kept)
        engine.schedules.run(program.graphs, self.context, program.kind, passes=self._instead_of_passes)

    def _instead_of_passes(self, graphs: Sequence[Graph], context: PassContext) -> None:
        if context.plan.collectives and context.plan != self.program.plan:
            raise OtherPlan
        context.plan.kept = self.program.plan.kept
        for graph in graphs:
            graph.cost = context.cost
            context.graphs[graph.phase] = graph
        for phase, stages in self.program.stages.items():
            for name, summary, nodes in stages:
                snapshot: Any = Remade(self.captured, phase, name, nodes)
                context.stages[phase][name] = Stage(name, phase, snapshot, graphs[0].module, 0.0, summary)


@dataclass
class _StandIn:
    """Describes what the call computes that stands for a whole graph (``Called``), as a ``Chain`` does of layers."""

    outputs: list[fx.Node]
    differentiable: list[bool]
    gradients: list[fx.Node | None]

    def fail(self, reason: str, which: int | None = None) -> None:
        """Do nothing: a graph that is kept writes to no input, and AOTAutograd gives it all gradients."""


def _stand_in(program: KeptProgram) -> Any:
    first, last = program.graphs[0], program.graphs[-1]
    differentiable = list(program.differentiable)
    gradients = last.outputs if last is not first else []
    return _StandIn(first.outputs[: len(differentiable)], differentiable, gradients)


def _contracted(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module of the same inputs and outputs, in which one call computes all."""
    graph = fx.Graph()
    inputs = module.graph.find_nodes(op="placeholder")
    copies = {node: graph.node_copy(node) for node in inputs}
    results = graph.call_function(call, (0, *copies.values()))
    count = len(operands(module.graph.output_node()))
    graph.output(tuple(graph.call_function(operator.getitem, (results, index)) for index in range(count)))
    return compat.with_graph(module, graph, copies)


def _outline(graph: Graph) -> fx.GraphModule:
    """Return a module that has of a graph its inputs and outputs, each the result of a call: AOTAutograd reads no more
    of it than their values, and copies a backward graph node by node."""
    made = fx.Graph()
    read = {*graph.placeholders, *graph.output.all_input_nodes}
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.fx_graph.nodes:
        if node in read:
            is_input = node.op == "placeholder"
            name, target = (node.name, node.target) if is_input else (None, call)
            copies[node] = made.create_node("placeholder" if is_input else "call_function", target, name=name)
            copies[node].meta = dict(node.meta)
    output = made.node_copy(graph.output, copies.__getitem__)
    output.meta = dict(graph.output.meta)
    return compat.module_of(made)


# What passes have made of the graph, when somebody asks


@dataclass(frozen=True)
class Remade:
    """Takes the place of a ``Snapshot`` after a pass that has not run in this process: it runs when somebody looks."""

    captured: CapturedGraph
    phase: Any
    name: str
    nodes: int

    def __len__(self) -> int:
        return self.nodes

    def copy(self) -> fx.Graph:
        last = self.captured.views[self.phase].graph
        if last is not None and self.name == next(reversed(self.captured.stages[self.phase])):
            return Snapshot(last.fx_graph).copy()
        made: Stage = self.captured.remake.stage(self.captured, self.phase, self.name)
        return made.graph


@dataclass(eq=False)
class _EngineOfTrace:
    """Holds what a trace reads of an engine, and not the model, which a report may outlive."""

    spec: ModelSpec
    pipeline: PassPipeline
    backend: Backend
    repeat_traces: bool
    kept: KeptGradients


@dataclass
class Remake:
    """Runs AOTAutograd and the passes on a graph of Dynamo's whose program was found."""

    engine: _EngineOfTrace
    context: PassContext
    plan: Plan
    entry: Entry
    module: fx.GraphModule
    inputs: list[Any]
    mode: Any
    grad: bool
    made: CapturedGraph | None = None

    @classmethod
    def of(cls, trace: KeptTrace, module: fx.GraphModule) -> Remake:
        """Take a copy of a graph, without what Dynamo knows of the tensors that the user passed."""
        graph = Snapshot(module.graph).copy()
        own = compat.with_graph(module, graph, dict(zip(module.graph.nodes, graph.nodes, strict=True)))
        mode, grad = compat.current_fake_mode(), torch.is_grad_enabled()
        inputs = compat.values_in(mode, (node.meta["example_value"] for node in graph.find_nodes(op="placeholder")))
        owner: Any = trace.engine
        engine = _EngineOfTrace(owner.spec, owner.pipeline, owner.backend, owner.repeat_traces, KeptGradients())
        return cls(engine, trace.context, trace.program.plan, trace.entry, own, inputs, mode, grad)

    def stage(self, captured: CapturedGraph, phase: Any, name: str) -> Stage:
        if self.made is None:
            self.made = self._run(captured, name)
        return self.made.stages[phase][name]

    def _run(self, captured: CapturedGraph, name: str) -> CapturedGraph:
        engine: Any = self.engine
        fresh = CapturedGraph(captured.index, captured.spec, captured.cause)
        context = dataclasses.replace(self.context, stages=fresh.stages, graphs={}, plan=copy.deepcopy(self.plan))

        def trace(prepare: Callable[..., Any]) -> AotTrace:
            return _PassesAlone(engine, context, fresh, self.entry, prepare)

        with self._as_it_was():
            try:
                through_aot_autograd(engine, self.module, self.inputs, trace)
            except PassesHaveRun as end:
                for graph in end.graphs:
                    kept = captured.views[graph.phase].graph
                    if kept is None or readable(graph.fx_graph) != readable(kept.fx_graph):
                        raise LookupError(
                            f"stage {name!r}: the program is one of an earlier start, or of another rank, of which no "
                            "stages are kept, and they cannot be made again: they would be those of another graph; "
                            "compile the model with programs=False"
                        ) from None
        return fresh

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        with (
            compat.tracing_in(self.mode),
            compat.tracing_options(fullgraph=True),
            compat.traced_as(TRACED),
            compat.without_dispatch_modes(),
            collector_paused(),
            torch.set_grad_enabled(self.grad),
        ):
            yield


class _PassesAlone(AotTrace):
    """Ends when the passes have run."""

    def _run_passes(self, graphs: list[Graph], kind: str) -> None:
        take_unsharded(graphs, self.context)
        self.engine.pipeline.run(graphs, self.context)
        raise PassesHaveRun(graphs, self.context)
