"""``backend="xla", sharding="auto"``: the global view of a model, divided among devices by XLA's partitioner.

One process has all devices (SPMD). A parameter is a tensor of its full shape, of which each device has a part; the
optimizer, ``state_dict()`` and gradients see that tensor. Dynamo traces the batch of all devices. The passes see the
same graphs as everywhere, in which a shard is a device's rows; only the last lowering
(``runtime/xla/global_view.py``) puts constraints in the place of collectives.

What differs from a rank's own view: a loss is the mean over the global batch, random numbers are drawn for it, and
BatchNorm's statistics are of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from graph_fsdp.capture import Engine
from graph_fsdp.errors import MeshError
from graph_fsdp.passes import Graph, PassContext, compat, compat_xla
from graph_fsdp.passes.graph import Phase
from graph_fsdp.passes.spec import ModelSpec, ParameterSpec
from graph_fsdp.report import CapturedGraph
from graph_fsdp.runtime.xla.constraints import mesh_name, place
from graph_fsdp.runtime.xla.global_program import GlobalProgram
from graph_fsdp.runtime.xla.global_view import GlobalMesh, lower_global
from graph_fsdp.runtime.xla.placement import read_placement
from graph_fsdp.sharding import ShardedParameter
from graph_fsdp.unshard import UnshardedUnits
from graph_fsdp.xla_mesh import XlaMesh

ShardOutput = Callable[[Any, Any], None]
REPLICATE, SHARD = "replicate", "fsdp"


def global_mesh(mesh: XlaMesh) -> GlobalMesh:
    """As constraints name it."""
    name = mesh_name(mesh.devices, (REPLICATE, SHARD))
    batch = f"{REPLICATE},{SHARD}" if mesh.replicas > 1 else SHARD
    return GlobalMesh(name, SHARD, batch)


class GlobalStorage:
    """The parameters of a model, whole tensors that XLA keeps in parts. To the engine it is what ``Storage`` is.

    A parameter that computes in its own dtype is its own placeholder: Dynamo traces it, and graphs take it.
    """

    has_memory = True
    mesh = None  # no ranks: one process has all devices

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        originals: dict[str, nn.Parameter],
        names: dict[nn.Parameter, list[str]],
        mesh: GlobalMesh,
    ) -> None:
        self.spec, self.device, self.active = spec, compat_xla.device(), False
        self.parameters: dict[str, ShardedParameter] = {}
        for name, p in spec.parameters.items():
            owners = tuple(_owner(model, full_name) for full_name in names[originals[name]])
            shard = self._placed(originals[name], p, mesh)
            placeholder = shard
            if p.param_dtype is not p.dtype:
                made = compat_xla.without_memory(p.shape, p.param_dtype, self.device, shard.requires_grad, nn.Parameter)
                placeholder = made  # type: ignore[assignment]
            self.parameters[name] = ShardedParameter(p, owners, placeholder, shard, shard, shard, filled=True)
        self.by_placeholder = {id(p.placeholder): p for p in self.parameters.values()}

    def _placed(self, original: nn.Parameter, p: ParameterSpec, mesh: GlobalMesh) -> nn.Parameter:
        """On XLA's devices; the same object where it is there already."""
        axes = [SHARD if dim == p.shard_dim else "" for dim in range(len(p.shape))]
        if original.device.type == "xla":
            place(original.data, axes, mesh.name)
            return original
        value = original.detach().to(self.device)
        place(value, axes, mesh.name)
        shard = nn.Parameter(value, requires_grad=original.requires_grad)
        shard.__dict__.update(original.__dict__)
        return shard

    def install(self, model: nn.Module) -> None:
        for p in self.parameters.values():
            _register(p, p.shard)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self.device:
                    module._buffers[name] = buffer.to(self.device)
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.device != self.device:  # ignored
                    module._parameters[name] = nn.Parameter(parameter.detach().to(self.device), parameter.requires_grad)

    @contextlib.contextmanager
    def placeholders_registered(self) -> Iterator[None]:
        self.active = True
        cast = [p for p in self.parameters.values() if p.placeholder is not p.shard]
        try:
            for p in cast:
                _register(p, p.placeholder)
            yield
        finally:
            for p in cast:
                _register(p, p.shard)
            self.active = False

    def without_placeholders(self, outputs: Any) -> Any:
        return compat.tree_map_only(nn.Parameter, self._registered, outputs)

    def _registered(self, p: nn.Parameter) -> nn.Parameter:
        found = self.by_placeholder.get(id(p))
        return p if found is None else found.shard

    def refresh(self) -> None:
        """Take over what the user did to parameters since the last forward."""
        for p in self.parameters.values():
            module, leaf = p.owners[0]
            registered: Any = module._parameters[leaf]
            if registered is not p.shard:
                p.shard = p.input = p.local = registered
            if p.placeholder is not p.shard and p.spec.param_dtype is p.spec.dtype:
                del self.by_placeholder[id(p.placeholder)]
                p.placeholder = p.shard
                self.by_placeholder[id(p.placeholder)] = p
            elif p.placeholder.requires_grad != p.shard.requires_grad:
                p.placeholder.requires_grad_(p.shard.requires_grad)

    def inputs_after_refresh(self) -> dict[str, Tensor]:
        self.refresh()
        return {name: p.shard for name, p in self.parameters.items()}


class _NeverWhole(UnshardedUnits):
    def unavailable(self) -> str:
        return "with sharding='auto' its parameters are whole tensors already, which XLA keeps in parts"


class GlobalEngine(Engine):
    """An engine whose graphs are lowered together, and run by XLA."""

    def __init__(self, *args: Any, xla_mesh: XlaMesh, shard_output: ShardOutput | None, **options: Any) -> None:
        super().__init__(*args, whole=True, **options)
        self.xla_mesh, self.global_mesh = xla_mesh, global_mesh(xla_mesh)
        self.unsharded = _NeverWhole(self.storage, self.counter, self.schedules.begin_unshard)
        self.schedules.ranks = (0,)
        self._scheduled: dict[int, Graph] = {}  # by the module that AOTAutograd has of it

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
            scheduled = Graph(fx.GraphModule(module, graph.fx_graph), graph.phase)
            self._scheduled[id(module)] = scheduled
            module.graph = lowered[graph.phase].graph

    def _program(self, graph: Graph, context: PassContext, captured: CapturedGraph) -> Callable[[list[Any]], Any]:
        scheduled = self._scheduled.pop(id(graph.module))
        scheduled.cost = context.cost
        program = GlobalProgram(scheduled, graph.module, self.counter)
        captured.add_program(scheduled, context, program, None)  # type: ignore[arg-type]
        phase: Phase = graph.phase
        self.programs[captured.index, phase] = program
        return program


def _register(p: ShardedParameter, value: nn.Parameter) -> None:
    for module, leaf in p.owners:
        module._parameters[leaf] = value


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
