"""Follow a captured graph through AOTAutograd: joint graph, partition, passes, and programs of forward and backward."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.engine.attention import warn_of_attention
from graph_fsdp.engine.dynamo import Entry
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes import Graph, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.agreed_order import plan_kind
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.effects import draws
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.passes.ir.stage import Snapshot
from graph_fsdp.passes.pipeline import add_stage, collector_paused, garbage_collected
from graph_fsdp.passes.repeat.repeat import Repeats
from graph_fsdp.passes.repeat.segments import NotRepeatable, find_repeats
from graph_fsdp.passes.transforms.activation_checkpointing import with_torchs_budget
from graph_fsdp.passes.transforms.edits import put_inputs_first
from graph_fsdp.passes.transforms.insert_gathers import mark_tangents
from graph_fsdp.passes.transforms.partitioned import save_as_they_were, take_unsharded, unify_sizes
from graph_fsdp.passes.transforms.recompute import settle_gathers
from graph_fsdp.report.report import CapturedGraph
from graph_fsdp.runtime.regions.regions import Step
from graph_fsdp.runtime.withheld_gradients import find_absent

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine
    from graph_fsdp.engine.kept import Lookup

log = logging.getLogger(__name__)

_ATTEMPTS = 2  # to trace equal layers once: the second leaves out the layer that turned out to be unequal


def refuse_sparse_gradients(joint: Graph) -> None:
    """Raise UnsupportedError if a parameter's gradient is a sparse tensor, which nothing here can reduce."""
    for node in joint.fx_graph.find_nodes(op="call_function", target=dialect.reduce_grad):
        if operand(node).meta["val"].layout is not torch.strided:
            name = dialect.parameter_of(node)
            raise UnsupportedError(
                f"the gradient of parameter {name!r} is a sparse tensor, which is not reduced over ranks; make the "
                "embedding with sparse=False"
            )


def refuse_passes_of_inductor() -> None:
    """Raise UnsupportedError if a user has Inductor change graphs before they are differentiated."""
    for name in compat.inductor_passes_before_gradients():
        raise UnsupportedError(
            f"torch._inductor.config.{name} asks for passes on a graph before it is differentiated, where only those "
            "of graph_fsdp.compile run: unset it, and give passes= a pass of the phase 'capture'"
        )


@dataclass(eq=False)
class AotTrace:
    """Takes one of Dynamo's graphs through AOTAutograd, which calls the steps: ``partition``, ``compile_forward`` and,
    when a backward asks for it, ``compile_backward``; or ``compile_inference`` where nothing needs a gradient.

    The reference to the engine is weak, as torch 2.9 keeps what it was given for good. ``prepare`` makes the traced
    graph whole, where equal layers were traced once, and fit for the backend.
    """

    engine: Engine
    context: PassContext
    captured: CapturedGraph
    entry: Entry
    prepare: Callable[[fx.GraphModule], fx.GraphModule]
    lookup: Lookup | None = None  # of a kept program; where there is none, this one is kept
    _piece: tuple[Snapshot | None, str] = (None, "")  # until its program is compiled
    _alive: Engine | None = None  # until backward is compiled, which the model may not live to see
    _cuts: dict[fx.Graph, list[Step]] = field(default_factory=dict)  # of graphs that are cut into regions already

    def __post_init__(self) -> None:
        self._owner, self.engine = weakref.ref(self.engine), weakref.proxy(self.engine)

    def run(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        backend = self.engine.backend
        if backend.name == "inductor":
            refuse_passes_of_inductor()
        compiler = compat.aot_autograd(
            fw_compiler=self.compile_forward,
            bw_compiler=self.compile_backward,
            inference_compiler=self.compile_inference,
            partition_fn=self.partition,
            decompositions=backend.decompositions(),
            keep_inference_input_mutations=backend.keeps_mutations,
        )
        with compat.unlogged_graphs_unprinted(), compat.recomputed_for_own_backward(module.graph):
            run: Callable[..., Any] = compiler(module, inputs)
        del self.prepare  # and the traces of layers that it has: torch keeps the rest until backward is compiled
        backward = self.context.graphs.get("backward")
        return run if backward is None or backward.absent is None else backward.absent.watching(run)

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        engine, context = self.engine, self.context
        self._alive = self._owner()
        joint = self.prepare(joint)
        put_inputs_first(joint.graph)
        compat.take_meshes_from_forward(joint, len(joint_inputs[0]), num_fwd_outputs)
        context.forward_outputs = num_fwd_outputs
        joint_graph = Graph(joint, "joint")
        self._note(joint, len(joint_inputs[0]), num_fwd_outputs)
        mark_tangents(joint_graph, len(joint_inputs[0]))
        refuse_sparse_gradients(joint_graph)
        warn_of_attention(joint_graph)
        with_torchs_budget(engine.pipeline, compat.budget_that_is_set()).run([joint_graph], context)
        absent = find_absent(joint_graph, context, engine.kept) if engine.backend.name != "xla" else None
        kind = self._kind(joint_graph)
        begin = time.perf_counter()
        with garbage_collected():
            forward, backward = self.partitioned(joint_graph, joint_inputs, num_fwd_outputs, options)
        graphs = [Graph(forward, "forward"), Graph(backward, "backward")]
        graphs[1].absent = absent
        save_as_they_were(graphs[0], num_fwd_outputs, compat.inputs_written_later(forward.graph))
        for graph in graphs:
            add_stage(graph, context, "partition", time.perf_counter() - begin)
        self._run_passes(graphs, kind)
        return forward, backward

    def partitioned(
        self, joint: Graph, inputs: Any, num_fwd_outputs: int, options: dict[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Divide a joint graph, which stays, but for tags and what nothing reads."""
        unify_sizes(joint)
        settle_gathers(joint, self.context)
        module, graph = joint.module, joint.fx_graph
        with (
            compat.activation_memory_budget(joint.activation_memory_budget),
            compat.draws_apart(graph, draws),
            compat.random_states_only_where(draws, draws_as_eager=self.engine.backend.name == "eager"),
            compat.quick_minimum_cuts(),
            compat.graphs_without_code(),
            compat.quick_copies(),
        ):
            forward, backward = compat.min_cut_rematerialization_partition(
                module, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
            )
            module.graph = graph  # the partitioner has given it a copy without common subexpressions
            return compat.writes_code_when_asked(forward), compat.writes_code_when_asked(backward)

    def compile_forward(self, forward: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        if not self.engine.whole:
            compat.let_backward_run_twice()
        # Compiles backward's regions too, so that ranks divide all regions at once.
        return self._first_program(forward, "forward", "backward")

    def compile_backward(self, backward: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        told = self.engine.schedules.failures_told("backward")  # where torch asks for it in the backward itself
        with told, collector_paused(), compat.without_dispatch_modes():
            program = self._program(backward, "backward")
            graph = self.context.graphs["backward"]
            program = self.engine.division.around(program, graph, self.context, self.captured)
            if self.engine.backend.name != "xla":
                tangents = [place for place, node in enumerate(graph.placeholders) if has_role(node, Role.TANGENT)]
                program = compat.taking_tangents(program, tangents)
        self._alive = None
        return program

    def compile_inference(self, inference: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        graph = Graph(self.prepare(inference), "inference")
        self._note(graph.module, len(graph.placeholders), len(graph.outputs))
        self._run_passes([graph], self._kind(graph))
        return self._first_program(graph.module, "inference")

    def _note(self, traced: fx.GraphModule, inputs: int, forward_outputs: int) -> None:
        if self.lookup is not None:
            self.lookup.traced(traced.graph, inputs, forward_outputs)

    def _run_passes(self, graphs: list[Graph], kind: str) -> None:
        take_unsharded(graphs, self.context)
        before_passes = self.engine.pieces.snapshot(graphs[0], self.entry)
        keep = functools.partial(self._keep, graphs, kind)
        self.engine.run_passes(graphs, self.context, self.captured, kind, keep)
        self._piece = before_passes, kind

    def _keep(self, graphs: list[Graph], kind: str) -> None:
        if self.lookup is not None:
            self._cuts = self.lookup.keep(graphs, kind, self.context)
            self.lookup = None  # with Dynamo's graph

    def _kind(self, graph: Graph) -> str:
        return plan_kind(graph, self.engine.spec, self.context.settings) + self.entry.suffix

    def _first_program(self, module: fx.GraphModule, phase: Phase, *later: Phase) -> Callable[[list[Any]], Any]:
        if not self.engine.whole:
            self.engine.regions.prepare([self.context.graphs[each] for each in (phase, *later)], self._cuts)
            self._cuts = {}
        program = self._program(module, phase)
        (before_passes, kind), self._piece = self._piece, (None, "")
        if before_passes is None:
            return program
        return self.engine.pieces.sharing(program, self.context.graphs[phase], before_passes, self.context, kind)

    def _program(self, module: fx.GraphModule, phase: Phase) -> Callable[[list[Any]], Any]:
        """Return the program of a graph after the passes."""
        graph = self.context.graphs[phase]
        graph.module = self._module(module, phase)
        return self.engine.program(graph, self.context, self.captured)

    def _module(self, given: fx.GraphModule, phase: Phase) -> fx.GraphModule:
        """Return the module of a graph after the passes: AOTAutograd's, which may be a copy by now."""
        return given


def with_outputs_apart(run: Callable[[list[Any]], Any], outputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Return ``run``, the program of a forward graph, so that no two of ``outputs`` are one tensor, but for integers:
    nested tensors have the same lengths where they have one tensor of offsets.

    Inductor returns one tensor for a value and what ``detach`` makes of it. AOTAutograd marks what needs no gradient as
    not differentiable, and so the other, too: of ``h.view(-1), h.detach()`` the view, whose base is ``h``, would have
    no gradient, without a word.
    """
    places = [place for place, value in enumerate(outputs) if isinstance(value, fx.Node)]
    if len(places) < 2:
        return run

    def run_apart(args: list[Any]) -> Any:
        values = list(run(args))
        seen: set[int] = set()
        for place in places:
            value = values[place]
            if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
                continue
            if id(value) in seen:
                values[place] = value = value.detach()
            seen.add(id(value))
        return values

    return run_apart


def through_aot_autograd(
    engine: Any, module: fx.GraphModule, inputs: list[Any], trace: Callable[..., AotTrace]
) -> Callable[..., Any]:
    """Compile a graph of an ``Engine``, or what a trace reads of one, whose equal layers are traced once. ``trace``:
    makes an ``AotTrace``, given ``prepare``."""
    groups = find_repeats(module.graph, engine.spec) if engine.repeat_traces else []
    for _ in range(_ATTEMPTS):
        if not groups:
            break
        repeats: Repeats | None = None
        try:
            repeats = Repeats(module, groups, engine.backend.prepare, engine.backend.decompositions())
            log.info("%d layers have %d traces", len(repeats.layers), len(repeats.traces))
            with repeats.registered():
                return trace(repeats.expand).run(repeats.contracted, inputs)
        except NotRepeatable as reason:
            layer = None if repeats is None or reason.layer is None else repeats.layers[reason.layer]
            log.info("%s has no trace of others: %s", "a layer" if layer is None else layer.segment.unit, reason)
            groups = [] if repeats is None else repeats.without(reason.layer)
    return trace(engine.backend.prepare).run(module, inputs)
