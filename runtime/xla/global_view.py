"""A scheduled graph as one of the global view, for XLA's partitioner: collectives become constraints.

| dialect | becomes |
|---|---|
| ``all_gather_start`` | a cast where dtypes differ, and a constraint for each parameter: replicated |
| ``all_gather_wait``, ``free`` | nothing |
| a parameter's view of the buffer | the parameter |
| a buffer that is kept for backward | the parameters of it that backward reads |
| ``reduce_scatter_start`` | a cast where dtypes differ, and a constraint for each gradient: sharded |
| ``all_reduce_start``, ``all_reduce_shard_start`` | the constraint that is there says it |
| ``reduce_wait`` | nothing |

The scheduled graph is in the local view: a shard is a device's rows. Here the same input is the whole parameter, of
which XLA keeps a part on each device. Values that are no shards have the global batch's shape in both. So the mean over
ranks is already in the loss, and nothing is divided.

Nodes keep their order, but XLA has its own: it runs a gather when it likes, and merges two of one parameter in a graph.
Forward and backward are programs of their own, so what is gathered again in backward (ZeRO-3) is gathered twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role, set_record
from graph_fsdp.passes.ir.fake_values import VALUES, fake_mode_of
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec
from graph_fsdp.passes.transforms.constrain import constrain

aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default


class NotInGlobalView(ValueError):
    """Something of the graph has no meaning in the global view."""


@dataclass(frozen=True)
class GlobalMesh:
    """``name``: of the mesh, as constraints say it; the axes over which parameters and the batch are sharded."""

    name: str
    shard_axes: str
    batch_axes: str


def lower_global(graphs: Sequence[Graph], model: ModelSpec, mesh: GlobalMesh) -> dict[str, fx.GraphModule]:
    """Lower graphs that have been through all passes, together: a buffer that forward keeps for backward is other
    values here. They stay as they are. Phase → lowered graph.

    Raises:
        NotInGlobalView: a collective of the graph is something else than a gather or a mean.
    """
    reads = {bucket: names for graph in graphs for bucket, names in _read_of_kept(graph).items()}
    with torch.no_grad():
        return {graph.phase: _Lowering(graph, model, mesh, reads).run() for graph in graphs}


def _read_of_kept(graph: Graph) -> dict[str, list[str]]:
    """Kept bucket → the parameters of it that backward reads."""
    found: dict[str, list[str]] = {n.meta["fsdp"].bucket: [] for n in graph.with_role(Role.KEPT)}
    for node in graph.with_role(Role.UNPACK):
        if (bucket := node.meta["fsdp"].bucket) in found:
            found[bucket].append(node.meta["fsdp"].params[0])
    return {bucket: list(dict.fromkeys(names)) for bucket, names in found.items()}


class _Lowering:
    def __init__(self, graph: Graph, model: ModelSpec, mesh: GlobalMesh, kept: dict[str, list[str]]) -> None:
        self.graph, self.model, self.mesh, self.kept = graph, model, mesh, kept
        self.fx_graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}  # node of the scheduled graph → what takes its place
        self.parameters: dict[str, fx.Node] = {}  # gathered, or received from forward
        self.gradients: dict[str, fx.Node] = {}  # sharded

    def run(self) -> fx.GraphModule:
        for node in self.graph.fx_graph.nodes:
            if node.op == "placeholder":
                self._input(node)
            elif node.op == "output":
                self._output(node)
            elif node.target in dialect.EXECUTED:
                self._collective(node)
            elif has_role(node, Role.UNPACK):
                self.values[node] = self.parameters[node.meta["fsdp"].params[0]]
            elif has_role(node, Role.SHARD_GRAD) and node.meta["fsdp"].params[0] in self.gradients:
                self.values[node] = self.gradients[node.meta["fsdp"].params[0]]
            elif all(source in self.values for source in node.all_input_nodes):
                self.values[node] = self._copy(node)
            # What is left out reads a buffer, which does not exist: slices on the way to a parameter or a gradient.
        self.fx_graph.lint()
        return fx.GraphModule(self.graph.module, self.fx_graph)

    # Inputs and outputs

    def _input(self, node: fx.Node) -> None:
        if has_role(node, Role.KEPT):
            for name in self.kept[node.meta["fsdp"].bucket]:
                p = self.model.spec_of(name)
                kept = self._placeholder(f"kept_{name}", node, p.stored_shape, p.param_dtype)
                self.parameters[name] = set_record(kept, replace(node.meta["fsdp"], params=(name,)))
            return
        if has_role(node, Role.KEPT_SHARD, Role.PAYLOAD):
            raise NotInGlobalView(f"{node.name} has no meaning in the global view of a graph")
        if not has_role(node, Role.SHARD):
            self.values[node] = self._copy(node)
            return
        p = self.model.spec_of(node.meta["fsdp"].params[0])
        whole = self._placeholder(node.name, node, p.shape, p.dtype)
        self.values[node] = whole

    def _placeholder(self, name: str, like: fx.Node, shape: Iterable[int], dtype: torch.dtype) -> fx.Node:
        node = self.fx_graph.placeholder(name.replace(".", "_").replace("#", "_"))
        with fake_mode_of([like]):
            node.meta["val"] = like.meta["val"].new_empty(tuple(shape), dtype=dtype)
        return node

    def _output(self, node: fx.Node) -> None:
        outputs: list[Any] = []
        for value in operands(node):
            if isinstance(value, fx.Node) and has_role(value, Role.GATHER_WAIT):
                outputs += [self.parameters[name] for name in self.kept.get(value.meta["fsdp"].bucket, [])]
            else:
                outputs.append(self.values[value] if isinstance(value, fx.Node) else value)
        output = self.fx_graph.output(tuple(outputs))
        output.meta = dict(node.meta)

    def _copy(self, node: fx.Node) -> fx.Node:
        copy = self.fx_graph.node_copy(node, self.values.__getitem__)
        copy.meta.pop("fsdp", None)
        return copy

    def call(self, target: Any, *args: Any, name: str | None = None) -> fx.Node:
        node = self.fx_graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = VALUES.of(node)
        return node

    # Collectives

    def _collective(self, node: fx.Node) -> None:
        if node.target in (dialect.all_gather_start, dialect.reduce_scatter_start, dialect.all_reduce_start):
            self._check_mean(node)
        if node.target is dialect.all_gather_start:
            for shard in dialect.argument(node, "shards"):
                self._gather(self.model.spec_of(shard.meta["fsdp"].params[0]), self.values[shard])
        elif node.target in (dialect.reduce_scatter_start, dialect.all_reduce_start):
            for name, grad in zip(node.meta["fsdp"].params, dialect.argument(node, "grads"), strict=True):
                self._reduce(self.model.spec_of(name), self.values[grad], dialect.argument(node, "dtype"))
        elif node.target in (dialect.all_gather_wait, dialect.reduce_wait, dialect.free):
            pass
        elif node.target is not dialect.all_reduce_shard_start:
            raise NotInGlobalView(f"{node.target} ({node.name}) has no meaning in the global view of a graph")

    @staticmethod
    def _check_mean(node: fx.Node) -> None:
        special = dialect.is_custom(node)
        if node.target is not dialect.all_gather_start:
            special |= dialect.argument(node, "factor") is not None or bool(dialect.argument(node, "summed"))
        if special:
            raise NotInGlobalView(f"{node.name}: XLA runs this collective, and it is a gather or a mean")

    def _gather(self, p: ParameterSpec, shard: fx.Node) -> None:
        """The parameter as it is stored, whole on each device."""
        value = self._of_dtype(shard, p.param_dtype)
        value = self._constrain(value, [""] * len(p.shape), f"{p.name}_gathered")
        self.parameters[p.name] = self._moved(value, p.shard_dim, 0)

    def _reduce(self, p: ParameterSpec, grad: fx.Node, dtype: torch.dtype) -> None:
        value = self._moved(self._of_dtype(grad, dtype), 0, p.shard_dim)
        axes = [self.mesh.shard_axes if dim == p.shard_dim else "" for dim in range(len(p.shape))]
        value = self._constrain(value, axes, f"{p.name}_reduced")
        self.gradients[p.name] = self._of_dtype(value, p.dtype)

    def _constrain(self, value: fx.Node, axes: list[str], name: str) -> fx.Node:
        return self.call(constrain, value, axes, self.mesh.name, name=name.replace(".", "_"))

    def _of_dtype(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        return value if value.meta["val"].dtype is dtype else self.call(_cast, value, dtype)

    def _moved(self, value: fx.Node, source: int, destination: int) -> fx.Node:
        found = value.meta["val"]
        if source == destination:
            return value
        assert isinstance(found, Tensor)
        order = list(range(found.dim()))
        order.insert(destination, order.pop(source))
        return self.call(aten.permute.default, value, order)
