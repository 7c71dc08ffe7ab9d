"""Constraints on the global view of a graph: where XLA's partitioner must put a value.

``sharding="auto"`` of the XLA backend compiles the graph of the global batch, and XLA's partitioner divides it among
the devices. It keeps to FSDP only where it is told to: a gather is the constraint that a parameter is replicated, a
reduction the constraint that a gradient is sharded, and an activation is constrained to be sharded as the batch is.
Without the last, the partitioner may gather activations and leave parameters sharded.

| operator | meaning |
|---|---|
| ``constrain(value, axes, mesh)`` | ``value``, dimension ``i`` of it sharded over the mesh axes ``axes[i]`` |
| ``mark_sharding(value, axes)`` | the user's ``xs.mark_sharding`` in a forward; ``ConstrainActivations`` replaces it |

``axes`` has a string per dimension: ``""`` for a dimension that is not sharded, ``"fsdp"``, or ``"data,fsdp"`` for one
that is sharded over several. ``mesh`` is a name that the runtime knows the mesh by. The gradient of a constrained value
is constrained alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.unit_calls import unit_calls

_LIBRARY = torch.library.Library("graph_fsdp", "FRAGMENT")
_LIBRARY.define("constrain(Tensor value, str[] axes, str mesh) -> Tensor")
_LIBRARY.define("mark_sharding(Tensor value, str[] axes) -> Tensor")

constrain = torch.ops.graph_fsdp.constrain.default
mark_sharding = torch.ops.graph_fsdp.mark_sharding.default
fx.node.has_side_effect(mark_sharding)  # Dynamo removes calls whose result nobody reads


@torch.library.register_fake("graph_fsdp::constrain", lib=_LIBRARY)
def _(value: Tensor, axes: Sequence[str], mesh: str) -> Tensor:
    return torch.empty_like(value)


@torch.library.register_fake("graph_fsdp::mark_sharding", lib=_LIBRARY)
def _(value: Tensor, axes: Sequence[str]) -> Tensor:
    return torch.empty_like(value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.axes, ctx.mesh = inputs


def _constrain_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return constrain(grad, ctx.axes, ctx.mesh), None, None


torch.library.register_autograd(
    "graph_fsdp::constrain", _constrain_backward, setup_context=_setup_context, lib=_LIBRARY
)


class ConstrainActivations(GraphPass):
    """What goes into the model and what comes out of a unit is sharded over the batch, as far as its first dimension
    is the batch's; what the user marked, as marked. ``batch_axes``: the mesh axes over which the batch is sharded."""

    name = "constrain_activations"
    phases = ("capture",)
    requires = ("gathered",)
    provides = ("constrained",)

    def __init__(self, mesh: str, batch_axes: str) -> None:
        self.mesh, self.batch_axes = mesh, batch_axes

    def run(self, graph: Graph, context: PassContext) -> str:
        marked = self._constrain_marked(graph)
        inputs = [n for n in graph.placeholders if n not in context.shard_inputs]
        sizes = {n.meta["example_value"].shape[0] for n in inputs if n in context.batch_inputs}
        calls = unit_calls(graph, context.model)
        constrained = 0
        for node in list(graph.fx_graph.nodes):
            if node.target is constrain or not self._is_batch(node, sizes):
                continue
            if node in context.batch_inputs or self._leaves_unit(node, calls):
                self._constrain(graph, node, self.batch_axes)
                constrained += 1
        return f"{constrained} values constrained over {self.batch_axes}, {marked} as the model says"

    def _constrain(self, graph: Graph, node: fx.Node, first: str) -> None:
        dims = node.meta["example_value"].dim()
        self._insert(graph, node, [first, *[""] * (dims - 1)])

    def _insert(self, graph: Graph, node: fx.Node, axes: list[str]) -> None:
        after = graph.placeholders[-1] if node.op == "placeholder" else node
        with graph.fx_graph.inserting_after(after):
            new = graph.fx_graph.call_function(constrain, (node, axes, self.mesh))
        new.meta = {k: v for k, v in node.meta.items() if k in ("example_value", "nn_module_stack", "stack_trace")}
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    def _constrain_marked(self, graph: Graph) -> int:
        found = [n for n in graph.fx_graph.nodes if n.target is mark_sharding]
        for node in found:
            value, axes = node.args
            graph.fx_graph.erase_node(node)
            self._insert(graph, value, list(axes))
        return len(found)

    @staticmethod
    def _is_batch(node: fx.Node, sizes: set[int]) -> bool:
        value = node.meta.get("example_value")
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] in sizes

    @staticmethod
    def _leaves_unit(node: fx.Node, calls: dict[fx.Node, Any]) -> bool:
        """It is read outside of the call of the unit that computes it. Integers do not say how compute is divided."""
        if node.op == "placeholder" or not node.meta["example_value"].is_floating_point():
            return False
        call = calls.get(node)
        return any(user.op == "output" or (call is not None and calls.get(user) != call) for user in node.users)
