"""``backend="xla", sharding="auto"``: the global view of a model, divided among devices by XLA's partitioner.

One process has all devices (SPMD). A parameter is a tensor of its full shape, of which each device has a part; the
optimizer, ``state_dict()`` and gradients see that tensor. Dynamo traces the batch of all devices. The passes see the
same graphs as everywhere, in which a shard is a device's rows; only the last lowering
(``runtime/xla/global_view.py``) puts constraints in the place of collectives.

What differs from a rank's own view: a loss is the mean over the global batch, random numbers are drawn for it, and
BatchNorm's statistics are of it.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from graph_fsdp import compat
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.engine.engine import Engine
from graph_fsdp.engine.entry import Entry
from graph_fsdp.module.module import original_forward
from graph_fsdp.parameters.shards import ShardedParameter, Storage
from graph_fsdp.passes import Graph, PassContext, PassPipeline, memory_profile
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.transforms.constrain import ConstrainActivations
from graph_fsdp.report.report import CapturedGraph
from graph_fsdp.runtime.backends.xla import XlaBackend
from graph_fsdp.runtime.xla.constraints import mesh_name
from graph_fsdp.runtime.xla.global_program import GlobalProgram
from graph_fsdp.runtime.xla.global_view import GlobalMesh, lower_global
from graph_fsdp.runtime.xla.placement import read_placement
from graph_fsdp.xla.checkpoint import XlaTensors
from graph_fsdp.xla.engine import warn_unsharded
from graph_fsdp.xla.mesh import XlaMesh
from graph_fsdp.xla.storage import XlaStorage

ShardOutput = Callable[[Any, Any], None]
REPLICATE, SHARD = "replicate", "fsdp"


def global_mesh(mesh: XlaMesh) -> GlobalMesh:
    """As constraints name it."""
    name = mesh_name(mesh.devices, (REPLICATE, SHARD))
    batch = f"{REPLICATE},{SHARD}" if mesh.replicas > 1 else SHARD
    return GlobalMesh(name, SHARD, batch)


def with_constraints(pipeline: PassPipeline, mesh: XlaMesh) -> PassPipeline:
    """The pipeline with the pass that says how activations are sharded."""
    of = global_mesh(mesh)
    return pipeline.insert_after("insert_gathers", ConstrainActivations(of.name, of.batch_axes))


def trace_marks(model: nn.Module, shard_output: ShardOutput | None, mesh: Any) -> None:
    """Before the model gets its new class: ``mark_sharding`` in it is traced, and so is a call of ``shard_output``
    behind its forward."""
    trace_mark_sharding()
    if shard_output is None:
        return
    forward = original_forward(model)

    @functools.wraps(forward)
    def marked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        shard_output(output, mesh)
        return output

    model.forward = types.MethodType(marked, model)


@functools.cache
def trace_mark_sharding() -> None:
    """Dynamo traces ``mark_sharding`` of torch_xla, in a model or in ``shard_output``, as an operator."""

    def traced(t: Any, mesh: Any, partition_spec: Any) -> Any:
        axes = []
        for dim in partition_spec:
            axes.append("" if dim is None else ",".join(dim) if isinstance(dim, tuple) else dim)
        torch.ops.graph_fsdp.mark_sharding.default(t, axes)
        return t

    torch.compiler.substitute_in_graph(compat_xla.spmd().mark_sharding, skip_signature_check=True)(traced)


class GlobalEngine(Engine):
    """An engine whose graphs are those of the global batch."""

    storage: XlaStorage  # type: ignore[assignment]  # it has what Engine's methods call
    backend: XlaBackend

    def __init__(self, forward: Callable[..., Any], spec: Any, storage: XlaStorage, *args: Any, **kwargs: Any) -> None:
        super().__init__(forward, spec, cast(Storage, storage), *args, whole=True, **kwargs)
        self.mesh, self.global_mesh = storage.xla_mesh, global_mesh(storage.xla_mesh)
        self.unsharded.refused = _unavailable()
        self._scheduled: dict[tuple[int, Phase], Graph] = {}  # by captured graph
        self._told = False  # that no input is sharded

    def run(self, entry: Entry, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = compat.tree_map_only(Tensor, compat_xla.plain, (args, kwargs))
        return super().run(entry, module, *args, **kwargs)

    def checkpoint_access(self) -> XlaTensors:
        return XlaTensors(self.storage)

    def _substitute_shards(
        self, module: fx.GraphModule, inputs: list[Any], parameters: dict[int, ShardedParameter], context: PassContext
    ) -> None:
        super()._substitute_shards(module, inputs, parameters, context)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        given = context.inputs
        given.batch = frozenset(n for n in placeholders if n not in given.shards and self._is_batch(n))
        if not given.batch and not self._told and self.mesh.size > 1:
            self._told = True
            assert self._call is not None
            warn_unsharded(self._call.function, self._call.args, self._call.kwargs)

    def _is_batch(self, node: fx.Node) -> bool:
        example = getattr(node.meta.get("grapharg"), "example", None)
        if not isinstance(example, Tensor) or example.device.type != "xla" or not example.dim():
            return False
        (spec,) = compat_xla.sharding_specs([example])
        return read_placement(spec, self.mesh.ranks) == self.mesh.batch

    def run_passes(self, graphs: list[Graph], context: PassContext, captured: CapturedGraph, kind: str) -> None:
        super().run_passes(graphs, context, captured, kind)
        lowered = lower_global(graphs, self.spec, self.global_mesh)
        for graph in graphs:
            # AOTAutograd reads the graph that it is to run: what is kept for backward is other values there.
            module = graph.module
            self._scheduled[captured.index, graph.phase] = scheduled = copy.copy(graph)
            scheduled.module = fx.GraphModule(module, graph.fx_graph)
            module.graph = lowered[graph.phase].graph

    def program(self, graph: Graph, context: PassContext, captured: CapturedGraph) -> Callable[[list[Any]], Any]:
        scheduled = self._scheduled.pop((captured.index, graph.phase))
        on_host_fallback = self.backend.on_host_fallback
        program = GlobalProgram(scheduled, graph.module, self.regions, self.counter, self.mesh.batch, on_host_fallback)
        captured.add_program(scheduled, context, program, memory_profile(scheduled, context))
        self.programs[captured.index, graph.phase] = program
        return program


def _unavailable() -> str:
    return "with sharding='auto' its parameters are whole tensors already, which XLA keeps in parts"
