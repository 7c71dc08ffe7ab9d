"""``graph_fsdp.inspect``: what the passes made of a model, to read, to compare and to run."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from torch import nn

from graph_fsdp.engine.recompilation import FIRST_CALL, Cause
from graph_fsdp.passes.analysis.memory import MemoryProfile
from graph_fsdp.passes.analysis.simulate import Timeline, simulate
from graph_fsdp.passes.context import PHASES, PassContext
from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.passes.ir.layout import copies
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.passes.ir.stage import Stage
from graph_fsdp.passes.transforms.slots import SlotTable, slot_table
from graph_fsdp.report import text as report_text
from graph_fsdp.report.bucket_rows import ROW_KINDS as ROW_KINDS
from graph_fsdp.report.bucket_rows import BucketRow, bucket_rows, plain_table
from graph_fsdp.report.data import graph_data, report_data
from graph_fsdp.report.file import SavedReport, is_page
from graph_fsdp.report.files import write_text
from graph_fsdp.report.page import schedule_data
from graph_fsdp.report.parameter_life import ParameterLife, find_life
from graph_fsdp.report.trace_events import ScheduledGraph, predicted_trace
from graph_fsdp.runtime import GatheredBytes, Program, WholeProgram
from graph_fsdp.runtime.cuda.cuda_graphs import ProgramGraphs


class GraphView:
    """One graph of a capture: its stages by pass name, its buckets and the slots that they are gathered into, the
    program that runs it, the bytes that it is predicted to hold, and ``copied_nbytes``: those that packing and
    unpacking for its collectives reads and writes in a run (:func:`graph_fsdp.passes.ir.layout.copies`)."""

    def __init__(self, phase: Phase, stages: dict[str, Stage]) -> None:
        self.phase = phase
        self.stages = stages
        self.buckets: list[BucketRow] = []
        self.slots = SlotTable()
        self.copied_nbytes = 0
        self.program: str | None = None
        self.whole = False  # compiled in one piece: buffers are the compiler's, and nothing predicts their bytes
        self.memory: MemoryProfile | None = None
        self.cuda_graphs: ProgramGraphs | None = None  # which regions are, and what became of the runs
        self.graph: Graph | None = None  # after all passes
        self.hlo_of: Callable[[], Any] | None = None  # where XLA runs it
        self.xla_compilations: Sequence[Any] = ()  # of it by XLA, each with its cause and seconds
        self.nodes = 0

    @functools.cached_property
    def timeline(self) -> Timeline | None:
        """When the graph's collectives run by the cost model, and what of them is exposed; None without a model."""
        cost = self.graph.cost if self.graph is not None else None
        return simulate(self.graph, cost) if self.graph is not None and cost is not None else None

    def scheduled(self) -> ScheduledGraph:
        """The graph with what is predicted of it. Raises LookupError without a cost model."""
        if self.graph is None or self.graph.cost is None or self.timeline is None:
            raise LookupError(f"the {self.phase} graph has no cost model that could say when its nodes run")
        return ScheduledGraph(self.graph, self.graph.cost, self.timeline, self.memory)

    @property
    def lowered(self) -> str | None:
        """The graph as a compiler got it that takes it whole (``regions="whole"``, ``backend="xla"``), as Python."""
        return self.program if self.whole else None

    def hlo(self) -> Any:
        """XLA's optimized program, compiled once more for its text: a
        :class:`graph_fsdp.runtime.xla.hlo.OptimizedHlo`, whose ``table()`` has its collectives beside the schedule's.

        Raises:
            LookupError: XLA does not run the graph.
        """
        if self.hlo_of is None:
            raise LookupError(
                f"the {self.phase} graph is not run by XLA; hlo() is of models compiled with backend='xla'"
            )
        return self.hlo_of()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return report_text.graph_parts(graph_data(self, stages=False))

    def __str__(self) -> str:
        return report_text.plain_text(report_text.graph_parts(graph_data(self, stages=False)))

    def compiled_by_xla(self) -> list[str]:
        """A line that says how often and why, where XLA runs the graph."""
        if not self.xla_compilations:
            return []
        causes = "; ".join(map(str, self.xla_compilations))
        return [f"compiled by XLA {len(self.xla_compilations)}x: {causes}"]

    def predicted(self) -> str:
        """One line on the timeline."""
        return report_text.predicted(graph_data(self, stages=False))

    def diff(self, stage: str) -> str:
        """Unified diff of a stage's code against the stage before it."""
        names = list(self.stages)
        if stage not in names:
            raise KeyError(f"the {self.phase} graph has no stage {stage!r}; it has {', '.join(names)}")
        index = names.index(stage)
        before = self.stages[names[index - 1]].body if index else ""
        title = names[index - 1] if index else "(nothing)"
        lines = difflib.unified_diff(
            before.splitlines(), self.stages[stage].body.splitlines(), title, stage, lineterm="", n=1
        )
        return "\n".join(lines)

    def table(self) -> str:
        """The buckets as plain lines."""
        return plain_table(self.buckets)


@dataclass
class CapturedGraph:
    """Everything of one captured graph: recompilations are captures of their own. ``cause``: why it was captured."""

    index: int
    spec: ModelSpec
    cause: Cause = FIRST_CALL
    stages: dict[Phase, dict[str, Stage]] = field(default_factory=lambda: {phase: {} for phase in PHASES})
    views: dict[Phase, GraphView] = field(default_factory=dict)

    def add_program(
        self, graph: Graph, context: PassContext, program: Program | WholeProgram, memory: MemoryProfile
    ) -> None:
        self.add_graph(graph, context)
        view = self.view(graph.phase)
        view.program, view.hlo_of = program.source, getattr(program, "hlo", None)
        view.xla_compilations = getattr(program, "compilations", ())  # a list that grows
        if isinstance(program, WholeProgram):
            view.whole, view.slots = True, SlotTable()
        else:
            view.memory, view.cuda_graphs = memory, program.graphs

    def add_graph(self, graph: Graph, context: PassContext) -> None:
        view = self.view(graph.phase)
        view.graph = graph
        view.buckets = bucket_rows(graph)
        view.slots = slot_table(graph)
        view.copied_nbytes = sum(copies(graph))
        view.nodes = len(graph.fx_graph.nodes)

    @property
    def is_complete(self) -> bool:
        """Whether a graph of it came out of the passes; not where a pass failed."""
        return any(view.nodes for view in self.views.values())

    def all_views(self) -> list[GraphView]:
        """Of all its graphs, those that others were made of too."""
        phases = [phase for phase in PHASES if self.stages[phase] or phase in self.views]
        return [self.views.get(phase) or GraphView(phase, self.stages[phase]) for phase in phases]

    def view(self, phase: Phase) -> GraphView:
        if phase not in self.views:
            self.views[phase] = GraphView(phase, self.stages[phase])
        return self.views[phase]


class GraphReport:
    """What ``inspect`` returns. ``forward``, ``backward`` and ``inference`` are the latest captured graphs of their
    kind; ``graphs`` holds all captures, in order. ``whole``: graphs are compiled in one piece (``regions="whole"``);
    ``peak_gathered_bytes`` is None then, as nothing counts them. ``kept_nbytes``: gradients on this rank that wait for
    a backward that reduces them."""

    def __init__(
        self,
        graphs: list[CapturedGraph],
        spec: ModelSpec,
        counter: GatheredBytes,
        regions: Any,
        whole: bool = False,
        kept_nbytes: int = 0,
    ) -> None:
        self.graphs, self.spec, self.whole = graphs, spec, whole
        self.peak_gathered_bytes = None if whole else counter.peak
        self.kept_nbytes = kept_nbytes
        self.collectives = dict(counter.collectives)
        self.regions, self.compiled_regions = regions.regions, regions.compiled

    @property
    def captures(self) -> list[CapturedGraph]:
        """All captures, in order: each has the views of its graphs, and the cause of its being captured."""
        return self.graphs

    @property
    def capture(self) -> GraphView:
        """Dynamo's graph: the model with shards for parameters."""
        return self._latest("capture")

    @property
    def joint(self) -> GraphView:
        """Forward and backward before they are partitioned."""
        return self._latest("joint")

    @property
    def forward(self) -> GraphView:
        return self._latest("forward")

    @property
    def backward(self) -> GraphView:
        return self._latest("backward")

    @property
    def inference(self) -> GraphView:
        return self._latest("inference")

    def _latest(self, phase: Phase) -> GraphView:
        for captured in reversed(self.graphs):
            if captured.stages[phase]:
                return captured.view(phase)
        raise LookupError(f"no {phase} graph was captured yet; run the model once, then inspect it")

    def find(self, parameter: str) -> ParameterLife:
        """The life of one parameter, by its name in ``named_parameters()``: where in the latest graphs its shard goes
        in, is gathered, is used (with the line of the model), is freed, and how its gradient leaves.

        Raises:
            KeyError: the model has no sharded parameter of this name.
        """
        latest = {phase: (c.index, view.graph) for c in self.graphs for phase, view in c.views.items() if view.graph}
        return find_life(parameter, self.spec, latest.values())

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write the predicted schedule of the latest forward and backward graph (or, of a model that has only run
        without gradients, inference graph) as a trace that Perfetto and chrome://tracing open: a lane for compute, one
        for each process group and each direction of copies, and the bytes held, by category.

        Raises:
            LookupError: no graph was captured yet, or there is no cost model.
            OSError: the file cannot be written.
        """
        scheduled = [view.scheduled() for view in self._latest_run()]
        cost = scheduled[0].cost
        title = f"predicted on {cost.hardware.name}, one of {self.spec.world_size * self.spec.replicas} ranks"
        write_text(path, json.dumps(predicted_trace(scheduled, self.spec, title)))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report to a file, by its suffix.

        ``.html``: a page that needs no network: the predicted schedule of the latest forward and backward graph (or, of
        a model that has only run without gradients, inference graph) with the memory held and what holds most of it,
        the buckets, every graph after each pass and what each changed, search by parameter.
        ``.json``: the same as data, which :func:`graph_fsdp.load_report` and ``graph-fsdp report FILE`` read.

        Raises:
            ValueError: the suffix is neither.
            LookupError: no graph was captured yet; for a page, there is no cost model.
            OSError: the file cannot be written.
        """
        as_page = is_page(path)
        views = self._latest_run()
        capture = next(c for c in self.graphs if views[0] in c.views.values())
        timed = [view.scheduled() for view in views] if as_page or all(view.timeline for view in views) else []
        schedule = schedule_data(self.spec, capture.index, timed) if timed else None
        SavedReport(report_data(self, stages=True), schedule).save(path)

    def _latest_run(self) -> list[GraphView]:
        for captured in reversed(self.graphs):
            found = [captured.view(phase) for phase in ("forward", "backward", "inference")]
            if any(view.graph is not None for view in found):
                return [view for view in found if view.graph is not None]
        raise LookupError("no graph was captured yet; run the model once, then inspect it")

    def diff(self, stage: str) -> str:
        """Unified diffs of what a pass changed, over the latest graphs that it ran on."""
        found = []
        for phase in PHASES:
            for captured in reversed(self.graphs):
                if stage in captured.stages[phase]:
                    found.append(f"# {phase} graph\n{captured.view(phase).diff(stage)}")
                    break
        if not found:
            raise KeyError(f"no graph has a stage {stage!r}")
        return "\n".join(found)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """``rich.print(report)``: as wide as the terminal, in colours."""
        return report_text.report_parts(report_data(self, stages=False))

    def __str__(self) -> str:
        return report_text.plain_text(report_text.report_parts(report_data(self, stages=False)))

    def __repr__(self) -> str:
        return str(self)


def inspect(model: nn.Module) -> GraphReport:
    """Report on a compiled model: every graph captured so far, after every pass.

    Raises:
        TypeError: ``model`` was not compiled by graph_fsdp.
    """
    engine = engine_of(model)
    kept = engine.kept.nbytes
    return GraphReport(list(engine.graphs), engine.spec, engine.counter, engine.regions, engine.whole, kept)


def engine_of(model: nn.Module) -> Any:
    """The engine of a compiled model. Raises TypeError on another."""
    engine = model.__dict__.get("_graph_fsdp") if isinstance(model, nn.Module) else None
    if engine is None:
        raise TypeError(f"model: {type(model).__name__} was not compiled by graph_fsdp; call graph_fsdp.compile first")
    return engine
