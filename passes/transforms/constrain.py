"""Constraints say on the global view of a graph where XLA's partitioner must put a value.

``sharding="auto"`` of the XLA backend compiles the graph of the global batch, which XLA's partitioner divides. It keeps
to FSDP only where it is told to: a gather constrains a parameter to be replicated, a reduction a gradient to be
sharded, and activations are sharded as the batch is; else it may gather activations and leave parameters sharded.

| operator | meaning |
|---|---|
| ``constrain(value, axes, mesh)`` | ``value``, dimension ``i`` of it sharded over the mesh axes ``axes[i]`` |
| ``mark_sharding(value, axes)`` | the user's ``xs.mark_sharding`` in a forward; ``ConstrainActivations`` replaces it |

``axes`` has a string per dimension: ``""`` for one that is not sharded, ``"fsdp"``, or ``"data,fsdp"`` for several
axes. The runtime knows the mesh by the name ``mesh``. The gradient of a constrained value is constrained alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import define
from graph_fsdp.passes.ir.unit_calls import UnitCall, unit_calls

_LIBRARY = torch.library.Library("graph_fsdp", "FRAGMENT")
constrain = define(
    _LIBRARY, "constrain(Tensor value, str[] axes, str mesh) -> Tensor", lambda x, *_: torch.empty_like(x)
)
mark_sharding = define(_LIBRARY, "mark_sharding(Tensor value, str[] axes) -> Tensor", lambda x, *_: torch.empty_like(x))
fx.node.has_side_effect(mark_sharding)  # Dynamo removes calls whose result nobody reads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.axes, ctx.mesh = inputs


def _constrain_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return constrain(grad, ctx.axes, ctx.mesh), None, None


torch.library.register_autograd(constrain, _constrain_backward, setup_context=_setup_context, lib=_LIBRARY)


@dataclass(frozen=True, repr=False)
class ConstrainActivations(GraphPass):
    """Shards over the batch what goes into the model and what comes out of a unit, where the first dimension is the
    batch's, and what the user marked as marked. ``batch_axes``: the mesh axes over which the batch is sharded."""

    mesh: str
    batch_axes: str

    name = "constrain_activations"
    phases = ("capture",)
    requires = ("gathered",)
    provides = ("constrained",)

    def run(self, graph: Graph, context: PassContext) -> str:
        marked = [n for n in graph.fx_graph.nodes if n.target is mark_sharding]
        for node in marked:
            value, axes = node.args
            graph.fx_graph.erase_node(node)
            self._constrain(graph, value, list(axes))
        inputs = [n for n in graph.placeholders if n not in context.inputs.shards]
        values = [node.meta["example_value"] for node in inputs if node in context.inputs.batch]
        batches = {(given.shape[0], given.device) for given in values}
        calls = unit_calls(graph, context.model)
        constrained = 0
        for node in graph.nodes:
            value = node.meta.get("example_value")
            if node.target is constrain or not isinstance(value, Tensor) or not value.dim():
                continue
            rows: int | torch.SymInt = value.shape[0]
            # It may depend on values, and what is made on the host is not divided.
            like_a_batch = isinstance(rows, int) and (rows, value.device) in batches
            if like_a_batch and (node in context.inputs.batch or _leaves_unit(node, calls)):
                self._constrain(graph, node, [self.batch_axes, *[""] * (value.dim() - 1)])
                constrained += 1
        return f"{constrained} values constrained over {self.batch_axes}, {len(marked)} as the model says"

    def _constrain(self, graph: Graph, node: fx.Node, axes: list[str]) -> None:
        after = graph.placeholders[-1] if node.op == "placeholder" else node
        with graph.fx_graph.inserting_after(after):
            new = graph.fx_graph.call_function(constrain, (node, axes, self.mesh))
        new.meta = {k: v for k, v in node.meta.items() if k in ("example_value", "nn_module_stack", "stack_trace")}
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def _leaves_unit(node: fx.Node, calls: dict[fx.Node, UnitCall]) -> bool:
    """Say whether a value is read outside of its call of a unit. Integers do not say how compute is divided."""
    if node.op == "placeholder" or not node.meta["example_value"].is_floating_point():
        return False
    call = calls.get(node)
    return any(user.op == "output" or (call is not None and calls.get(user) != call) for user in node.users)
