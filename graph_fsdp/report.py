"""``graph_fsdp.inspect``: what the passes made of a model, to read, to compare and to run."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from torch import fx, nn

from graph_fsdp.files import write_text
from graph_fsdp.html_report import html_page
from graph_fsdp.parameter_life import ParameterLife, find_life
from graph_fsdp.passes.dialect import Role
from graph_fsdp.passes.graph import Graph, Phase
from graph_fsdp.passes.layout import copies
from graph_fsdp.passes.memory import MemoryProfile
from graph_fsdp.passes.offload import find_transfers
from graph_fsdp.passes.pipeline import PHASES, PassContext
from graph_fsdp.passes.simulate import Timeline, simulate
from graph_fsdp.passes.slots import SlotTable, slot_table
from graph_fsdp.passes.spec import ModelSpec
from graph_fsdp.passes.stage import Stage
from graph_fsdp.recompilation import FIRST_CALL, Cause
from graph_fsdp.runtime import GatheredBytes, Program, WholeProgram
from graph_fsdp.runtime.cuda_graphs import ProgramGraphs
from graph_fsdp.trace_events import ScheduledGraph, predicted_trace


@dataclass(frozen=True)
class BucketRow:
    """One gathered or reduced bucket of one graph. Positions are indices of nodes in the scheduled graph; None
    where the event is not in this graph. ``nbytes``: of the gathered buffer, or of the reduced shard."""

    name: str
    kind: str  # "gather", "kept" (received from forward), "reduce" or "replicate" (reduced again over replicas)
    parameters: tuple[str, ...]
    nbytes: int
    start: int | None
    wait: int | None
    first_use: int | None
    free: int | None
    escapes: bool


class GraphView:
    """One graph of a capture: its stages by pass name, its buckets and the slots that they are gathered into, the
    program that runs it, the bytes that it is predicted to hold, and ``copied_nbytes``: those that packing and
    unpacking for its collectives reads and writes in a run (:func:`graph_fsdp.passes.layout.copies`)."""

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

    def compiled_by_xla(self) -> list[str]:
        """A line that says how often and why, where XLA runs the graph."""
        if not self.xla_compilations:
            return []
        causes = "; ".join(map(str, self.xla_compilations))
        return [f"  compiled by XLA {len(self.xla_compilations)}x: {causes}"]

    def predicted(self) -> str:
        """One line on the timeline."""
        if self.timeline is None or self.graph is None or self.graph.cost is None:
            return "predicted: no cost model"
        t, milliseconds = self.timeline, 1e3
        return (
            f"predicted on {self.graph.cost.hardware.name}: {t.seconds * milliseconds:.3f} ms, compute "
            f"{t.compute * milliseconds:.3f}, communication {t.communication * milliseconds:.3f}, of it exposed "
            f"{t.exposed * milliseconds:.3f}"
        )

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
        header = ("bucket", "kind", "params", "bytes", "start", "wait", "first use", "free")
        rows = [
            (
                row.name,
                row.kind,
                str(len(row.parameters)),
                f"{row.nbytes:,}",
                *("-" if v is None else str(v) for v in (row.start, row.wait, row.first_use)),
                "kept" if row.escapes else "-" if row.free is None else str(row.free),
            )
            for row in self.buckets
        ]
        return _columns(header, rows)


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
        view.buckets = _bucket_rows(graph)
        view.slots = slot_table(graph, context)
        view.copied_nbytes = sum(copies(graph))
        view.nodes = len(graph.fx_graph.nodes)

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
        """Write the report on the latest forward and backward graph (or, of a model that has only run without
        gradients, inference graph) as an HTML page that needs no network: the predicted schedule with the memory held,
        what holds most of it, the buckets, the graphs after each pass and what each changed, search by parameter.

        Raises:
            LookupError: no graph was captured yet, or there is no cost model.
            OSError: the file cannot be written.
        """
        views = self._latest_run()
        captured = next(c for c in self.graphs if views[0] in c.views.values())
        sources = [captured.view(phase) for phase in ("capture", "joint") if captured.stages[phase]]
        write_text(path, html_page(self, [(captured.index, view) for view in views], sources))

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

    def __str__(self) -> str:
        parameters = list(self.spec.parameters.values())
        world_size, replicas = self.spec.world_size, self.spec.replicas
        lines = [
            f"graph_fsdp: {len(parameters)} parameters in {len(self.spec.buckets)} buckets over "
            f"{f'{replicas} replicas of ' if replicas > 1 else ''}{world_size} rank{'s' if world_size > 1 else ''}",
            f"captured graphs: {len(self.graphs)}; {self._compiled()}",
        ]
        if self.kept_nbytes:
            lines += [f"gradients that are not reduced yet: {self.kept_nbytes:,} bytes"]
        for captured in self.graphs:
            if captured.cause.kind != "first":
                lines += ["", f"graph {captured.index} was captured because {captured.cause}"]
            for phase, view in captured.views.items():
                if not view.nodes:  # a graph that other graphs are made of
                    continue
                lines += ["", f"graph {captured.index}, {phase}: {view.nodes} nodes"]
                lines += [view.table() if view.buckets else "  nothing gathered or reduced"]
                lines += [f"  {line}" for line in str(view.slots).splitlines() if view.slots]
                if view.whole:
                    lines += ["  compiled whole: the compiler allocates the buffers"]
                    lines += view.compiled_by_xla()
                elif view.buckets:
                    lines += [f"  copied by packing and unpacking: {view.copied_nbytes:,} bytes"]
                if view.memory is not None:
                    lines += [f"  {line}" for line in str(view.memory).splitlines()]
                if view.cuda_graphs is not None:
                    lines += [f"  {line}" for line in str(view.cuda_graphs).splitlines()]
                lines += [f"  {view.predicted()}"]
                total = sum(stage.seconds for stage in view.stages.values()) * 1e3
                names = ", ".join(view.stages)
                lines += [f"  passes: {names} ({total:.1f} ms)"]
        return "\n".join(lines)

    __repr__ = __str__

    def _compiled(self) -> str:
        if self.whole:
            return f"compiled whole: {self.compiled_regions}"
        return (
            f"compute regions: {self.regions}, compiled {self.compiled_regions}; "
            f"most bytes gathered at once: {self.peak_gathered_bytes:,}"
        )


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


def _bucket_rows(graph: Graph) -> list[BucketRow]:
    positions = graph.positions()

    def at(node: fx.Node | None) -> int | None:
        return None if node is None else positions[node]

    rows: dict[int, BucketRow] = {}
    for g in graph.gathers:
        kind = "kept" if g.start is None else "gather"
        times = (at(g.start), at(g.wait), at(next(iter(g.reads), None)), at(g.free))
        escapes = g.escapes and kind == "gather"
        rows[positions[g.start or g.buffer]] = BucketRow(g.bucket, kind, g.params, g.nbytes, *times, escapes)
    for r in graph.reductions:
        stages = {"reduce": (r.start, r.wait), "replicate": (r.replicate_start, r.replicate_wait)}
        for kind, (start, wait) in stages.items():
            if start is not None and wait is not None:
                first_use = min((positions[user] for user in wait.users if user.op != "output"), default=None)
                times = (positions[start], positions[wait], first_use, None)
                nbytes = start.meta["fsdp"].nbytes
                rows[positions[start]] = BucketRow(r.bucket, kind, r.params, nbytes, *times, False)
    kept: dict[str, list[fx.Node]] = {}
    for node in graph.with_role(Role.ACCUMULATE):
        kept.setdefault(node.meta["fsdp"].bucket, []).append(node)
    for bucket, nodes in kept.items():
        params = tuple(node.meta["fsdp"].params[0] for node in nodes)
        nbytes = sum(node.meta["fsdp"].nbytes for node in nodes)
        rows[positions[nodes[0]]] = BucketRow(
            bucket, "keep", params, nbytes, positions[nodes[0]], None, None, None, False
        )
    for t in find_transfers(graph):
        first_use = min((positions[user] for user in t.wait.users if user.op != "output"), default=None)
        times = (positions[t.start], positions[t.wait], first_use, None)
        rows[positions[t.start]] = BucketRow(t.bucket, t.kind, t.params, t.nbytes, *times, False)
    return [rows[position] for position in sorted(rows)]


ROW_KINDS = {
    Role.GATHER_START: "gather",
    Role.KEPT: "kept",
    Role.REDUCE_START: "reduce",
    Role.REPLICATE_START: "replicate",
}


def _columns(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    left = 2  # text columns; the others are numbers

    def line(row: tuple[str, ...]) -> str:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  " + "  ".join(cells).rstrip()

    return "\n".join([line(header), *map(line, rows)])
