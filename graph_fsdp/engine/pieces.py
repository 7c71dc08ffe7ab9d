"""The pieces of a model that breaks into several graphs (``fullgraph=False``) share what they gather.

[Note: what a piece gives]
When a piece is compiled nobody knows what comes after it. So in the first forward call each piece gathers its own
buckets, and the call is remembered: the kinds of its graphs with the buckets of each, in order. As long as a later call
runs the same kinds, a piece gives what a later one of that sequence wants. Each pair of what is taken and given is a
variant of the piece, with a graph and a plan of its own. If the sequence changes, what was given is held to the end of
the call.

All ranks remember, share and compile alike, as they run pieces that gather in the same order, or say so
(``runtime/ranks/lockstep.py``). Backward gathers a shared bucket again for each piece, or has kept it in one buffer.
See docs/decisions/pieces.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.engine.dynamo import Entry
from graph_fsdp.engine.python_reads import READ_BY_PYTHON
from graph_fsdp.engine.recompilation import Cause
from graph_fsdp.passes import Graph, PassContext, Plan
from graph_fsdp.passes.context import Sharing
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.ir.operands import argument
from graph_fsdp.passes.ir.stage import Snapshot
from graph_fsdp.passes.pipeline import add_stage
from graph_fsdp.report.report import CapturedGraph, failures_saved
from graph_fsdp.runtime.ranks.lockstep import Runnable

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine

Wants: TypeAlias = Mapping[str, frozenset[str]]  # bucket → the parameters that are read of it


@dataclass(frozen=True)
class _Step:
    """Records a piece that ran in a forward call, with the buckets that it wants."""

    kind: str
    wants: Wants


@dataclass
class _Piece:
    """Holds what variants of a piece are made of: its graph before the passes, and the context. ``variants``: a
    program, the buckets that it takes behind its other inputs, and those that it returns behind its outputs."""

    snapshot: Snapshot
    owner: fx.GraphModule
    context: PassContext
    phase: Phase
    step: _Step
    variants: dict[Sharing, tuple[Runnable, list[str], list[str]]] = dataclasses.field(default_factory=dict)


class Pieces:
    """Holds the pieces of one model, and the buckets that they share."""

    def __init__(self, engine: Engine, fullgraph: bool) -> None:
        spec, self._engine = engine.spec, engine  # a weak proxy
        fits = spec.mesh.world_size > 1 and not spec.reshard_size and spec.offload is None
        self._share = fits and not fullgraph and not engine.whole
        self._made: list[_Piece] = []
        self._before: dict[str, list[_Step]] = {}  # by the kind of its first piece
        self._now: list[_Step] | None = None  # None: no forward call runs
        self._held: dict[str, tuple[Tensor, frozenset[str]]] = {}  # buffers, and the parameters whose values they have

    @contextlib.contextmanager
    def forward_call(self) -> Iterator[None]:
        """Drop what is held at the end of a call, whatever happens in it."""
        self._now = []
        try:
            yield
        finally:
            now, self._now = self._now, None
            self._held.clear()
            if now and self._before.get(now[0].kind, [])[: len(now)] != now:
                self._before[now[0].kind] = now

    def snapshot(self, graph: Graph, entry: Entry) -> Snapshot | None:
        """Return a forward or inference graph as it is before the passes, of which variants are made; None where
        nothing can be shared, as of graphs of ``python_reads.py``."""
        return Snapshot(graph.fx_graph) if self._share and entry.name != READ_BY_PYTHON else None

    def sharing(self, base: Runnable, graph: Graph, snapshot: Snapshot, context: PassContext, kind: str) -> Runnable:
        """Return a function that runs ``base``, the program of ``graph``, or the variant that the call needs."""
        wants = _wants(graph)
        if not wants or context.budget is not None:  # which no graph could keep for what is held beside it
            return base
        self._made.append(piece := _Piece(snapshot, graph.module, context, graph.phase, _Step(kind, wants)))
        pieces, piece = weakref.proxy(self), weakref.proxy(piece)  # what Dynamo keeps must not keep the model

        def run(args: list[Any]) -> Any:
            sharing = pieces._decide(piece.step)
            return pieces._run(piece, sharing, args) if sharing else base(args)

        return compat.boxed(run)

    def _decide(self, step: _Step) -> Sharing:
        """Decide what a piece that runs now takes and gives."""
        if self._now is None:  # run by autograd (a checkpoint's recomputation)
            return Sharing()
        self._now.append(step)
        inference = torch.is_inference_mode_enabled()
        usable = {b: names for b, (buffer, names) in self._held.items() if buffer.is_inference() == inference}
        takes = {bucket for bucket, names in step.wants.items() if bucket in usable and names <= usable[bucket]}
        before = self._before.get(self._now[0].kind, [])
        later = before[len(self._now) :] if before[: len(self._now)] == self._now else []
        gives = set()
        for bucket, names in step.wants.items():
            there = usable[bucket] if bucket in takes else names
            if any(bucket in other.wants and other.wants[bucket] <= there for other in later):
                gives.add(bucket)
        return Sharing(frozenset(takes), frozenset(gives))

    def _run(self, piece: _Piece, sharing: Sharing, args: list[Any]) -> Any:
        if sharing not in piece.variants:
            piece.variants[sharing] = self._make(piece, sharing)
        run, takes, gives = piece.variants[sharing]
        taken = {bucket: self._held.pop(bucket) for bucket in takes}
        args.extend(buffer for buffer, _ in taken.values())
        parameters = {**piece.step.wants, **{bucket: names for bucket, (_, names) in taken.items()}}
        taken.clear()  # the program drops a buffer after its last use
        outputs = run(args)
        count = len(outputs) - len(gives)
        for bucket, buffer in zip(gives, outputs[count:], strict=True):
            self._held[bucket] = buffer, parameters[bucket]
        return outputs[:count]

    def _make(self, piece: _Piece, sharing: Sharing) -> tuple[Runnable, list[str], list[str]]:
        engine, base = self._engine, piece.context
        begin = time.perf_counter()
        before = base.graphs[piece.phase]
        kept = tuple(before.kept)
        cause = Cause("shared", f"takes or gives what other pieces gather: {sharing.key()}")
        captured = CapturedGraph(len(engine.graphs), engine.spec, cause)
        context = dataclasses.replace(
            base,
            sharing=dataclasses.replace(sharing, kept=kept),
            plan=Plan(),
            graphs=dict(base.graphs),
            stages=captured.stages,
        )
        graph = Graph(fx.GraphModule(piece.owner, piece.snapshot.copy()), piece.phase)
        graph.unsharded = before.unsharded
        add_stage(graph, context, "partition", time.perf_counter() - begin)
        kind, keeps = f"{piece.step.kind} {sharing.key()}", list(kept) if piece.phase == "forward" else None
        engine.graphs.append(captured)
        with failures_saved(engine):
            engine.schedules.run([graph], context, kind, keeps)
        engine.regions.prepare([graph])
        return engine.program(graph, context, captured), graph.taken, list(graph.given)


def _wants(graph: Graph) -> Wants:
    """Return what a graph gathers, with the parameters whose shards go in."""
    found: dict[str, frozenset[str]] = {}
    for gather in graph.gathers:
        if gather.start is not None:
            shards = argument(gather.start, "shards")
            found[gather.bucket] = frozenset(shard.meta["fsdp"].params[0] for shard in shards)
    return found
