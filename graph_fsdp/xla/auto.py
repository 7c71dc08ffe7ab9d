"""``backend="xla", sharding="auto"`` gives a model's global view to XLA's partitioner, which divides it among devices.

One process has all devices (SPMD). A parameter is a tensor of its full shape, of which each device has a part; the
optimizer, ``state_dict()`` and gradients see that tensor. Dynamo traces the batch of all devices: a loss is its mean,
random numbers are drawn for it, and BatchNorm's statistics are of it. The passes see the same graphs as everywhere;
only the last lowering (``runtime/xla/global_view.py``) puts constraints in the place of collectives.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from graph_fsdp import compat
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.engine.dynamo import Entry
from graph_fsdp.engine.ranks import Made, nothing
from graph_fsdp.module.entering import original_forward
from graph_fsdp.parameters.sharded import ShardedParameter
from graph_fsdp.passes import Graph, PassContext, PassPipeline
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.transforms.constrain import ConstrainActivations
from graph_fsdp.report.report import CapturedGraph
from graph_fsdp.runtime.xla.global_view import REPLICATE, SHARD, lower_global, mesh_name
from graph_fsdp.runtime.xla.lower import Lowered
from graph_fsdp.runtime.xla.program import XlaProgram
from graph_fsdp.xla.engine import XlaEngine
from graph_fsdp.xla.mesh import XlaMesh

ShardOutput = Callable[[Any, Any], None]


def with_constraints(pipeline: PassPipeline, mesh: XlaMesh) -> PassPipeline:
    """Return the pipeline with the pass that says how activations are sharded."""
    batch = f"{REPLICATE},{SHARD}" if mesh.spec.replicas > 1 else SHARD
    constrain = ConstrainActivations(mesh_name(mesh.devices), batch)
    return pipeline.insert_after("insert_gathers", constrain)


def trace_marks(model: nn.Module, shard_output: ShardOutput | None, mesh: Any) -> None:
    """Have ``mark_sharding`` traced, and a call of ``shard_output`` behind a model's forward, before it gets its new
    class."""
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
    """Have Dynamo trace ``mark_sharding`` of torch_xla, in a model or in ``shard_output``, as an operator."""

    def traced(t: Any, mesh: Any, partition_spec: Any) -> Any:
        axes = [",".join(dim) if isinstance(dim, tuple) else dim or "" for dim in partition_spec]
        torch.ops.graph_fsdp.mark_sharding.default(t, axes)
        return t

    torch.compiler.substitute_in_graph(compat_xla.spmd().mark_sharding, skip_signature_check=True)(traced)


class GlobalEngine(XlaEngine):
    """Captures graphs of the global batch."""

    unavailable = "with sharding='auto' its parameters are whole tensors already, which XLA keeps in parts"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._scheduled: dict[tuple[int, Phase], Graph] = {}  # by captured graph

    def run(self, entry: Entry, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = compat.tree_map_only(Tensor, compat_xla.plain, (args, kwargs))
        return super().run(entry, module, *args, **kwargs)

    def _substitute_shards(
        self, module: fx.GraphModule, inputs: list[Any], parameters: dict[int, ShardedParameter], context: PassContext
    ) -> None:
        super()._substitute_shards(module, inputs, parameters, context)
        given = context.inputs
        given.batch = frozenset(
            n for n in module.graph.find_nodes(op="placeholder") if n not in given.shards and self._is_batch(n)
        )
        if not given.batch:
            assert self._call is not None
            self.tell_unsharded(self._call.function, self._call.args, self._call.kwargs)

    def _is_batch(self, node: fx.Node) -> bool:
        example = compat.example_of(node)
        if not isinstance(example, Tensor) or example.device.type != "xla" or not example.dim():
            return False
        return self.mesh.placements([example]) == [self.mesh.batch]

    def run_passes(
        self, graphs: list[Graph], context: PassContext, captured: CapturedGraph, kind: str, made: Made = nothing
    ) -> None:
        super().run_passes(graphs, context, captured, kind, made)
        lowered = lower_global(graphs, self.spec, mesh_name(self.mesh.devices))
        for graph in graphs:
            # AOTAutograd reads the graph that it is to run: what is kept for backward is other values there.
            module = graph.module
            self._scheduled[captured.index, graph.phase] = scheduled = copy.copy(graph)
            scheduled.module = fx.GraphModule(module, graph.fx_graph)
            module.graph = lowered[graph.phase].graph

    def _make_program(self, graph: Graph, context: PassContext, captured: CapturedGraph) -> XlaProgram:
        scheduled, on_host = self._scheduled.pop((captured.index, graph.phase)), self.backend.on_host_fallback
        lowered = Lowered(Graph(graph.module, graph.phase), {})
        return XlaProgram(scheduled, lowered, self.regions, self.counter, on_host)
