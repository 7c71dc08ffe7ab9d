"""``graph_fsdp.inspect`` shows what the passes made of a model, to read, to compare and to run."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import RenderableType
from torch import nn

from graph_fsdp import compat
from graph_fsdp.engine.recompilation import FIRST_CALL, Cause
from graph_fsdp.passes.analysis.kernels import packet
from graph_fsdp.passes.analysis.memory import MemoryProfile
from graph_fsdp.passes.analysis.optimizers import Stepping
from graph_fsdp.passes.analysis.simulate import Conditions, Timeline, seconds_beside, simulate
from graph_fsdp.passes.context import PassError, VerificationError
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import PHASES, Graph, Phase
from graph_fsdp.passes.ir.layout import copies, quantized_sends
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.passes.ir.stage import Stage
from graph_fsdp.passes.transforms.slots import SlotTable, slot_table
from graph_fsdp.report import text as report_text
from graph_fsdp.report.data import BucketRow, bucket_rows, graph_data, report_data, stage_diff
from graph_fsdp.report.file import SavedReport, write_text
from graph_fsdp.report.provenance import ParameterLife, lives, not_there, uses
from graph_fsdp.report.step import PredictedStep, predicted_step
from graph_fsdp.report.trace_events import ScheduledGraph, predicted_trace
from graph_fsdp.runtime import Program, WholeProgram
from graph_fsdp.runtime.cuda.cuda_graphs import ProgramGraphs

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


class GraphView(report_text.Printed):
    """Shows one graph of a capture: its stages by pass name, its buckets and their slots, the program that runs it, and
    the bytes that it is predicted to hold."""

    def __init__(self, phase: Phase, stages: dict[str, Stage]) -> None:
        self.phase = phase
        self.stages = stages
        self.graph: Graph | None = None  # after all passes
        self.program: str | None = None
        self.whole = False  # compiled in one piece: buffers are the compiler's, and nothing predicts their bytes
        self.predict_memory: Callable[[], MemoryProfile] | None = None
        self._memory: MemoryProfile | None = None
        self.conditions: Conditions | None = None  # under which the timeline is predicted
        self._timeline: Timeline | None = None
        self.cuda_graphs: ProgramGraphs | None = None  # which regions are, and what became of the runs
        self.hlo_of: Callable[[], Any] | None = None  # where XLA runs it
        self.xla_compilations: Sequence[Any] = ()  # of it by XLA, each with its cause and seconds

    @property
    def memory(self) -> MemoryProfile | None:
        """Predict the bytes that are live at each node, when somebody asks; None for what is compiled in one piece."""
        if self._memory is None and self.predict_memory is not None:
            self._memory = self.predict_memory()
        return self._memory

    @property
    def nodes(self) -> int:
        """Count the nodes; 0 for a graph that others were made of."""
        return len(self.graph.fx_graph.nodes) if self.graph is not None else 0

    @property
    def buckets(self) -> list[BucketRow]:
        return bucket_rows(self.graph, self.timeline) if self.graph is not None else []

    @property
    def slots(self) -> SlotTable:
        return SlotTable() if self.graph is None or self.whole else slot_table(self.graph)

    @property
    def copied_nbytes(self) -> int:
        """Return the bytes that packing and unpacking for its collectives reads and writes in a run."""
        return sum(copies(self.graph)) if self.graph is not None else 0

    @property
    def timeline(self) -> Timeline | None:
        """Predict when the graph's collectives run and what is exposed of them; None without a cost model."""
        if self._timeline is None and self.graph is not None and self.graph.cost is not None:
            self._timeline = simulate(self.graph, self.graph.cost, self.conditions)
        return self._timeline

    def scheduled(self) -> ScheduledGraph:
        """Return the graph with what is predicted of it. Raises LookupError without a cost model."""
        if self.graph is None or self.graph.cost is None or self.timeline is None:
            raise LookupError(f"the {self.phase} graph has no cost model that could say when its nodes run")
        return ScheduledGraph(self.graph, self.graph.cost, self.timeline, self.memory, self.whole)

    @property
    def lowered(self) -> str | None:
        """Return as Python the graph that a compiler got whole (``regions="whole"``, ``backend="xla"``), else None."""
        return self.program if self.whole else None

    def hlo(self) -> Any:
        """Compile once more for the text of XLA's optimized program: an ``OptimizedHlo`` of
        ``graph_fsdp.runtime.xla.program``, whose ``table()`` has its collectives beside the schedule's.

        Raises:
            LookupError: XLA does not run the graph.
        """
        if self.hlo_of is None:
            raise LookupError(
                f"the {self.phase} graph is not run by XLA; hlo() is of models compiled with backend='xla'"
            )
        return self.hlo_of()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a graph of a report cannot be pickled or copied: it is the model's; pickle the report, which becomes what "
            "graph_fsdp.load_report returns, or save it with report.save('report.json')"
        )

    def parts(self) -> Iterable[RenderableType]:
        return report_text.graph_parts(graph_data(self))

    def lines(self) -> list[str]:
        """Return what is printed below its buckets."""
        found: list[Any] = [self.slots] if self.slots else []
        if self.whole:
            found.append("compiled whole: the compiler allocates the buffers")
            if self.xla_compilations:
                causes = "; ".join(map(str, self.xla_compilations))
                found.append(f"compiled by XLA {len(self.xla_compilations)}x: {causes}")
        elif self.buckets:
            found.append(f"copied by packing and unpacking: {self.copied_nbytes:,} bytes")
            sent, plain = quantized_sends(self.graph) if self.graph is not None else (0, 0)
            found += [f"gradients sent quantized: {sent:,} bytes instead of {plain:,}"] if sent else []
        found += [known for known in (self.memory, self.cuda_graphs) if known is not None]
        found += [line for line in (self.model_collectives(),) if line]
        return [line for part in [*found, self.predicted()] for line in str(part).splitlines()]

    def model_collectives(self) -> str:
        """Summarise the model's own collectives (of tensor and expert parallelism) in one line; "" without any."""
        events = self.timeline.events if self.timeline is not None else []
        own = [event for event in events if dialect.is_model_collective(event.node)]
        if not own:
            return ""
        counts = Counter(packet(event.node).__name__ for event in own)
        taken, exposed = sum(e.end - e.begin for e in own), sum(e.exposed for e in own)
        beside = seconds_beside(own, [event for event in events if event.node.target in dialect.STARTS])
        kinds, ms = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())), report_text.milliseconds
        return (
            f"collectives of the model: {kinds}; {ms(taken)} ms, of it exposed {ms(exposed)}, beside gathers and "
            f"reductions {ms(beside)}"
        )

    def predicted(self) -> str:
        """Summarise the timeline in one line."""
        if self.timeline is None:
            return "predicted: no cost model"
        found, ms = self.scheduled().cost.hardware.name, report_text.milliseconds
        return (
            f"predicted on {found}: {ms(self.timeline.seconds)} ms, compute {ms(self.timeline.compute)}, "
            f"communication {ms(self.timeline.communication)}, of it exposed {ms(self.timeline.exposed)}"
        )

    def diff(self, stage: str) -> str:
        """Return a unified diff of a stage's code against the stage before it."""
        return stage_diff(self.phase, list(self.stages), stage, lambda name: self.stages[name].body)

    def table(self) -> str:
        """Return the buckets as plain lines."""
        return report_text.bucket_lines(graph_data(self)["buckets"])


@dataclass
class CapturedGraph:
    """Holds one captured graph, and the ``cause`` of its capture: recompilations are captures of their own."""

    index: int
    spec: ModelSpec
    cause: Cause = FIRST_CALL
    stages: dict[Phase, dict[str, Stage]] = field(default_factory=lambda: {phase: {} for phase in PHASES})
    remake: Any = None  # what makes the stages of a program that was found (``engine/kept.py``); None: they are here

    def __post_init__(self) -> None:
        self.views = {phase: GraphView(phase, self.stages[phase]) for phase in PHASES}

    def add_program(
        self, graph: Graph, program: Program | WholeProgram, predict_memory: Callable[[], MemoryProfile]
    ) -> None:
        view = self.views[graph.phase]
        view.graph, view.program, view.hlo_of = graph, program.source, getattr(program, "hlo", None)
        view.xla_compilations = getattr(program, "compilations", ())  # a list that grows
        if isinstance(program, WholeProgram):
            view.whole = True
        else:
            view.predict_memory, view.cuda_graphs = predict_memory, program.graphs

    @property
    def ran(self) -> list[GraphView]:
        """Return views of the graphs that came out of the passes; none where a pass failed."""
        return [view for view in self.views.values() if view.graph is not None]

    def all_views(self) -> list[GraphView]:
        """Return views of all its graphs, also of those that others were made of."""
        return [view for view in self.views.values() if view.stages or view.graph is not None]


class _Latest:
    """Makes the latest captured graph of a phase an attribute of a report."""

    def __init__(self, phase: Phase) -> None:
        self.phase: Phase = phase

    def __get__(self, report: GraphReport, owner: type | None = None) -> GraphView:
        return report.latest(self.phase)


class GraphReport(report_text.Printed):
    """Reports on a compiled model, as ``inspect`` returns it. ``graphs`` are all captures, in order. ``capture`` is
    Dynamo's graph, with shards for parameters, ``joint`` forward and backward before they are partitioned; these,
    ``forward``, ``backward`` and ``inference`` are the latest of their kind. With ``whole``, graphs are compiled in one
    piece (``regions="whole"``), and ``peak_gathered_bytes`` is None, as nothing counts them. ``kept_nbytes`` counts
    gradients on this rank that wait for a backward that reduces them. Pickled (``torch.save``, another process) or
    deep-copied, a report is what :func:`graph_fsdp.load_report` returns."""

    capture, joint = _Latest("capture"), _Latest("joint")
    forward, backward, inference = _Latest("forward"), _Latest("backward"), _Latest("inference")

    def __init__(self, engine: Any, graphs: Sequence[CapturedGraph]) -> None:
        self.graphs = self.captures = list(graphs)  # by either name
        self.spec: ModelSpec = engine.spec
        self.whole: bool = engine.whole
        self.peak_gathered_bytes: int | None = None if engine.whole else engine.counter.peak
        self.kept_nbytes: int = engine.kept.nbytes
        self.collectives: dict[str, int] = dict(engine.counter.collectives)
        self.regions: int = engine.regions.regions
        self.compiled_regions: int = engine.regions.compiled
        self.stepping: dict[str, Stepping] = dict(engine.updates.stepping)  # parameter → what steps it
        self.ahead: frozenset[str] = engine.updates.ahead  # units that an optimizer's step gathers

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and deep-copy a report without the model's graphs, as a ``SavedReport``."""
        ran = any(captured.ran for captured in self.graphs)
        return SavedReport, (report_data(self, stages=True, drawn=self._latest_run() if ran else ()),)

    def __copy__(self) -> GraphReport:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def latest(self, phase: Phase) -> GraphView:
        """Return the latest captured graph of a phase. Raises LookupError where there is none."""
        for captured in reversed(self.graphs):
            if captured.stages[phase]:
                return captured.views[phase]
        raise LookupError(f"no {phase} graph was captured yet; run the model once, then inspect it")

    def step_predicted(self) -> PredictedStep | None:
        """Predict a whole step of the latest forward and backward graph and of the optimizers that were given to
        ``distribute_optimizer``; None before there are both, and without a cost model."""
        for captured in reversed(self.graphs if self.stepping else []):
            timed = {view.phase: view.scheduled() for view in captured.ran if view.timeline is not None}
            if {"forward", "backward"} <= timed.keys():
                graphs = [timed["forward"], timed["backward"]]
                return predicted_step(graphs, self.spec, self.stepping, self.ahead)
        return None

    def find(self, parameter: str) -> ParameterLife:
        """Follow one parameter, by its name in ``named_parameters()``: where in the latest graphs its shard goes in, is
        gathered, is used (with the line of the model), is freed, and how its gradient leaves. Of a model that breaks
        into pieces these are the graphs that use it.

        Raises:
            KeyError: the model has no sharded parameter of this name; says which names are like it.
        """
        if parameter not in self.spec.parameters:
            raise KeyError(not_there(parameter, self.spec.parameters))
        graphs = [found for phase in PHASES for found in self._graphs_of(parameter, phase)]
        return lives(self.spec, graphs, only=parameter)[parameter]

    def _graphs_of(self, parameter: str, phase: Phase) -> list[tuple[int, Graph]]:
        """Return the latest graph of a phase, or the latest of each piece that uses a parameter, with their numbers."""
        ran = [c for c in self.graphs if c.views[phase].graph is not None]
        if any(captured.cause.kind == "piece" for captured in self.graphs):
            ran = [c for c in ran if uses(c.views[phase].graph, parameter)] or ran
            alike = [c for c in ran if c.cause.key == ran[-1].cause.key]
            # Pieces are other code, which Dynamo numbers: "1/0" is captured again as "1/1".
            latest = {str(c.cause.compilation).partition("/")[0]: c for c in alike}
            ran = sorted(latest.values(), key=lambda captured: captured.index)
        else:
            ran = ran[-1:]
        return [(c.index, graph) for c in ran if (graph := c.views[phase].graph) is not None]

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write the predicted schedule of the latest forward and backward graph (or, of a model that has only run
        without gradients, inference graph) as a trace that Perfetto and chrome://tracing open: a lane for compute, one
        for each process group and each direction of copies, and the bytes held, by category.

        Raises:
            LookupError: no graph was captured yet.
            OSError: the file cannot be written.
        """
        scheduled = [view.scheduled() for view in self._latest_run()]
        cost = scheduled[0].cost
        title = f"predicted on {cost.hardware.name}, one of {self.spec.mesh.ranks} ranks"
        step = self.step_predicted() if scheduled[-1].graph.phase == "backward" else None
        others = step.slices() if step is not None else ()
        write_text(path, json.dumps(predicted_trace(scheduled, self.spec, title, others)))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report to a file, by its suffix.

        ``.html``: a page that needs no network: the predicted schedule of the latest forward and backward graph (or, of
        a model that has only run without gradients, inference graph) with the memory held and what holds most of it,
        the buckets, every graph after each pass and what each changed, search by parameter.
        ``.json``: the same as data, which :func:`graph_fsdp.load_report` and ``graph-fsdp report FILE`` read.

        Raises:
            ValueError: the suffix is neither.
            LookupError: no graph was captured yet.
            OSError: the file cannot be written.
        """
        SavedReport(report_data(self, stages=True, drawn=self._latest_run())).save(path)

    def _latest_run(self) -> list[GraphView]:
        """Return the graphs of the latest capture that has some which run."""
        found = next((captured.ran for captured in reversed(self.graphs) if captured.ran), None)
        if found is None:
            raise LookupError("no graph was captured yet; run the model once, then inspect it")
        return found

    def diff(self, stage: str) -> str:
        """Return unified diffs of what a pass changed, over the latest graphs that it ran on."""
        latest = {phase: c.views[phase] for c in self.graphs for phase in PHASES if stage in c.stages[phase]}
        if not latest:
            names = dict.fromkeys(name for c in self.graphs for phase in PHASES for name in c.stages[phase])
            raise KeyError(f"no graph has a stage {stage!r}; there are {', '.join(names) or 'none'}")
        return "\n".join(f"# {phase} graph\n{latest[phase].diff(stage)}" for phase in PHASES if phase in latest)

    def parts(self) -> Iterable[RenderableType]:
        return report_text.report_parts(report_data(self, stages=False))


def inspect(model: nn.Module) -> GraphReport:
    """Report on a compiled model: every graph captured so far, after every pass.

    Raises:
        TypeError: ``model`` was not compiled by graph_fsdp.
    """
    engine = engine_of(model)
    return GraphReport(engine, engine.graphs)


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a compiled model. Raises TypeError on another."""
    engine: Engine | None = model.__dict__.get("_graph_fsdp") if isinstance(model, nn.Module) else None
    if engine is None:
        raise TypeError(f"model: {type(model).__name__} was not compiled by graph_fsdp; call graph_fsdp.compile first")
    return engine


@contextlib.contextmanager
def failures_saved(engine: Any) -> Iterator[None]:
    """Where a pass fails in the block, save the capture, with the graph after each pass and as the failed pass left it,
    and say so in the error's message. The file is the user's alone: in torch's debug directory
    (``TORCH_COMPILE_DEBUG=1``) or a temporary one."""
    try:
        yield
    except (VerificationError, PassError) as error:
        saved = SavedReport(report_data(GraphReport(engine, engine.graphs[-1:]), stages=True, error=error))
        error.args = (f"{error}\n  {_save(saved)}", *error.args[1:])
        raise


def _save(saved: SavedReport) -> str:
    """Save the report of a failed capture, and say where, or why it cannot be."""
    directory = compat.debug_directory()
    try:
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
        handle, path = tempfile.mkstemp(".json", "graph_fsdp_error_", directory)  # nobody else can read it
        with open(handle, "w", encoding="utf-8") as file:
            file.write(saved.to_json())
    except OSError as reason:  # the pass's error is the one to be seen
        return f"the graphs could not be saved: {reason}"
    return f"the graphs are saved: graph-fsdp report {path}"
