"""The pass manager: what a pass is, in which order passes run, and the record of every stage.

After each pass the verifier runs; a pass that breaks an invariant is reported by name. The pipeline checks the
passes' contracts (``requires``, ``provides``) when it is built, so that a wrong order is an error before any model
is traced.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import fx, nn

from graph_fsdp.passes.analysis.cost import Measurements
from graph_fsdp.passes.ir.agreed_order import Plan
from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.passes.ir.settings import Settings
from graph_fsdp.passes.ir.spec import BucketSpec, ModelSpec, ParameterSpec
from graph_fsdp.passes.ir.stage import Snapshot, Stage, readable
from graph_fsdp.passes.ir.stage_log import log_stage
from graph_fsdp.passes.transforms.share import Sharing
from graph_fsdp.passes.verify.error import VerificationError

if TYPE_CHECKING:
    from graph_fsdp.passes.analysis.cost import CostModel
    from graph_fsdp.passes.analysis.hardware import Hardware

PHASES: tuple[Phase, ...] = ("capture", "joint", "forward", "backward", "inference")
# What a graph of each phase is before any pass of that phase has run.
GIVEN: dict[Phase, frozenset[str]] = {
    "capture": frozenset({"captured"}),
    "joint": frozenset({"traced"}),
    "forward": frozenset({"traced", "annotated", "partitioned"}),
    "backward": frozenset({"traced", "annotated", "partitioned"}),
    "inference": frozenset({"traced"}),
}


class PipelineError(ValueError):
    """A pipeline whose contracts do not hold, or an edit of a pass that it does not have."""


class PassError(RuntimeError):
    """A pass raised. Says which, on which graph; the pass's own error is the cause."""

    def __init__(self, message: str, pass_name: str = "", phase: str = "") -> None:
        super().__init__(message)
        self.pass_name, self.phase = pass_name, phase


@dataclass
class PassContext:
    """What passes may know beyond the graph. One per capture.

    ``plan``: what the ranks have decided for graphs of this kind; passes keep to it, or decide and write it down.
    ``cost``: seconds of nodes and collectives; None where there is no description of the hardware.
    ``settings``: what the user has changed since the model was compiled.
    ``shard_inputs`` (capture phase): placeholder → parameter and the fake value of its padded shard.
    ``as_used`` (capture phase): placeholder → what makes of the gathered parameter the kind of tensor that the model
    uses, where that is no plain one.
    ``batch_inputs`` (capture phase): placeholders whose first dimension is the batch's, where XLA divides the graph.
    ``forward_outputs``: number of outputs of the forward graph that are the user's; saved tensors follow.
    ``tangents``: which placeholders of the joint graph are gradients of outputs.
    ``budget``: most bytes of gathered parameters at any point, which the schedule must keep to; None for no limit.
    ``kept``: bucket → forward's node of the buffer that stays gathered for backward.
    ``kept_shards``: bucket → forward's node of the shard that backward gathers over a smaller group.
    ``slots``: bytes of each slot that the graph's gathered buffers lie in, once they are assigned.
    ``extensions``: parameter → what makes it of its shard, where that is a tensor extension.
    ``reduced``: parameters whose gradients the joint graph reduces.
    ``absent``: the runtime's ``AbsentGradients``, where a loss may leave outputs out with parameters of their own.
    ``unsharded``: per phase, the parameters that are inputs of the graph, whole, behind its other inputs.
    ``sharing``: buckets that pieces of one forward call hand to each other; ``taken``, ``given``: those of this graph.
    ``recomputes_activations``: whether backward does, by the user's checkpoints or by an option.
    ``offloaded``: place among the saved tensors → forward's node of the copy on the CPU that backward receives.
    ``activation_memory_budget``: what the partitioner may save for backward, from 0, inputs only, to 1, all it wants.
    """

    model: ModelSpec
    reshard_after_forward: bool | Literal["auto"] | None = None
    plan: Plan = field(default_factory=Plan)
    cost: CostModel | None = None
    settings: Settings = field(default_factory=Settings)
    shard_inputs: dict[fx.Node, tuple[ParameterSpec, Any]] = field(default_factory=dict)
    as_used: dict[fx.Node, Callable[[Any], Any]] = field(default_factory=dict)
    batch_inputs: frozenset[fx.Node] = frozenset()
    forward_outputs: int = 0
    extensions: Mapping[str, nn.Module] = field(default_factory=dict)
    tangents: slice = field(default_factory=lambda: slice(0, 0))
    reduced: frozenset[str] = frozenset()
    absent: Any = None
    recomputes_activations: bool = False
    offloaded: dict[int, fx.Node] = field(default_factory=dict)
    activation_memory_budget: float = 1.0
    budget: int | None = None
    kept: dict[str, fx.Node] = field(default_factory=dict)
    kept_shards: dict[str, fx.Node] = field(default_factory=dict)
    slots: dict[Phase, tuple[int, ...]] = field(default_factory=dict)
    unsharded: dict[Phase, list[str]] = field(default_factory=dict)
    sharing: Sharing = field(default_factory=Sharing)
    taken: list[str] = field(default_factory=list)
    given: dict[str, fx.Node] = field(default_factory=dict)
    facts: dict[Phase, frozenset[str]] = field(default_factory=lambda: dict(GIVEN))
    collectives: dict[Phase, list[tuple[str, str]]] = field(default_factory=dict)
    stages: dict[Phase, dict[str, Stage]] = field(default_factory=lambda: {phase: {} for phase in PHASES})

    def bucket_of(self, parameter: str) -> BucketSpec:
        return self.model.bucket_of[parameter]


class PassesHaveRun(BaseException):  # Dynamo and AOTAutograd retell every Exception as one of their own
    """The end of a capture that is planned and not run: its graphs after all passes."""

    def __init__(self, graphs: list[Graph], context: PassContext) -> None:
        self.graphs, self.context = graphs, context


class GraphPass:
    """One rewrite or reordering with a single job.

    Subclasses set ``name``, the ``phases`` that they run in (or one ``phase``), the facts that they ``requires`` and
    ``provides`` of the graph, and implement ``run``, which edits the graph and may return one line on what it changed.
    """

    name: str = ""
    phase: str | None = None
    phases: Collection[str] = ("forward", "backward", "inference")
    requires: Collection[str] = ()
    provides: Collection[str] = ()

    def run(self, graph: Graph, context: PassContext) -> str | None:
        raise TypeError(f"{type(self).__name__} is a GraphPass without run(graph, context)")

    def runs_in(self) -> tuple[str, ...]:
        """The phases, as ``phase`` or ``phases`` say: what the object sets, or else its class, or else a base of it.

        Raises:
            PipelineError: both are set in one place, and differ.
        """
        places = (vars(self), *map(vars, type(self).__mro__))
        place = next(p for p in places if p.get("phase") is not None or p.get("phases") is not None)
        phase, phases = place.get("phase"), place.get("phases")
        if phase is None:
            return _names(self, "phases", phases)
        if not isinstance(phase, str):
            known = ", ".join(PHASES)
            raise PipelineError(f"{self!r}: phase must be one of {known}, got {phase!r}; set phases to name several")
        if phases is not None and set(_names(self, "phases", phases)) != {phase}:
            raise PipelineError(f"{self!r} sets phase to {phase!r} and phases to {phases!r}; set one of them")
        return (phase,)

    def arrange(self, model: ModelSpec, cost: CostModel | None) -> ModelSpec:
        """Before anything is traced: the model with other buckets, in which the shards then lie in storage."""
        return model

    def settings(self) -> str:
        """The pass with its options, as ranks compare them: attributes that are plain values."""
        options = {key: value for key, value in sorted(vars(self).items()) if _is_plain(value)}
        arguments = "".join(f", {key}={value!r}" for key, value in options.items())
        return f"{type(self).__qualname__}({self.name!r}{arguments})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _names(p: GraphPass, attribute: str, value: object) -> tuple[str, ...]:
    """A pass's collection of strings. One string is a collection of letters, and never what was meant."""
    if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(v, str) for v in value):
        hint = f"; write ({value!r},)" if isinstance(value, str) else ""
        raise PipelineError(f"{p!r}: {attribute} must be a set, tuple or list of strings, got {value!r}{hint}")
    return tuple(value)


def _check_buckets(p: GraphPass, model: object) -> None:
    if not isinstance(model, ModelSpec):
        raise PipelineError(f"{p!r}: arrange must return a ModelSpec, got {model!r}")
    seen: set[str] = set()
    for bucket in model.buckets:
        for parameter in bucket.parameters:
            if parameter.name in seen:
                raise PipelineError(f"{p!r}: arrange put {parameter.name} into bucket {bucket.name!r} and another")
            seen.add(parameter.name)
        if len({(parameter.dtype, parameter.param_dtype) for parameter in bucket.parameters}) != 1:
            raise PipelineError(
                f"{p!r}: arrange made bucket {bucket.name!r} of parameters of several dtypes, or of none"
            )
    missing = [q.name for q in model.parameters.values() if not q.replicated and not q.empty and q.name not in seen]
    if missing:
        raise PipelineError(f"{p!r}: arrange left {', '.join(missing)} in no bucket")


class Profiled(Protocol):
    """What holds measurements: a :class:`graph_fsdp.Profile`."""

    @property
    def measurements(self) -> Measurements: ...


def _measurements(measured: Any) -> Measurements | None:
    found = getattr(measured, "measurements", measured)
    if found is not None and not isinstance(found, Measurements):
        raise TypeError(
            f"measured must be what graph_fsdp.profile returned (graph_fsdp.Profile.load reads a saved one), its "
            f"measurements, or None, got {measured!r}"
        )
    return found


class PassPipeline:
    """An ordered list of passes. Edits return a new pipeline and are checked at once."""

    def __init__(
        self,
        passes: Sequence[GraphPass],
        *,
        hardware: str | Hardware | None = None,
        measured: Measurements | Profiled | None = None,
    ) -> None:
        """``hardware``: what the cost model computes with: a name or a description; None finds the device's.
        ``measured``: times of a running program (:func:`graph_fsdp.profile`), which the cost model prefers."""
        self.passes = tuple(passes)
        self.hardware, self.measured = hardware, _measurements(measured)
        self._check()

    def __iter__(self) -> Iterator[GraphPass]:
        return iter(self.passes)

    def __repr__(self) -> str:
        return f"PassPipeline({', '.join(p.name for p in self.passes)})"

    def replace(self, name: str, new: GraphPass) -> PassPipeline:
        index = self._index(name)
        return self._with([*self.passes[:index], new, *self.passes[index + 1 :]])

    def insert_before(self, name: str, new: GraphPass) -> PassPipeline:
        index = self._index(name)
        return self._with([*self.passes[:index], new, *self.passes[index:]])

    def insert_after(self, name: str, new: GraphPass) -> PassPipeline:
        index = self._index(name) + 1
        return self._with([*self.passes[:index], new, *self.passes[index:]])

    def remove(self, name: str) -> PassPipeline:
        index = self._index(name)
        return self._with([*self.passes[:index], *self.passes[index + 1 :]])

    def arrange(self, model: ModelSpec, cost: CostModel | None) -> ModelSpec:
        """The model with the buckets that the passes want.

        Raises:
            PipelineError: a pass returned buckets that cannot be.
        """
        for p in self.passes:
            model = p.arrange(model, cost)
            _check_buckets(p, model)
        return model

    def _with(self, passes: Sequence[GraphPass]) -> PassPipeline:
        return PassPipeline(passes, hardware=self.hardware, measured=self.measured)

    def _index(self, name: str) -> int:
        names = [p.name for p in self.passes]
        if name not in names:
            raise PipelineError(f"the pipeline has no pass {name!r}; its passes are {', '.join(names)}")
        return names.index(name)

    def _check(self) -> None:
        seen: set[str] = set()
        for p in self.passes:
            if not isinstance(p, GraphPass):
                raise PipelineError(f"passes must be GraphPass objects, got {p!r}")
            if not p.name or p.name in seen:
                raise PipelineError(f"{p!r}: each pass needs a name of its own in the pipeline")
            unknown = set(p.runs_in()) - set(PHASES)
            if unknown:
                raise PipelineError(f"{p!r}: unknown phases {sorted(unknown)}; known are {', '.join(PHASES)}")
            seen.add(p.name)
        for phase in PHASES:
            facts = set(GIVEN[phase])
            for p in self.passes:
                required, provided = _names(p, "requires", p.requires), _names(p, "provides", p.provides)
                if phase not in p.runs_in():
                    continue
                missing = set(required) - facts
                if missing:
                    raise PipelineError(
                        f"pass {p.name!r} requires {sorted(missing)} of the {phase} graph, and no pass before it "
                        f"provides that; order: {', '.join(q.name for q in self.passes)}"
                    )
                facts |= set(provided)
            for fact in ("bucketed", "freed") if phase in ("forward", "backward", "inference") else ():
                if fact not in facts:
                    raise PipelineError(f"no pass makes the {phase} graph {fact!r}; the executor needs it")

    def run(self, graphs: Sequence[Graph], context: PassContext) -> None:
        """Run each pass over the graphs of its phases, in the order given (forward before backward).

        The code of the graph modules is that of their graphs again when all passes have run, not in between: writing
        it costs more than a pass. A pass that wants to run a graph calls ``graph.module.recompile()`` first.
        """
        with collector_paused():
            self._run(graphs, context)
            for graph in graphs:
                graph.module.recompile()

    def _run(self, graphs: Sequence[Graph], context: PassContext) -> None:
        from graph_fsdp.passes.verify.verify import Verifier

        for graph in graphs:
            graph.cost = context.cost
        verifiers = {graph.phase: Verifier(graph, context) for graph in graphs}
        for p in self.passes:
            for graph in graphs:
                if graph.phase not in p.runs_in():
                    continue
                begin = time.perf_counter()
                try:
                    summary = p.run(graph, context)
                except ValueError:  # it says itself what the user has to change (a budget)
                    raise
                except Exception as error:
                    add_failed_stage(graph, context, p.name, repr(error))
                    said = f"pass {p.name!r} failed on the {graph.phase} graph: {error!r}"
                    raise PassError(said, p.name, graph.phase) from error
                seconds = time.perf_counter() - begin
                context.facts[graph.phase] |= frozenset(p.provides)
                begin = time.perf_counter()
                try:
                    verifiers[graph.phase].check(p.name)
                except VerificationError as error:
                    add_failed_stage(graph, context, p.name, str(error))
                    raise
                verify_seconds = time.perf_counter() - begin
                add_stage(graph, context, p.name, seconds, summary, verify_seconds)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, enum.Enum))


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection for this time. Almost all that is allocated for graphs stays, and each full collection
    would walk all graphs of the model: several times over, and longer the deeper the model is.

    What was allocated is old afterwards, without a walk, which the next collection of the young would be."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() == 0:  # else the user has frozen something, which is to stay so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def add_stage(
    graph: Graph,
    context: PassContext,
    name: str,
    seconds: float,
    summary: str | None = None,
    verify_seconds: float = 0.0,
) -> None:
    begin = time.perf_counter()
    snapshot = Snapshot(graph.fx_graph)
    stage = Stage(
        name, graph.phase, snapshot, graph.module, seconds, summary, verify_seconds, time.perf_counter() - begin
    )
    context.stages[graph.phase][name] = stage
    log_stage(stage)


def add_failed_stage(graph: Graph, context: PassContext, name: str, reason: str) -> None:
    """The graph as a pass left it that failed, or that the verifier found fault with; named after the pass."""
    try:
        text = readable(graph.fx_graph)
    except Exception as error:  # a broken graph may be one that cannot be printed; the first error is to be raised
        text = f"# this graph cannot be printed: {error!r}\n"
    title = f"{name} (failed)"
    stage = Stage(title, graph.phase, Snapshot(graph.fx_graph), graph.module, 0.0, reason, text=text)
    context.stages[graph.phase][title] = stage
    log_stage(stage)
