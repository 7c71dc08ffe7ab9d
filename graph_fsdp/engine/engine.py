"""Turn a forward call into running programs, by torch.compile with a backend of ours.

Dynamo traces the plain model with placeholder parameters. The backend finds these among the graph's inputs by identity,
has the passes turn them into shards and gathers, hands the graph to AOTAutograd, and runs the passes on the joint
graph, then on the forward and backward graph, or on the inference graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.engine import stand_ins
from graph_fsdp.engine.aot import AotTrace, through_aot_autograd, with_outputs_apart
from graph_fsdp.engine.casting import without_autocast
from graph_fsdp.engine.division import Division
from graph_fsdp.engine.dynamo import (
    Entered,
    Entry,
    apart,
    differentiable_once,
    forget_programs,
    name_of_code,
    own_code,
    traced_often,
    warn_of_traces,
    what_to_raise,
)
from graph_fsdp.engine.finalization import Finalization
from graph_fsdp.engine.full_masks import look_for_masks, mark_full_masks
from graph_fsdp.engine.kept import KeptPrograms, KeptTrace
from graph_fsdp.engine.pieces import Pieces
from graph_fsdp.engine.python_reads import PythonReads
from graph_fsdp.engine.ranks import Made, OtherPlan, Schedules, nothing
from graph_fsdp.engine.recompilation import Call, CaptureKey, Cause, traces_of, why_captured, why_run_again
from graph_fsdp.engine.substitution import (
    Inputs,
    TracedGraph,
    find_parameters,
    refuse_backward,
    substitute_shards,
    warn_of_writes,
)
from graph_fsdp.engine.updates import Updates
from graph_fsdp.errors import GraphBreakError, PassError, UnsupportedError, VerificationError
from graph_fsdp.module.communication import check_unchanged
from graph_fsdp.module.structure import NO_STRUCTURE, Structure
from graph_fsdp.parameters.extensions import ExtendedGather
from graph_fsdp.parameters.gradients import wanted_among
from graph_fsdp.parameters.kept_buckets import KeptBuckets
from graph_fsdp.parameters.sharded import ShardedParameter, Shards
from graph_fsdp.parameters.unshard import UnshardedUnits
from graph_fsdp.passes import CostModel, Graph, PassContext, Plan, memory_profile
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.passes.ir.settings import Settings
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.passes.ir.traced import TRACED
from graph_fsdp.passes.pipeline import PassesHaveRun, collector_paused
from graph_fsdp.report.report import CapturedGraph, failures_saved
from graph_fsdp.runtime import GatheredBytes, Program, RegionCache, WholeProgram
from graph_fsdp.runtime.comm.collectives import Comms
from graph_fsdp.runtime.cuda.capture import CAPTURES
from graph_fsdp.runtime.cuda.cuda_graphs import ModelGraphs, ProgramGraphs
from graph_fsdp.runtime.observe import Watcher
from graph_fsdp.runtime.slots import SlotMemory
from graph_fsdp.runtime.withheld_gradients import KeptGradients

if TYPE_CHECKING:
    from graph_fsdp.place import Place

log = logging.getLogger(__name__)

_engines = itertools.count()


class Engine:
    """Holds what a compiled model owns: its storage, passes, backend, and every graph captured so far."""

    def __init__(
        self,
        forward: Callable[..., Any],
        spec: ModelSpec,
        storage: Shards,
        place: Place,
        cost: CostModel | None,
        *,
        reshard_after_forward: bool | Literal["auto"] | None,
        fullgraph: bool,
    ) -> None:
        self.spec, self.storage, self.pipeline, self.backend = spec, storage, place.pipeline, place.backend
        self.reshard_after_forward, self.cost = reshard_after_forward, cost
        self.counter = GatheredBytes()
        self.regions, self.whole = RegionCache(place.backend), place.whole
        self.cuda_graphs: ModelGraphs | None = None
        self.graphs: list[CapturedGraph] = []
        self._traced: list[TracedGraph] = []  # by Dynamo
        self.programs: dict[tuple[int, Phase], Program | WholeProgram] = {}  # by captured graph
        ranks = storage.mesh.ranks if storage.mesh is not None else (0,)
        name = getattr(forward, "__qualname__", repr(forward)).removesuffix(".forward")
        self.schedules = Schedules(weakref.proxy(self), ranks, name)
        self._inputs = Inputs(dict)  # of the call that runs
        self._call: Call | None = None
        self._layout: Any = None  # see ``CaptureKey``
        self.cast = ""  # likewise
        self.repeat_traces = True  # equal layers are traced once
        self.equal_layers = compat.EqualLayers(frozenset())  # by Dynamo, once there are classes of units
        self.run_passes_only = False  # planning: graphs end in a ``PassesHaveRun``
        self.settings = Settings()
        self.own_reduce_group = ""  # its name, once a process group of reductions was made
        self.kept = KeptGradients(wanted=wanted_among(storage))
        self.wait_before_forward: Any = None  # an event
        self.number = next(_engines)  # in this process
        self.comms = Comms()
        self.unsharded = UnshardedUnits(storage, self.counter, self.schedules, self.comms)
        self.kept_buckets = KeptBuckets(self.counter, self.schedules, self.whole)
        self._compiled: dict[CaptureKey, Callable[..., Any]] = {}
        self._names_of_code: defaultdict[Entry, str] = defaultdict(name_of_code)
        self.structure_of_model: Callable[[], Structure | None] = lambda: None  # a weak reference, once it is compiled
        self.fullgraph = fullgraph
        self.pieces = Pieces(weakref.proxy(self), fullgraph)
        self.finalization = Finalization(weakref.proxy(self))
        self.division = Division(weakref.proxy(self))
        self.python_reads = PythonReads(weakref.proxy(self), fullgraph)
        self.updates = storage.updates = Updates(weakref.proxy(self))
        storage.refusal = self.python_reads.refusal
        self.kept_programs = KeptPrograms(weakref.proxy(self), place.programs, fullgraph)
        self.watchers: list[Watcher] = []
        self.registered: dict[str, SlotMemory] = {}  # by ``Settings.registered_memory``
        self.extensions: dict[str, ExtendedGather] = {}
        self._compile = functools.partial(torch.compile, fullgraph=fullgraph, dynamic=place.dynamic, **apart(fullgraph))
        self._full_masks = look_for_masks(place.pipeline, place.backend.name)
        self._traced_under = functools.partial(compat.tracing_options, fullgraph, integers=not place.dynamic)
        # torch's cache of fake tensors keeps symbols of graphs, and so sizes, guards and sources, for good.
        self._shape_envs: weakref.WeakSet[Any] = weakref.WeakSet()
        weakref.finalize(self, compat.forget_fake_values, self._shape_envs).atexit = False

    @property
    def structure(self) -> Structure:
        """Return what the model has; compiled code keeps the engine, and must not keep the model."""
        return self.structure_of_model() or NO_STRUCTURE

    def take_settings(self, other: Engine) -> None:
        """Take what was set on a model, of which this engine's model is a copy; but not what optimizers have set."""
        self.schedules.be_of_a_copy(other.schedules)
        self.settings = dataclasses.replace(other.settings, stepped=frozenset(), unsharded=frozenset())
        self.cast, self.own_reduce_group = other.cast, other.own_reduce_group
        self.comms.all_gather, self.comms.reduce_scatter = other.comms.all_gather, other.comms.reduce_scatter
        self.kept.hooks.update(other.kept.hooks)
        self.registered = {kind: memory.anew(self.counter) for kind, memory in other.registered.items()}
        units, others = self.unsharded, other.unsharded
        units.optional, units.whole_after_backward = others.optional, others.whole_after_backward
        self.finalization.manual, self.finalization.unreduced = other.finalization.manual, other.finalization.unreduced

    def capture_regions(self, model: nn.Module) -> None:
        """Make compute regions CUDA graphs from now on. Dynamo keeps these, so they keep neither model nor storage."""
        self.storage.keeps_buffers = True
        model_reference, storage_reference, device = weakref.ref(model), weakref.ref(self.storage), self.storage.device

        def state() -> Iterator[Tensor]:
            now, shards = model_reference(), storage_reference()
            if now is None or shards is None:
                return
            yield from shards.buffers
            yield from now.buffers()
            for p in now.parameters():  # those that are not sharded
                if id(p) not in shards.by_placeholder and not isinstance(p, DTensor):
                    yield p

        self.cuda_graphs = ModelGraphs(CAPTURES[device.type](device), device, self.counter, state)
        weakref.finalize(self.storage, self.cuda_graphs.close).atexit = False

    def run(self, entry: Entry, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a function of ``module``, the model or one of its units, with placeholders in the place of parameters."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.schedules.failures_told(entry.name))
            stack.enter_context(Entered.turn(waits=self.spec.mesh.ranks == 1))
            if self.storage.active:
                raise RuntimeError("the forward of a model was called from within itself; call its submodules")
            self.structure.check()
            for watcher in tuple(self.watchers):
                watcher.forward(entry.unit, args, kwargs)
            if self.wait_before_forward is not None:
                self.wait_before_forward.wait()
                self.wait_before_forward = None
            self.unsharded.before_forward(self.settings, self.updates.ahead)
            stack.callback(self.unsharded.after_forward)
            if self.settings.unsharded != self.unsharded.units:
                self.settings = dataclasses.replace(self.settings, unsharded=self.unsharded.units)
            self.storage.refresh()
            inputs = Inputs(lambda: self.finalization.watched(self.unsharded.watched(self.storage.inputs())))
            masks = self._full_masks(kwargs)
            structure = self.structure
            has = structure.has_hooks, self.cast, masks, structure.forwards
            key = CaptureKey(self.settings, entry, self._layout, *has)
            stack.enter_context(self.storage.placeholders_registered())
            stack.enter_context(self._traced_under(hooks=key.hooks, shared=self.schedules.lockstep is not None))
            stack.enter_context(compat.traced_as(TRACED))
            stack.enter_context(compat.dynamo_ignores_modes())
            if self.repeat_traces:
                stack.enter_context(self.equal_layers.active())
            stack.enter_context(self.entered())
            stack.enter_context(self.pieces.forward_call())
            stack.enter_context(self.python_reads.forward_call())
            if key not in self._compiled:  # Dynamo traces
                stack.enter_context(collector_paused())
            self._inputs, self._call = inputs, Call(entry.function, module, args, kwargs)
            try:
                outputs = self._function_compiled(key)(module, *args, **kwargs)
                outputs = self.storage.without_placeholders(outputs)
                before = self.python_reads.before_backward((args, kwargs), outputs)
                return differentiable_once(outputs, inputs.recorded, before)
            except compat.BackendCompilerFailed as error:
                raise error.inner_exception from error.inner_exception.__cause__
            except compat.NOT_TRACED as error:
                raised = what_to_raise(error, entry, self._call, self.structure, self.fullgraph)
            except compat.FailOnRecompileLimitHit as error:
                causes = [graph.cause for graph in traces_of(self.graphs, key)]
                raise GraphBreakError(traced_often(self.structure, causes, gives_up=True)) from error
            finally:
                self._inputs, self._call = Inputs(dict), None
            raise raised  # with the cause and the context that it has

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Let functions of the model be the plain ones."""
        return Entered.by(self.number)

    def _function_compiled(self, key: CaptureKey) -> Callable[..., Any]:
        """Return an entry's function, compiled for the present settings. Each of these has graphs of its own, as Dynamo
        has no guards on settings, and on hooks only where there are some (``structure.py``); one name for all of them
        has Dynamo know in each which sizes have changed. What Dynamo keeps of a compilation lives as long as the
        function's code object, where the garbage collector does not see it. So it must not keep the engine, which has
        that code object."""
        if key not in self._compiled:
            stand_ins.install()
            backend = functools.partial(type(self)._compile_graph, weakref.proxy(self), key)
            name, sharded = self._names_of_code[key.entry], self.storage.mesh is not None
            function = own_code(key.entry.function, self.fullgraph, sharded, name)
            weakref.finalize(self, forget_programs, function).atexit = False
            self._compiled[key] = self._compile(function, backend=backend)
        return self._compiled[key]

    def _compile_graph(
        self, key: CaptureKey, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """The Dynamo backend: called once per captured graph. ``self`` is a weak proxy, see ``_function_compiled``."""
        cause = why_captured(self.graphs, key, self._call, breaks=not self.fullgraph)
        warn_of_traces(self.structure, [graph.cause for graph in traces_of(self.graphs, key, cause)])
        parameters = find_parameters(module, self.storage)
        mark_full_masks(module, key.full_masks, self._call)
        refuse_backward(module, parameters)
        warn_of_writes(module, parameters, self.python_reads.versions)
        names = tuple(p.spec.name for p in parameters.values())
        self._traced.append(traced := TracedGraph(module, parameters, self.storage))
        traced.programs[names] = self._compile_with(key, cause, module, list(example_inputs), parameters)

        def compile_again(module: fx.GraphModule, inputs: list[Any], given: dict[int, ShardedParameter]) -> Any:
            if self.backend.name == "xla":
                raise UnsupportedError(
                    "backend='xla': a module was exchanged for another after its code was compiled; exchange it before "
                    "graph_fsdp.compile"
                )
            again = why_run_again(cause, [p.spec.name for p in given.values()])
            return self._compile_with(key, again, module, inputs, given)

        traced = weakref.proxy(traced)  # Dynamo keeps what it is given here
        return lambda *args: traced.run(args, self._inputs.of(traced), compile_again)

    def _compile_with(
        self,
        key: CaptureKey,
        cause: Cause,
        module: fx.GraphModule,
        inputs: list[Any],
        parameters: dict[int, ShardedParameter],
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo's for these parameters, by the places of their inputs."""
        captured, context = self.new_graph(cause, key.settings)
        context.inputs.extensions = self.extensions
        self._shape_envs.add(compat.current_fake_mode().shape_env)
        self._substitute_shards(module, inputs, parameters, context)
        self.graphs.append(captured)
        first_graph = self.kept_programs.first_graph(key.settings, parameters.values())
        try:
            with failures_saved(self), collector_paused(), compat.without_dispatch_modes(), first_graph:
                self.pipeline.run([Graph(module, "capture")], context)
                lookup = self.kept_programs.look_up(module, inputs, context, key.entry)
                if lookup is not None and lookup.program is not None:
                    try:
                        log.info("the programs of graph %d are those of %s", captured.index, lookup.made_by)
                        kept = KeptTrace.of(self, context, captured, key.entry, lookup.program)
                        return kept.run(module, inputs)
                    except OtherPlan:
                        log.info("the ranks have another plan for graph %d", captured.index)
                        captured.remake = None
                trace = functools.partial(AotTrace, self, context, captured, key.entry, lookup=lookup)
                return through_aot_autograd(self, module, inputs, trace)
        except (VerificationError, PassError):
            for node in module.graph.nodes:  # torch 2.15's Dynamo erases them from the last: a pass may have moved them
                node.args, node.kwargs = (), {}
            raise

    def new_graph(self, cause: Cause, settings: Settings) -> tuple[CapturedGraph, PassContext]:
        """Return the record of a graph that is captured with these settings, and the context of its passes."""
        spec = self.spec
        if settings.own_reduce_group:
            spec = dataclasses.replace(spec, own_reduce_group=self.own_reduce_group)
        captured = CapturedGraph(len(self.graphs), spec, cause)
        return captured, PassContext(
            spec, self.reshard_after_forward, cost=self.cost, settings=settings, stages=captured.stages
        )

    def _substitute_shards(
        self, module: fx.GraphModule, inputs: list[Any], parameters: dict[int, ShardedParameter], context: PassContext
    ) -> None:
        substitute_shards(module, inputs, parameters, context)

    def run_passes(
        self, graphs: list[Graph], context: PassContext, captured: CapturedGraph, kind: str, made: Made = nothing
    ) -> None:
        if not self.run_passes_only:
            return self.schedules.run(graphs, context, kind, made=made)
        context.plan = Plan()
        self.pipeline.run(graphs, context)
        made()
        for graph in graphs:
            captured.views[graph.phase].graph = graph
        raise PassesHaveRun(graphs, context)

    def program(self, graph: Graph, context: PassContext, captured: CapturedGraph) -> Callable[[list[Any]], Any]:
        program = self._make_program(graph, context, captured)
        graph = program.graph
        graph.cost = context.cost
        keep_slots = isinstance(program, Program) and bool(program.graphs or program.memory)
        # Of the context what is read of it: a report may outlive the model.
        outputs, settings = context.forward_outputs, context.settings
        read = PassContext(context.model, cost=context.cost, forward_outputs=outputs, settings=settings)
        captured.add_program(graph, program, functools.partial(memory_profile, graph, read, keep_slots))
        self.programs[captured.index, graph.phase] = program
        return compat.boxed(self._runnable(program, context))

    def _make_program(self, graph: Graph, context: PassContext, captured: CapturedGraph) -> Program | WholeProgram:
        if self.whole:
            return WholeProgram(graph, self.regions, self.counter)
        is_half = captured.cause.kind == "divided"  # what crosses to the other half outlives the run
        graphs = None if is_half else self._program_graphs(graph, context, captured.index)
        memory = self.registered[kind] if (kind := context.settings.registered_memory) else None
        program = Program(graph, self.regions, self.counter, self.kept, self.comms, graphs, memory)
        program.watchers = self.watchers
        if graph.phase == "backward" and "forward" in context.graphs:
            stepped = [name for node in graph.with_role(Role.UPDATE) for name in node.meta["fsdp"].params]
            program.check = functools.partial(check_unchanged, weakref.ref(self), context.settings, stepped)
        return program

    def _program_graphs(self, graph: Graph, context: PassContext, index: int) -> ProgramGraphs | None:
        """Return the CUDA graphs of a graph's program; None where nothing is captured, as of a whole model.

        Raises:
            UnsupportedError: none of the regions of a forward graph can be captured: the option would do nothing.
        """
        if self.cuda_graphs is None or context.settings.unsharded:
            return None
        user_outputs = context.forward_outputs if graph.phase == "forward" else len(operands(graph.output))
        before = self.programs.get((index, "forward"))  # of a backward
        graphs = ProgramGraphs(self.cuda_graphs, graph, user_outputs, getattr(before, "graphs", None))
        reasons = graphs.choice.reasons
        if graph.phase == "forward" and reasons and not graphs.choice.captured:
            first, reason = next(iter(reasons.items()))
            raise UnsupportedError(
                f"cuda_graphs=True: no region of the forward graph can be captured: region_{first} {reason}; leave "
                "cuda_graphs out"
            )
        return graphs

    def _runnable(self, program: Program | WholeProgram, context: PassContext) -> Callable[[list[Any]], Any]:
        """Return ``program`` with what has to be done before and after each run."""
        graph = program.graph
        runnable = self.unsharded.feeding(program, graph.unsharded) if graph.unsharded else program
        if graph.absent is not None:
            runnable = functools.partial(graph.absent.run, runnable)
        if graph.phase == "forward":
            runnable = with_outputs_apart(runnable, graph.outputs[: context.forward_outputs])
        in_step = self.schedules.in_step(runnable, program, graph, context)
        if graph.phase == "backward":
            in_step = without_autocast(in_step, self.storage.device)
        return self.kept_buckets.around(in_step, graph, self.spec)
