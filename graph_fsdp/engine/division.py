"""A backward may be divided (zero bubble): inputs' gradients when autograd asks, weights' when the schedule does.

The two halves are graphs made of the backward's after all passes (``passes/transforms/divide_backward.py``). They are
compiled when a backward is divided first, and the report has them as graphs of their own. What the second half reads
is held until it has run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.engine.recompilation import Cause
from graph_fsdp.parameters.gradients import accumulate_gradients
from graph_fsdp.passes import Graph, PassContext
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.pipeline import add_stage, collector_paused
from graph_fsdp.passes.transforms.divide_backward import divide_backward
from graph_fsdp.passes.verify.verify import Verifier
from graph_fsdp.report.report import CapturedGraph
from graph_fsdp.runtime.ranks.lockstep import Runnable

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine

Deferred = list[Callable[[], None]]


class Division:
    """Holds whether backwards of one model leave weights' gradients for later (``deferring``)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine  # a weak proxy
        self._deferred: Deferred | None = None

    @contextlib.contextmanager
    def deferring(self) -> Iterator[Deferred]:
        """Divide backwards in the block. Yield a list that gets what computes the weights' gradients: call each once,
        in order."""
        self._deferred = []
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def around(self, whole: Runnable, backward: Graph, context: PassContext, captured: CapturedGraph) -> Runnable:
        """Return ``whole``, which runs ``backward``, but divided while weights' gradients are left for later."""
        divided: list[Callable[[list[Any], Deferred], Any]] = []
        mode = compat.current_fake_mode()

        def run(args: list[Any]) -> Any:
            if self._deferred is None:
                return whole(args)
            if not divided:
                told = self._engine.schedules.failures_told("backward")
                with told, compat.tracing_in(mode), collector_paused(), compat.without_dispatch_modes():
                    divided.append(self._compile(backward, context, captured))
            return divided[0](args, self._deferred)

        return compat.boxed(run)

    def _compile(
        self, backward: Graph, context: PassContext, captured: CapturedGraph
    ) -> Callable[[list[Any], Deferred], Any]:
        engine, count = self._engine, len(backward.outputs)
        inputs = context.graphs["forward"].placeholders[:count]
        names = {place: n.meta["fsdp"].params[0] for place, n in enumerate(inputs) if has_role(n, Role.SHARD)}
        members = {place: engine.storage.parameters[name] for place, name in names.items()}
        begin = time.perf_counter()
        halves = divide_backward(backward, members.keys())
        seconds = time.perf_counter() - begin
        kept = backward.with_role(Role.ACCUMULATE, Role.REDUCE_START)
        reduced = {name for node in kept for name in node.meta["fsdp"].params}
        places: list[tuple[PassContext, CapturedGraph]] = []
        for half, what, reduces in zip(halves, ("inputs", "weights"), (set[str](), reduced), strict=True):
            cause = Cause("divided", f"graph {captured.index}'s backward is divided; this half is of the {what}")
            new = CapturedGraph(len(engine.graphs), captured.spec, cause)
            its = replace(context, stages=new.stages, graphs={**context.graphs, "backward": half.graph})
            places.append((its, new))
            engine.graphs.append(new)
            add_stage(half.graph, its, "divide", seconds, cause.text)
            Verifier(half.graph, its, reduces).check("divide")
            half.graph.module.recompile()
        engine.schedules.agree([half.graph for half in halves], context)
        engine.regions.prepare([half.graph for half in halves])
        of_inputs, of_weights = (engine.program(h.graph, *place) for h, place in zip(halves, places, strict=True))
        absent = backward.absent

        def later(args: list[Any], used: int) -> None:
            if absent is not None:
                absent.used = used
            with torch.no_grad():
                gradients = of_weights(args)
            given = {place: g for place, g in enumerate(gradients) if isinstance(g, Tensor)}  # not those that are kept
            accumulate_gradients([members[place] for place in given], list(given.values()))

        def run(args: list[Any], deferred: Deferred) -> Any:
            used = absent.used if absent is not None else 0
            given, held = ([args[place] for place in half.places] for half in halves)
            args.clear()
            outputs = list(of_inputs(given))
            held += outputs[count:]
            deferred.append(lambda: later(held, used))
            return outputs[:count]

        return run
