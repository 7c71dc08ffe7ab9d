"""The pieces of a model that breaks into several graphs (``fullgraph=False``): what one gathers, later ones use.

[Note: what a piece gives]
When a piece is compiled nobody knows what comes after it. So the first forward call gathers a bucket in every piece
that uses it, and is remembered: the kinds of its graphs with the buckets that each gathers, in order. As long as a
later call runs the same kinds, a piece gives what a later one of that sequence will want, and the later one takes it.
Each pair of what is taken and given is a variant of the piece, with a graph and a plan of its own. Where the sequence
turns out to be another one, what was given is held in vain, to the end of the call.

Ranks run pieces that gather in the same order, or say so (``runtime/ranks/lockstep.py``), so all ranks remember alike,
share alike, and compile the same variants at the same time. Backward gathers a shared bucket again for each piece, or
has kept it for each: kept twice, it is one buffer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, fx

from graph_fsdp.engine.ranks import facts
from graph_fsdp.engine.recompilation import Cause
from graph_fsdp.passes import Graph, PassContext, Plan
from graph_fsdp.passes.context import PassError, Sharing
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.ir.stage import Snapshot
from graph_fsdp.passes.pipeline import add_stage
from graph_fsdp.passes.verify.error import VerificationError
from graph_fsdp.report.report import CapturedGraph, save_failure

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine

Wants: TypeAlias = Mapping[str, frozenset[str]]  # bucket → the parameters that are read of it
Runnable: TypeAlias = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class _Step:
    """A piece that ran in a forward call."""

    kind: str
    wants: Wants


@dataclass
class _Made:
    """What variants of a piece are made of: its graph before the passes, and what the passes knew."""

    snapshot: Snapshot
    owner: fx.GraphModule
    context: PassContext
    phase: Phase
    step: _Step
    variants: dict[Sharing, _Variant] = dataclasses.field(default_factory=dict)


@dataclass
class _Variant:
    """Takes the buckets ``taken`` behind its other inputs, and returns ``given`` behind its other outputs."""

    run: Runnable
    taken: list[str]
    given: list[str]


@dataclass
class _Held:
    buffer: Tensor
    parameters: frozenset[str]  # those whose values it has


class Pieces:
    """The pieces of one model, and the buckets that they share."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine  # a weak proxy
        self._made: list[_Made] = []
        self._before: dict[str, list[_Step]] = {}  # by the kind of its first piece
        self._now: list[_Step] | None = None  # None: no forward call runs
        self._held: dict[str, _Held] = {}

    @contextlib.contextmanager
    def forward_call(self) -> Iterator[None]:
        """Whatever happens in a call, nothing is held after it."""
        self._now = []
        try:
            yield
        finally:
            now, self._now = self._now, None
            self._held.clear()
            if now and self._before.get(now[0].kind, [])[: len(now)] != now:
                self._before[now[0].kind] = now

    def snapshot(self, graph: Graph) -> Snapshot | None:
        """Of a forward or inference graph before the passes; None where nothing can be shared."""
        spec = self._engine.spec
        possible = spec.world_size > 1 and not spec.reshard_size and spec.offload is None
        return Snapshot(graph.fx_graph) if possible else None

    def sharing(self, base: Runnable, graph: Graph, snapshot: Snapshot, context: PassContext, kind: str) -> Runnable:
        """``base``, which runs ``graph``, or in its place the variant that the call needs."""
        wants = _wants(graph)
        if not wants or context.budget is not None:  # which no graph could keep for what is held beside it
            return base
        self._made.append(_Made(snapshot, graph.module, context, graph.phase, _Step(kind, wants)))
        return _Piece(weakref.proxy(self), len(self._made) - 1, base)

    def decide(self, index: int) -> Sharing:
        """What a piece that runs now takes and gives."""
        if self._now is None:  # run by autograd (a checkpoint's recomputation)
            return Sharing()
        self._now.append(step := self._made[index].step)
        inference = torch.is_inference_mode_enabled()
        usable = {b: held.parameters for b, held in self._held.items() if held.buffer.is_inference() == inference}
        takes = {bucket for bucket, names in step.wants.items() if bucket in usable and names <= usable[bucket]}
        before = self._before.get(self._now[0].kind, [])
        later = before[len(self._now) :] if before[: len(self._now)] == self._now else []
        gives = set()
        for bucket, names in step.wants.items():
            there = self._held[bucket].parameters if bucket in takes else names
            if any(bucket in other.wants and other.wants[bucket] <= there for other in later):
                gives.add(bucket)
        return Sharing(frozenset(takes), frozenset(gives))

    def run(self, index: int, sharing: Sharing, args: list[Any]) -> Any:
        made = self._made[index]
        if sharing not in made.variants:
            made.variants[sharing] = self._make(made, sharing)
        variant = made.variants[sharing]
        taken = {bucket: self._held.pop(bucket) for bucket in variant.taken}
        args.extend(held.buffer for held in taken.values())
        parameters = {**made.step.wants, **{bucket: held.parameters for bucket, held in taken.items()}}
        taken.clear()  # the program drops a buffer after its last use
        outputs = variant.run(args)
        count = len(outputs) - len(variant.given)
        for bucket, buffer in zip(variant.given, outputs[count:], strict=True):
            self._held[bucket] = _Held(buffer, parameters[bucket])
        return outputs[:count]

    def _make(self, made: _Made, sharing: Sharing) -> _Variant:
        engine, base = self._engine, made.context
        begin = time.perf_counter()
        before = base.graphs[made.phase]
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
        graph = Graph(fx.GraphModule(made.owner, made.snapshot.copy()), made.phase)
        graph.unsharded = before.unsharded
        add_stage(graph, context, "partition", time.perf_counter() - begin)
        kind, keeps = f"{made.step.kind} {sharing.key()}", list(kept) if made.phase == "forward" else None
        engine.graphs.append(captured)
        try:
            engine.schedules.run(engine.pipeline, [graph], context, kind, lambda: facts(engine), keeps)
        except (VerificationError, PassError) as error:  # no backend of Dynamo's, which would save it
            save_failure(error, engine)
            raise
        engine.regions.prepare([graph])
        return _Variant(engine.program(graph, context, captured), graph.taken, list(graph.given))


class _Piece:
    """What AOTAutograd calls. It lives as long as the code object that Dynamo keeps it with, and so does not keep the
    model (see ``Engine._function_compiled``)."""

    def __init__(self, pieces: Pieces, index: int, base: Runnable) -> None:
        self._boxed_call = True  # see Program
        self.pieces, self.index, self.base = pieces, index, base

    def __call__(self, args: list[Any]) -> Any:
        sharing = self.pieces.decide(self.index)
        return self.pieces.run(self.index, sharing, args) if sharing else self.base(args)


def _wants(graph: Graph) -> Wants:
    """What a graph gathers, with the parameters whose shards go in."""
    found: dict[str, frozenset[str]] = {}
    for gather in graph.gathers:
        if gather.start is not None:
            shards = dialect.argument(gather.start, "shards")
            found[gather.bucket] = frozenset(shard.meta["fsdp"].params[0] for shard in shards)
    return found
