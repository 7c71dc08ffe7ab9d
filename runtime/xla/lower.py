"""A scheduled graph is lowered to one program of all devices: the local view, between ``enter`` and ``exit``.

It is lowered as for any compiler that takes a graph whole (``runtime/whole.py``), with XLA's own collectives:

| functional | becomes |
|---|---|
| ``all_gather_into_tensor`` | ``barrier`` where it is not the first, ``all_gather`` with a channel of its own |
| ``reduce_scatter_tensor``, ``all_reduce`` | ``reduce_scatter``, ``all_reduce``; of a mean also a division: XLA adds |
| ``wait_tensor`` | nothing: XLA schedules |

[Note: barriers]
XLA may start a gather when the program begins, and merge gathers of one shard, and so hold every parameter at once. A
barrier over a gather's shard and the newest activation before it in the verified order keeps the gather behind that.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.compat import OpOverload, inputs_of
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.effects import is_random, is_view
from graph_fsdp.passes.ir.fake_values import fake_mode_of
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.passes.transforms.edits import reached_from
from graph_fsdp.runtime import whole
from graph_fsdp.runtime.xla import operators, random
from graph_fsdp.runtime.xla.host_fallbacks import is_of_model, module_of
from graph_fsdp.runtime.xla.operators import Placement

aten = torch.ops.aten
_GATHERS = (dialect.all_gather_start, dialect.all_gather_wait)
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution)
_MOVES = (aten._to_copy.default, aten.clone.default)  # of which torch_xla has no operation where it has the data


@dataclass(frozen=True)
class Crossing:
    """Says how an input enters, or an output leaves: placed so, with each value multiplied by ``scale``. An output with
    ``mean`` is averaged over all devices. ``shape`` is the one outside; None for equal parts put together."""

    placement: Placement
    scale: float = 1.0
    mean: bool = False
    shape: tuple[int, ...] | None = None

    @property
    def is_divided(self) -> bool:
        """Say whether devices have different values of it."""
        return not self.placement.is_replicated

    def shape_outside(self, local: Sequence[int]) -> tuple[int, ...]:
        return self.placement.global_shape(local) if self.shape is None else self.shape


class Lowered(whole.Lowering):
    """Lowers a graph that has been through all passes for XLA. ``groups`` are groups of devices by name. ``entries``
    and ``exits`` are those of its inputs and outputs; None for what is no tensor, or is returned as it came in. Without
    them nothing enters or leaves. ``each`` has a part for each device.

    ``module`` takes all inputs of the scheduled graph, each by its entry, and, if it is ``seeded``, a seed for each
    device; it returns what has to be computed of the outputs. ``returns`` says of each output where it is: ("input",
    place), ("result", place) or ("constant", value).
    """

    def __init__(
        self,
        graph: Graph,
        groups: Mapping[str, list[list[int]]],
        entries: Sequence[Crossing | None] = (),
        exits: Sequence[Crossing | None] = (),
        each: Placement | None = None,
    ) -> None:
        super().__init__(graph)
        self.groups, self.each = groups, each
        self.entries: list[Crossing | None] = [*entries] or [None] * len(self.places)
        self.exits: list[Crossing | None] = [*exits] or [None] * len(operands(graph.output))
        self.seeded = False
        self.returns: list[tuple[str, Any]] = []
        # What is not computed from parameters alone, and what of it was computed last.
        inputs = [node for node in self.places if not has_role(node, Role.SHARD)]
        self.activations = reached_from(graph, inputs, _GATHERS)
        self.newest: fx.Node | None = None
        self.channels = 0
        self.module = self.run()

    # Inputs

    def _inputs(self) -> tuple[int, ...]:
        seeds = [node for node in self.graph.fx_graph.nodes if node.target is random.seed]
        inputs, self.seeded = [*self.places, *seeds], bool(seeds)
        given = [*self.entries, *(None if self.each is None else Crossing(self.each) for _ in seeds)]
        values = [isinstance(node.meta.get("val"), Tensor) for node in inputs]
        self.entries = [entry if is_tensor else None for entry, is_tensor in zip(given, values, strict=True)]
        placeholders = [self.fx_graph.placeholder(node.name) for node in inputs]
        for node, placeholder, entry in zip(inputs, placeholders, self.entries, strict=True):
            self.values[node] = self._enter(node, placeholder, entry)
        return ()

    def _enter(self, node: fx.Node, placeholder: fx.Node, entry: Crossing | None) -> fx.Node:
        value: Any = node.meta.get("val")
        placeholder.meta["val"] = value
        if entry is None:
            return placeholder
        with fake_mode_of([node]):
            placeholder.meta["val"] = value.new_empty(entry.shape_outside(value.shape))
        place = entry.placement
        entered = self.call(operators.enter, placeholder, list(place.devices), place.tiles, name=node.name)
        if not value.dim() and entry.is_divided:
            entered = self.call(aten.reshape.default, entered, [])
        return entered if entry.scale == 1 else self.call(aten.mul.Tensor, entered, entry.scale)

    # Nodes

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.target is random.seed:
            seed: fx.Node = self.values[node]
            return seed
        if node.op == "output":
            return self._leave(node)
        _check_dtypes(node)
        copy, value = super()._copy(node), node.meta.get("val")
        if is_of_model(node) and isinstance(node.target, OpOverload) and node.target.namespace != "aten":
            self._clone_inputs(copy)
        if node.target is aten.view_as_real.default:  # torch_xla leaves it the layout of complex numbers
            copy = self.call(aten.mul.Tensor, copy, 1)
        elif node.target is operator.getitem and isinstance(value, Tensor) and value.dtype is torch.int64:
            copy = self.call(aten.add.Tensor, copy, 0)  # indices of pooling have 32 bits within XLA
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        if node in self.activations and is_number and not is_view(node):
            self.newest = copy
        return copy

    def _clone_inputs(self, node: fx.Node) -> None:
        """Give an operator whose kernel is made of others no views: torch_xla loses where these begin."""
        for value in node.all_input_nodes:
            if isinstance(value.meta.get("val"), Tensor):
                with self.fx_graph.inserting_before(node):
                    node.replace_input_with(value, self.call(aten.clone.default, value))

    def all_gather(self, shards: list[fx.Node], world_size: int, group: str, name: str) -> list[fx.Node]:
        gathered = []
        for shard in shards:
            if self.newest is not None:  # see [Note: barriers]
                shard = self.call(operator.getitem, self.call(operators.barrier, [shard, self.newest]), 0)
            self.channels += 1
            gathered.append(self.call(operators.all_gather, shard, *self._groups(group), self.channels, name=name))
        return gathered

    def reduce_scatter(self, packed: fx.Node, op: str, world_size: int, group: str, name: str) -> fx.Node:
        return self._reduced(operators.reduce_scatter, packed, op, *self._groups(group), name)

    def all_reduce(self, value: fx.Node, op: str, group: str, name: str) -> fx.Node:
        return self._reduced(operators.all_reduce, value, op, *self._groups(group), name)

    def wait(self, value: fx.Node, name: str) -> fx.Node:
        return value

    def sendable(self, value: fx.Node) -> fx.Node:
        return value  # XLA's collectives have float8, and views as bytes it has not

    def _reduced(
        self, target: Any, value: fx.Node, op: str, devices: list[int], size: int, name: str | None = None
    ) -> fx.Node:
        total = self.call(target, value, devices, size, name=name)
        return self._divided(total, float(size) if op == "avg" else None)

    def _divided(self, value: fx.Node, divisor: float | None) -> fx.Node:
        if divisor is None or not value.meta["val"].is_complex():
            return super()._divided(value, divisor)
        return self.call(aten.mul.Tensor, value, 1 / divisor)  # torch_xla's quotient of complex numbers is a real one

    def _groups(self, group: str) -> tuple[list[int], int]:
        groups = self.groups[group]
        return [device for members in groups for device in members], len(groups[0])

    # Outputs

    def _leave(self, node: fx.Node) -> fx.Node:
        results: list[fx.Node] = []
        of_host = host_data(self.graph)
        left: dict[tuple[fx.Node, Crossing | None], int] = {}
        for value, leaving in zip(operands(node), self.exits, strict=True):
            if not isinstance(value, fx.Node):
                self.returns.append(("constant", value))
            elif leaving is None and value in self.places:
                self.returns.append(("input", self.places[value]))
            else:
                if (value, leaving) not in left:
                    left[value, leaving] = len(results)
                    result = self.values[value]
                    results.append(self._moved(result) if value in of_host else self._exit(result, leaving))
                self.returns.append(("result", left[value, leaving]))
        output: fx.Node = self.fx_graph.output(tuple(results))
        self.fx_graph.eliminate_dead_code()
        self.fx_graph.lint()
        return output

    def _moved(self, value: fx.Node) -> fx.Node:
        """Return what the host has as a tensor of the device, of its own."""
        return self.call(aten.clone.default, self.call(aten._to_copy.default, value, device=compat_xla.device()))

    def _exit(self, value: fx.Node, leaving: Crossing | None) -> fx.Node:
        if leaving is None:
            return self.call(aten.clone.default, value)  # each result is a tensor of its own
        place = leaving.placement
        if leaving.mean:
            value = self._reduced(operators.all_reduce, value, "avg", list(place.devices), len(place.devices))
        if leaving.scale != 1:
            value = self.call(aten.mul.Tensor, value, leaving.scale)
        if not value.meta["val"].dim() and leaving.is_divided:
            value = self.call(aten.reshape.default, value, [1])
        shape = list(leaving.shape_outside(value.meta["val"].shape))
        return self.call(operators.exit, value, shape, list(place.devices), place.tiles)


def _check_dtypes(node: fx.Node) -> None:
    """Raise TypeError for a product of different dtypes, as other devices of torch do. XLA's own error names no one."""
    if getattr(node.target, "overloadpacket", None) in _PRODUCTS:
        dtypes = {str(operand.meta["val"].dtype): None for operand in inputs_of(node)}
        if len(dtypes) > 1:
            raise TypeError(
                f"{node.target} in {module_of(node)} is given tensors of {' and '.join(dtypes)}; cast one of them in "
                "the model's forward (mp_policy casts parameters and the inputs of units, buffers it does not)"
            )


def host_data(graph: Graph) -> set[fx.Node]:
    """Return the tensors that forward makes on the host, and those that it moves from there to the device. They are
    none of what each device computes by itself. (Random numbers are, wherever the model draws them.)"""
    computed = reached_from(graph, [*graph.placeholders, *filter(is_random, graph.fx_graph.nodes)])
    found = set[fx.Node]()
    for node in graph.fx_graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node not in computed:
            moved = node.target in _MOVES and not found.isdisjoint(inputs_of(node))
            if moved or value.device.type != "xla":
                found.add(node)
    return found


def varying_nodes(graph: Graph, entries: Sequence[Crossing | None]) -> set[fx.Node]:
    """Return what can differ between devices: what is computed from inputs that do or random numbers, without
    gathers."""
    inputs = zip(graph.placeholders, entries, strict=True)
    varying = [node for node, entry in inputs if entry is not None and entry.is_divided]
    return reached_from(graph, [*varying, *filter(is_random, graph.fx_graph.nodes)], _GATHERS)
