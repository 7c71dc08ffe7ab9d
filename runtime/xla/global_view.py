"""A scheduled graph is lowered to the global view for XLA's partitioner: collectives become constraints.

| dialect | becomes |
|---|---|
| ``all_gather_start`` | a cast where dtypes differ, and a constraint for each parameter: replicated |
| ``all_gather_wait``, ``free`` | nothing |
| a parameter's view of the buffer | the parameter |
| a buffer that is kept for backward | the parameters of it that backward reads |
| ``reduce_scatter_start`` | a cast where dtypes differ, and a constraint for each gradient: sharded |
| ``all_reduce_start``, ``all_reduce_shard_start`` | the constraint that is there says it |
| ``reduce_wait`` | nothing |

A shard of the scheduled graph is a device's rows; here the same input is the whole parameter, of which XLA keeps a part
on each device. Other values have the global batch's shape in both, so the mean over ranks is already in the loss, and
nothing is divided. XLA runs a gather when it likes, and merges two of one parameter in a graph; forward and backward
are programs of their own, so ZeRO-3 gathers twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import argument, operands
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec
from graph_fsdp.passes.transforms.constrain import constrain
from graph_fsdp.runtime import whole

aten = torch.ops.aten
_LIBRARY = torch.library.Library("graph_fsdp", "IMPL", "XLA")
_MESHES: dict[str, Any] = {}
REPLICATE, SHARD = "replicate", "fsdp"  # the axes of a mesh; rows of parameters are sharded over the second


def lower_global(graphs: Sequence[Graph], model: ModelSpec, mesh: str) -> dict[str, fx.GraphModule]:
    """Lower graphs that have been through all passes, together, as a buffer that forward keeps for backward is other
    values here; return phase → lowered graph. ``mesh`` is the name that constraints have for it."""
    reads = {bucket: names for graph in graphs for bucket, names in _read_of_kept(graph).items()}
    return {graph.phase: _Lowering(graph, model, mesh, reads).run() for graph in graphs}


def _read_of_kept(graph: Graph) -> dict[str, list[str]]:
    """Return kept bucket → the parameters of it that backward reads."""
    found: dict[str, list[str]] = {n.meta["fsdp"].bucket: [] for n in graph.with_role(Role.KEPT)}
    for node in graph.with_role(Role.UNPACK):
        if (bucket := node.meta["fsdp"].bucket) in found:
            found[bucket].append(node.meta["fsdp"].params[0])
    return {bucket: list(dict.fromkeys(names)) for bucket, names in found.items()}


class _Lowering(whole.Lowering):
    def __init__(self, graph: Graph, model: ModelSpec, mesh: str, kept: dict[str, list[str]]) -> None:
        super().__init__(graph)
        self.model, self.mesh, self.kept = model, mesh, kept
        self.parameters: dict[str, fx.Node] = {}  # gathered, or received from forward
        self.gradients: dict[str, fx.Node] = {}  # sharded

    # Inputs and outputs

    def _inputs(self) -> tuple[int, ...]:
        for node in self.graph.placeholders:
            if has_role(node, Role.KEPT):
                for name in self.kept[node.meta["fsdp"].bucket]:
                    p = self.model.spec_of(name)
                    as_input = f"kept_{name}".replace(".", "_").replace("#", "_")
                    self.parameters[name] = self.placeholder(as_input, node, p.shape, p.param_dtype)
            elif has_role(node, Role.SHARD):
                p = self.model.spec_of(node.meta["fsdp"].params[0])
                self.values[node] = self.placeholder(node.name, node, p.shape, p.dtype)
            else:
                self.values[node] = super()._copy(node)
        return ()

    def _output(self, node: fx.Node) -> fx.Node:
        outputs: list[Any] = []
        for value in operands(node):
            if isinstance(value, fx.Node) and has_role(value, Role.GATHER_WAIT):
                outputs += [self.parameters[name] for name in self.kept.get(value.meta["fsdp"].bucket, [])]
            else:
                outputs.append(self.values[value] if isinstance(value, fx.Node) else value)
        output: fx.Node = self.fx_graph.output(tuple(outputs))
        output.meta = dict(node.meta)
        return output

    # Nodes

    def _copy(self, node: fx.Node) -> Any:
        """Return None for what reads a buffer, which does not exist: slices on the way to a parameter or a gradient."""
        if node.op == "output":
            return self._output(node)
        if has_role(node, Role.UNPACK):
            return self.parameters[node.meta["fsdp"].params[0]]
        if has_role(node, Role.SHARD_GRAD) and node.meta["fsdp"].params[0] in self.gradients:
            return self.gradients[node.meta["fsdp"].params[0]]
        exist = all(self.values.get(source) is not None for source in node.all_input_nodes)
        if not exist:
            return None
        copy = _COPIES.get(node.target)
        return super()._copy(node) if copy is None else copy(self, node)

    def _scatter(self, node: fx.Node) -> Any:
        return self._whole(self._copy_of_whole(node, node.all_input_nodes), node)

    def _index_put(self, node: fx.Node) -> fx.Node:
        return self._copy_of_whole(node, [argument(node, "values")])

    def _copy_of_whole(self, node: fx.Node, sources: Sequence[fx.Node]) -> fx.Node:
        """Copy a node that reads these ``sources`` as ``_whole`` leaves them."""
        whole = {source: self._whole(self.values[source], source) for source in sources}
        copy = self.fx_graph.node_copy(node, {**self.values, **whole}.__getitem__)
        copy.meta.pop("fsdp", None)
        return copy

    def _whole(self, copied: Any, node: fx.Node) -> Any:
        """Constrain what is scattered to be replicated where its rows do not divide by the devices: XLA's partitioner
        would abort the process if it were to shard them. Mostly it is a parameter's gradient, as batches do divide."""
        value = node.meta["val"]
        if not value.dim() or value.shape[0] % _MESHES[self.mesh].size() == 0:
            return copied
        return self.call(constrain, copied, [""] * value.dim(), self.mesh, name=f"{node.name}_whole")

    def _slice_backward(self, node: fx.Node) -> fx.Node:
        grad = argument(node, "grad_output")
        if argument(node, "step") == 1 or not grad.meta["val"].numel():
            return super()._copy(node)
        return self._apart(node, self.values[grad])

    def _slice_scatter(self, node: fx.Node) -> fx.Node:
        x, source = argument(node, "self"), argument(node, "src")
        if argument(node, "step") == 1 or not source.meta["val"].numel():
            return super()._copy(node)
        written = self.call(aten.ones_like.default, self.values[source], dtype=torch.bool)
        return self.call(
            aten.where.self, self._apart(node, written), self._apart(node, self.values[source]), self.values[x]
        )

    def _apart(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """Put values into the places of a slice with a step, among zeros. torch_xla pads between them and around them
        at once, which XLA's partitioner gets wrong where it shards that dimension: here one is done after the other."""
        whole, step = node.meta["val"], argument(node, "step")
        dim = argument(node, "dim") % whole.dim()
        begin, *_ = slice(argument(node, "start"), argument(node, "end"), step).indices(whole.shape[dim])
        count, behind = value.meta["val"].shape[dim], [0, 0] * (whole.dim() - 1 - dim)
        length = (count - 1) * step + 1
        pairs = self.call(
            aten.constant_pad_nd.default, self.call(aten.unsqueeze.default, value, dim + 1), [*behind, 0, step - 1]
        )
        row = self.call(aten.view.default, pairs, [*whole.shape[:dim], count * step, *whole.shape[dim + 1 :]])
        row = self.call(aten.slice.Tensor, row, dim, 0, length)
        around = [*behind, begin, whole.shape[dim] - begin - length]
        return self.call(aten.constant_pad_nd.default, row, around)

    def gather(self, node: fx.Node) -> None:
        for shard in argument(node, "shards"):
            p = self.model.spec_of(shard.meta["fsdp"].params[0])
            value = self.cast(self.values[shard], p.param_dtype)
            self.parameters[p.name] = self._constrain(value, p, "", "gathered")

    def reduce(self, node: fx.Node) -> None:
        for name, grad in zip(node.meta["fsdp"].params, argument(node, "grads"), strict=True):
            p, value = self.model.spec_of(name), self.cast(self.values[grad], argument(node, "dtype"))
            value = self._constrain(value, p, SHARD, "reduced")
            self.gradients[name] = self.cast(value, p.dtype)

    def _constrain(self, value: fx.Node, p: ParameterSpec, first: str, what: str) -> fx.Node:
        """Constrain a value to have its rows sharded over the axes ``first``."""
        axes = [first if dim == 0 else "" for dim in range(len(p.shape))]
        return self.call(constrain, value, axes, self.mesh, name=f"{p.name}_{what}".replace(".", "_"))

    lowerings: ClassVar[dict[Any, Callable[..., Any]]] = {
        dialect.all_gather_start: gather,
        dialect.reduce_scatter_start: reduce,
        dialect.all_reduce_start: reduce,
        # The constraints that are there say it.
        **dict.fromkeys([*dialect.WAITS, dialect.all_reduce_shard_start], lambda *_: None),
    }


# What XLA's partitioner would get wrong.
_COPIES: dict[Any, Callable[[_Lowering, fx.Node], fx.Node]] = {
    **dict.fromkeys(
        (aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two), _Lowering._scatter
    ),
    aten.index_put.default: _Lowering._index_put,
    aten.slice_backward.default: _Lowering._slice_backward,
    aten.slice_scatter.default: _Lowering._slice_scatter,
}


@functools.cache
def mesh_name(devices: tuple[tuple[int, ...], ...]) -> str:
    """Return the name by which graphs know a mesh of these devices, a row for each step along the first axis. Equal
    meshes have one name."""
    import numpy

    array, name = numpy.array(devices), f"mesh{len(_MESHES)}"
    _MESHES[name] = compat_xla.spmd().Mesh(array.reshape(-1), array.shape, (REPLICATE, SHARD))
    return name


def _constrain(value: Tensor, axes: Sequence[str], mesh: str) -> Tensor:
    """Return a copy that carries the sharding, which XLA's partitioner keeps to. ``axes`` are as in
    ``passes/transforms/constrain.py``."""
    spec = tuple(tuple(a.split(",")) if "," in a else a or None for a in axes)
    return compat_xla.annotated(value, _MESHES[mesh].get_op_sharding(spec))


_LIBRARY.impl("constrain", _constrain)
