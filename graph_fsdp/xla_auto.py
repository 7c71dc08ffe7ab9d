"""``backend="xla", sharding="auto"``: the global view of a model, divided among devices by XLA's partitioner.

One process has all devices (SPMD). A parameter is a tensor of its full shape, of which each device has a part; the
optimizer, ``state_dict()`` and gradients see that tensor. Dynamo traces the batch of all devices. The passes see the
same graphs as everywhere, in which a shard is a device's rows; only the last lowering
(``runtime/xla/global_view.py``) puts constraints in the place of collectives.

What differs from a rank's own view: a loss is the mean over the global batch, random numbers are drawn for it, and
BatchNorm's statistics are of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from graph_fsdp.capture import Engine
from graph_fsdp.errors import MeshError
from graph_fsdp.passes import Graph, PassContext, compat_xla
from graph_fsdp.passes.graph import Phase
from graph_fsdp.report import CapturedGraph
from graph_fsdp.runtime.xla.constraints import mesh_name
from graph_fsdp.runtime.xla.global_program import GlobalProgram
from graph_fsdp.runtime.xla.global_view import GlobalMesh, lower_global
from graph_fsdp.runtime.xla.placement import read_placement
from graph_fsdp.unshard import UnshardedUnits
from graph_fsdp.xla_mesh import XlaMesh

ShardOutput = Callable[[Any, Any], None]
REPLICATE, SHARD = "replicate", "fsdp"


def global_mesh(mesh: XlaMesh) -> GlobalMesh:
    """As constraints name it."""
    name = mesh_name(mesh.devices, (REPLICATE, SHARD))
    batch = f"{REPLICATE},{SHARD}" if mesh.replicas > 1 else SHARD
    return GlobalMesh(name, SHARD, batch)


class _NeverWhole(UnshardedUnits):
    def unavailable(self) -> str:
        return "with sharding='auto' its parameters are whole tensors already, which XLA keeps in parts"


class GlobalEngine(Engine):
    """An engine whose graphs are lowered together, and run by XLA."""

    def __init__(self, *args: Any, xla_mesh: XlaMesh, shard_output: ShardOutput | None, **options: Any) -> None:
        super().__init__(*args, whole=True, **options)
        self.xla_mesh, self.global_mesh = xla_mesh, global_mesh(xla_mesh)
        self.unsharded = _NeverWhole(self.storage, self.counter, self.schedules.begin_unshard)
        self._scheduled: dict[tuple[int, Phase], Graph] = {}  # by captured graph

    def _find_parameters(
        self, module: fx.GraphModule, inputs: list[Any], context: PassContext
    ) -> list[tuple[int, str]]:
        substituted = super()._find_parameters(module, inputs, context)
        batch = []
        for node in module.graph.nodes:
            example = getattr(node.meta.get("grapharg"), "example", None)
            if node.op == "placeholder" and node not in context.shard_inputs and isinstance(example, Tensor):
                (spec,) = compat_xla.sharding_specs([example])
                if example.dim() and read_placement(spec, self.xla_mesh.ranks) == self.xla_mesh.batch:
                    batch.append(node)
        if not batch and self.xla_mesh.size > 1:
            axes = self.global_mesh.batch_axes
            raise MeshError(
                f"no input of the model is sharded over {axes!r}, so that every device would compute the whole batch; "
                "shard inputs before the call: xs.mark_sharding(x, mesh, ('fsdp', None, …))"
            )
        context.batch_inputs = frozenset(batch)
        return substituted

    def _run_passes(self, graphs: list[Graph], context: PassContext, captured: CapturedGraph, kind: str) -> None:
        super()._run_passes(graphs, context, captured, kind)
        lowered = lower_global(graphs, self.spec, self.global_mesh)
        for graph in graphs:
            # AOTAutograd reads the graph that it is to run: what is kept for backward is other values there.
            module = graph.module
            self._scheduled[captured.index, graph.phase] = Graph(fx.GraphModule(module, graph.fx_graph), graph.phase)
            module.graph = lowered[graph.phase].graph

    def _program(self, graph: Graph, context: PassContext, captured: CapturedGraph) -> Callable[[list[Any]], Any]:
        scheduled = self._scheduled.pop((captured.index, graph.phase))
        scheduled.cost = context.cost
        program = GlobalProgram(scheduled, graph.module, self.counter)
        captured.add_program(scheduled, context, program, None)  # type: ignore[arg-type]
        self.programs[captured.index, graph.phase] = program
        return program
