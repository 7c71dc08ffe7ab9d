"""The pass manager runs passes in order, verifies the graph after each, and records every stage.

The passes' contracts (``requires``, ``provides``) are checked when a pipeline is built, before any model is traced.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from graph_fsdp.passes.analysis.cost import CostModel, Measurements
from graph_fsdp.passes.analysis.hardware import Hardware
from graph_fsdp.passes.context import GraphPass, PassContext, PassError, PipelineError, VerificationError, strings_of
from graph_fsdp.passes.ir.graph import GIVEN, PHASES, Graph
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.passes.ir.stage import Snapshot, Stage, readable
from graph_fsdp.passes.verify.verify import Verifier


class PassesHaveRun(BaseException):  # Dynamo and AOTAutograd retell every Exception as one of their own
    """Ends a capture that is planned and not run, with its graphs after all passes."""

    def __init__(self, graphs: list[Graph], context: PassContext) -> None:
        self.graphs, self.context = graphs, context


def _check_buckets(p: GraphPass, model: object) -> None:
    if not isinstance(model, ModelSpec):
        raise PipelineError(f"{p}: arrange must return a ModelSpec, got {model!r}")
    counts = Counter(parameter.name for bucket in model.buckets for parameter in bucket.parameters)
    for name, count in counts.items():
        if count > 1:
            raise PipelineError(f"{p}: arrange put {name} into bucket {model.bucket_of[name].name!r} and another")
    for bucket in model.buckets:
        for q in bucket.parameters:
            if model.parameters.get(q.name) != q or q.replicated or q.empty:
                found = f"{q.name} in bucket {bucket.name!r}"
                raise PipelineError(f"{p}: arrange put {found}, and that is no sharded parameter of the model")
        if len({parameter.kind for parameter in bucket.parameters}) != 1:
            of = "of parameters of several dtypes or meshes, or of none"
            raise PipelineError(f"{p}: arrange made bucket {bucket.name!r} {of}")
    missing = [q.name for q in model.parameters.values() if not q.replicated and not q.empty and q.name not in counts]
    if missing:
        raise PipelineError(f"{p}: arrange left {', '.join(missing)} in no bucket")


def _note(error: Exception, note: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)


class Profiled(Protocol):
    """Holds measurements, as a :class:`graph_fsdp.Profile` does."""

    @property
    def measurements(self) -> Measurements: ...


frozen = False  # whether objects were found frozen


def something_is_frozen() -> bool:
    """Return whether the user has frozen objects, which is taken to stay so: counting them walks all, a tenth of a
    second for those of an import of torch."""
    global frozen
    frozen = frozen or gc.get_freeze_count() > 0
    return frozen


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: almost all that is allocated for graphs stays, and each full collection would walk
    all of it. What was allocated counts as old afterwards, so that the next young collection does not walk it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not something_is_frozen():  # by the user, which is to stay so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def garbage_collected() -> Iterator[None]:
    """Collect in the end what was made in between and is no longer held, without a walk over what was there before.

    A graph refers to its nodes and they to it, so that only the collector frees one; where it is paused, graphs on the
    way to others would stay, each as large as the model's."""
    if something_is_frozen():  # by the user, which is to stay so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


class PassPipeline:
    """A pipeline is an ordered list of passes. Edits return a new pipeline and are checked at once (PipelineError)."""

    def __init__(
        self,
        passes: Sequence[GraphPass],
        *,
        hardware: str | Hardware | None = None,
        measured: Measurements | Profiled | None = None,
    ) -> None:
        """Take the passes, and for the cost model ``hardware``, a name or a description (None finds the device's), and
        ``measured``, times of a running program (:func:`graph_fsdp.profile`), which it prefers."""
        if isinstance(passes, (str, GraphPass)) or not isinstance(passes, Iterable):
            raise PipelineError(f"passes must be a list of GraphPass objects, got {passes!r}")
        self.passes, self.hardware = tuple(passes), hardware
        found: Any = Measurements() if measured is None else getattr(measured, "measurements", measured)
        if not isinstance(found, Measurements):
            raise TypeError(
                f"measured must be what graph_fsdp.profile returned (graph_fsdp.Profile.load reads a saved one), its "
                f"measurements, or None, got {measured!r}"
            )
        self.measured = found
        self._check()

    def __iter__(self) -> Iterator[GraphPass]:
        return iter(self.passes)

    def __repr__(self) -> str:
        return f"PassPipeline({', '.join(p.name for p in self.passes)})"

    def replace(self, name: str, new: GraphPass) -> PassPipeline:
        return self._edited(name, 0, 1, new)

    def insert_before(self, name: str, new: GraphPass) -> PassPipeline:
        return self._edited(name, 0, 0, new)

    def insert_after(self, name: str, new: GraphPass) -> PassPipeline:
        return self._edited(name, 1, 1, new)

    def remove(self, name: str) -> PassPipeline:
        return self._edited(name, 0, 1)

    def _edited(self, name: str, begin: int, end: int, *new: GraphPass) -> PassPipeline:
        """Return the pipeline with ``new`` in place of passes ``begin`` to ``end``, counted from the named one."""
        names = [p.name for p in self.passes]
        if name not in names:
            raise PipelineError(f"the pipeline has no pass {name!r}; its passes are {', '.join(names)}")
        index, passes = names.index(name), list(self.passes)
        passes[index + begin : index + end] = new
        return PassPipeline(passes, hardware=self.hardware, measured=self.measured)

    def arrange(self, model: ModelSpec, cost: CostModel | None) -> ModelSpec:
        """Return the model with the buckets that the passes want.

        Raises:
            PipelineError: a pass returned buckets that cannot be.
            PassError: a pass raised; a ValueError goes to the user as it is, with a note that names the pass.
        """
        for p in self.passes:
            try:
                model = p.arrange(model, cost)
            except ValueError as error:
                _note(error, f"raised by pass {p.name!r} when it arranged the buckets")
                raise
            except Exception as error:
                raise PassError(f"pass {p.name!r} failed to arrange the buckets: {error!r}", p.name) from error
            _check_buckets(p, model)
        return model

    def _check(self) -> None:
        facts = {phase: set(given) for phase, given in GIVEN.items()}
        names: list[str] = []
        for p in self.passes:
            if not isinstance(p, GraphPass):
                raise PipelineError(f"passes must be GraphPass objects, got {p!r}")
            if not isinstance(p.name, str) or not p.name or p.name in names:
                raise PipelineError(f"{p}: each pass needs a name of its own in the pipeline")
            names.append(p.name)
            phases = p.runs_in()
            if not phases or (unknown := set(phases) - set(PHASES)):
                said = f"unknown phases {sorted(unknown)}" if phases else "it has no phase, and would never run"
                raise PipelineError(f"{p}: {said}; known are {', '.join(PHASES)}")
            required, provided = strings_of(p, "requires", p.requires), strings_of(p, "provides", p.provides)
            for phase in (phase for phase in PHASES if phase in phases):
                if missing := set(required) - facts[phase]:
                    raise PipelineError(
                        f"pass {p.name!r} requires {sorted(missing)} of the {phase} graph, and no pass before it "
                        f"provides that; order: {', '.join(q.name for q in self.passes)}"
                    )
                facts[phase] |= set(provided)
        for phase, fact in [("capture", "gathered"), *itertools.product(PHASES[2:], ("bucketed", "freed"))]:
            if fact not in facts[phase]:
                raise PipelineError(f"no pass makes the {phase} graph {fact!r}; the executor needs it")

    @collector_paused()
    def run(self, graphs: Sequence[Graph], context: PassContext) -> None:
        """Run each pass over the graphs of its phases, in the order given (forward before backward).

        The code of graph modules is written once, when all passes have run. A pass that wants to run a graph calls
        ``graph.module.recompile()`` first.
        """
        for graph in graphs:
            graph.cost = context.cost
            context.graphs[graph.phase] = graph
        verifiers = {graph.phase: Verifier(graph, context, snapshot=_latest(graph, context)) for graph in graphs}
        for p in self.passes:
            for graph in graphs:
                if graph.phase not in p.runs_in():
                    continue
                begin = time.perf_counter()
                try:
                    summary = p.run(graph, context)
                    if not isinstance(summary, str | None):
                        raise TypeError(f"run must return a line on what it changed, or None, got {summary!r}")
                except ValueError as error:  # it says itself what the user has to change (a budget)
                    _note(error, f"raised by pass {p.name!r} on the {graph.phase} graph")
                    raise
                except Exception as error:
                    add_failed_stage(graph, context, p.name, repr(error))
                    said = f"pass {p.name!r} failed on the {graph.phase} graph: {error!r}"
                    raise PassError(said, p.name, graph.phase) from error
                seconds = time.perf_counter() - begin
                graph.facts |= frozenset(p.provides)
                stage = _stage(graph, context, p.name, seconds, summary)
                begin = time.perf_counter()
                try:
                    verifiers[graph.phase].check(p.name, stage.snapshot)
                except VerificationError as error:
                    add_failed_stage(graph, context, p.name, str(error))
                    raise
                stage.verify_seconds = time.perf_counter() - begin
                _add(stage, graph, context)
        for graph in graphs:
            graph.module.recompile()


def add_stage(
    graph: Graph, context: PassContext, name: str, seconds: float, summary: str | None = None, text: str | None = None
) -> Stage:
    return _add(_stage(graph, context, name, seconds, summary, text), graph, context)


def _stage(
    graph: Graph, context: PassContext, name: str, seconds: float, summary: str | None, text: str | None = None
) -> Stage:
    begin = time.perf_counter()
    snapshot = Snapshot(graph.fx_graph, _latest(graph, context))
    taken = time.perf_counter() - begin
    return Stage(name, graph.phase, snapshot, graph.module, seconds, summary, snapshot_seconds=taken, text=text)


def _latest(graph: Graph, context: PassContext) -> Snapshot | None:
    stages = context.stages[graph.phase]
    return stages[next(reversed(stages))].snapshot if stages else None


def _add(stage: Stage, graph: Graph, context: PassContext) -> Stage:
    context.stages[graph.phase][stage.name] = stage
    stage.log()
    return stage


def add_failed_stage(graph: Graph, context: PassContext, name: str, reason: str) -> None:
    """Record the graph that a pass left when it failed, or broke an invariant, as a stage named after the pass."""
    try:
        text = readable(graph.fx_graph)
    except Exception as error:  # a broken graph may be one that cannot be printed; the first error is to be raised
        text = f"# this graph cannot be printed: {error!r}\n"
    add_stage(graph, context, f"{name} (failed)", 0.0, reason, text=text)
