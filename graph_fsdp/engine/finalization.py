"""``finalize_backward()`` reduces what backwards have kept, apart from any of them.

A pipeline runs the backwards of many microbatches and reduces once at the end. In between, gradients are kept whole
(``runtime/withheld_gradients.py``). What reduces them is a graph as any other: passes make its buckets and schedule,
ranks agree on it, and the report has it. Its inputs are zeros, to which the executor adds what is kept; a gradient
that no rank has stays None.

[Note: kept gradients that a backward does not take]
A backward that reduces takes what is kept of its own parameters. Others, of a branch that this forward has not run or
frozen since, are reduced when it has ended, as FSDP2 does: by such a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.engine.recompilation import Cause
from graph_fsdp.parameters.gradients import accumulate_gradients, at_the_end, leaf_of_all
from graph_fsdp.parameters.sharded import ShardedParameter
from graph_fsdp.passes import Graph
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.agreed_order import plan_kind
from graph_fsdp.passes.ir.settings import Settings
from graph_fsdp.passes.transforms.edits import without_defaults
from graph_fsdp.passes.transforms.insert_gathers import Annotate, mark_tangents
from graph_fsdp.report.report import failures_saved
from graph_fsdp.runtime.withheld_gradients import AbsentGradients

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


class Finalization:
    """Holds whether backwards of one model leave reductions to ``run``, and the units that it leaves out
    (``unreduced``)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine  # a weak proxy
        self.manual = False
        self.unreduced: frozenset[str] = frozenset()
        self._programs: dict[tuple[Settings, tuple[str, ...]], tuple[Callable[[list[Any]], Any], AbsentGradients]] = {}

    def run(self) -> None:
        """Reduce kept gradients into ``.grad``, as a backward does, and reshard the units that a backward would."""
        engine = self._engine
        if engine.graphs and engine.spec.mesh.ranks > 1:
            members = [p for p in engine.storage.parameters.values() if self._is_reduced(p)]
            if members:
                accumulate_gradients(members, self._reduce(members, "finalize_backward() reduces"))
        engine.unsharded.after_backward()

    def _is_reduced(self, p: ShardedParameter) -> bool:
        spec = p.spec
        if not (p.shard.requires_grad or self._is_due(p)) or spec.empty or spec.unit in self.unreduced:
            return False
        return spec.mesh.ranks > 1 or self._engine.spec.offload is not None

    def watched(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of a forward, with what the end of its backward does to what is kept
        ([Note: kept gradients that a backward does not take])."""
        if not self._engine.kept or self.manual:
            return inputs

        def ended(names: list[str], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            members: list[ShardedParameter] = []
            if compat.is_run(leaf_of_all()[1]):  # not one of ``torch.autograd.grad``, or with ``inputs``
                with contextlib.suppress(ReferenceError):  # the model is gone, and with it what it kept
                    members = self._left()
            if not members:
                return grads
            with self._engine.schedules.failures_told("backward"), compat.without_dispatch_modes():
                reduced = self._reduce(members, "a backward has ended, and reduces")
            frozen = [(p, grad) for p, grad in zip(members, reduced, strict=True) if not p.shard.requires_grad]
            accumulate_gradients([p for p, _ in frozen], [grad for _, grad in frozen])
            found = {p.spec.name: grad for p, grad in zip(members, reduced, strict=True)}
            pairs = [(grad, found.get(name)) for name, grad in zip(names, grads, strict=True)]
            return [own if more is None else more if own is None else own + more for own, more in pairs]

        return at_the_end(inputs, ended)

    def _is_due(self, p: ShardedParameter) -> bool:
        return not {(p.spec.name, False), (p.spec.name, True)}.isdisjoint(self._engine.kept.due)

    def _left(self) -> list[ShardedParameter]:
        """Return the parameters of which something is kept that is to be reduced now."""
        now = self._engine.settings
        kept = filter(self._is_due, self._engine.storage.parameters.values())
        return [p for p in kept if p.spec.unit not in now.unsynced | now.unreplicated]

    def _reduce(self, members: list[ShardedParameter], what: str) -> Sequence[Tensor | None]:
        """Reduce what is kept of ``members``; return the gradients of their padded local shards."""
        engine = self._engine
        now = engine.settings
        settings = Settings(
            unsynced=self.unreduced,
            divide_factors=now.divide_factors,
            summed=now.summed,
            over_groups=now.over_groups,
            hooked=now.hooked,
            reductions_in_flight=now.reductions_in_flight,
            own_reduce_group=now.own_reduce_group,
            custom_reduce_scatter=now.custom_reduce_scatter,
            registered_memory=now.registered_memory,
        )
        key = settings, tuple(p.spec.name for p in members)
        if key not in self._programs:
            self._programs[key] = self._compile(members, settings, what)
        program, absent = self._programs[key]
        absent.used, engine.kept.takes_all = 0, True
        try:
            with torch.no_grad():
                gradients: Sequence[Tensor | None] = program([self._zeros(p) for p in members])
        finally:
            engine.kept.takes_all = False
        return gradients

    def _device(self, p: ShardedParameter) -> torch.device:
        offload = self._engine.spec.offload
        return p.input.device if offload is None else offload.device

    def _zeros(self, p: ShardedParameter) -> Tensor:
        """Return the gradient to which what is kept is added: one zero, where memory of its own is not sent."""
        dtype, device, shape = p.spec.reduce_dtype, self._device(p), p.spec.stored_shape
        if (p.spec.name, False) in self._engine.kept.gradients:
            return torch.zeros((), dtype=dtype, device=device).expand(shape)
        return torch.zeros(shape, dtype=dtype, device=device)

    def _compile(
        self, members: list[ShardedParameter], settings: Settings, what: str
    ) -> tuple[Callable[[list[Any]], Any], AbsentGradients]:
        engine = self._engine
        cause = Cause("finalized", f"{what} what backwards have kept")
        captured, context = engine.new_graph(cause, settings)
        mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)
        graph = self._graph(members, mode)
        Annotate().run(graph, context)
        mark_tangents(graph, 0)
        names = {index: p.spec.name for index, p in enumerate(members)}
        graph.absent = AbsentGradients(
            {index: 1 << index for index in names}, names, graph.placeholders, context, engine.kept
        )
        engine.graphs.append(captured)
        with failures_saved(engine):
            engine.run_passes([graph], context, captured, plan_kind(graph, captured.spec, settings) + " finalized")
        with compat.tracing_in(mode):
            engine.regions.prepare([graph])
            return engine.program(graph, context, captured), graph.absent

    def _graph(self, members: list[ShardedParameter], mode: compat.FakeTensorMode) -> Graph:
        """Return a graph from whole gradients to their reductions."""
        graph, spec = fx.Graph(), self._engine.spec
        gradients = []
        for p in members:
            node = graph.placeholder(f"kept_{p.spec.name}")
            node.target = node.name  # an identifier
            with mode:
                node.meta["val"] = torch.empty(p.spec.stored_shape, dtype=p.spec.reduce_dtype, device=self._device(p))
            gradients.append(node)
        reduced = []
        for p, gradient in zip(members, gradients, strict=True):
            mesh = p.spec.mesh
            arguments = (
                gradient,
                list(p.input.shape),
                p.spec.dtype,
                p.spec.reduce_dtype,
                p.spec.name,
                mesh.group,
                mesh.replicate_group if mesh.replicas > 1 else "",
                p.input.device if spec.offload is not None else None,
            )
            node = graph.call_function(dialect.reduce_grad, without_defaults(dialect.reduce_grad, arguments))
            with mode:
                node.meta["val"] = torch.empty(p.input.shape, dtype=p.spec.dtype, device=p.input.device)
            reduced.append(node)
        graph.output(tuple(reduced))
        return Graph(fx.GraphModule({}, graph), "backward")
