"""A scheduled graph as one program of all devices: the local view, between ``enter`` and ``exit``.

The dialect becomes functional collectives first (``runtime/functional.py``), and these become XLA's:

| functional | becomes |
|---|---|
| ``all_gather_into_tensor`` | ``barrier`` where it is not the first, ``all_gather`` with a channel of its own |
| ``reduce_scatter_tensor``, ``all_reduce`` | ``reduce_scatter``, ``all_reduce``; of a mean also a division: XLA adds |
| ``wait_tensor`` | nothing: XLA schedules |

[Note: barriers]
XLA may start a gather as soon as its shard is there, which is when the program begins, and gathers of one shard may be
merged into one. Both would hold every parameter at the same time. A barrier over a gather's shard and the newest
activation that was computed before it in the verified order keeps the gather behind that.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.effects import is_random, is_view
from graph_fsdp.passes.ir.fake_values import VALUES, fake_mode_of
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.runtime import functional
from graph_fsdp.runtime.xla import operators, random
from graph_fsdp.runtime.xla.placement import Placement

aten = torch.ops.aten
_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class ProgramInput:
    """How an input enters: sharded so, each value multiplied by ``scale``. ``local``: its shape on a device.
    ``is_shard``: of a parameter."""

    placement: Placement
    local: tuple[int, ...]
    scale: float = 1.0
    is_shard: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the input, where its parts are equal."""
        return self.placement.global_shape(self.local)


@dataclass(frozen=True)
class Exit:
    """How an output leaves: sharded so, each value multiplied by ``scale``; ``mean``: over all devices. ``shape``: of
    what leaves; None for equal parts put together."""

    placement: Placement
    shape: tuple[int, ...] | None = None
    scale: float = 1.0
    mean: bool = False


@dataclass(frozen=True)
class Lowered:
    """``module`` takes all inputs of the scheduled graph, and, if it is ``seeded``, a seed for each device; it returns
    what has to be computed of the outputs. ``returns`` says of each output where it is: ("input", place), ("result",
    place) or ("constant", value)."""

    module: fx.GraphModule
    returns: tuple[tuple[str, Any], ...]
    seeded: bool = False


def lower(
    graph: Graph,
    groups: Mapping[str, list[list[int]]],
    entries: Sequence[ProgramInput | None],
    exits: Sequence[Exit | None],
    each: Placement,
    *,
    barriers: bool = True,
) -> Lowered:
    """Lower a graph that has been through all passes. It stays as it is. ``entries`` and ``exits``: of its inputs and
    outputs; None for what is no tensor, or is returned as it came in. ``each``: a part for each device."""
    with torch.no_grad():
        module = functional.lower(graph, grouped=False, slices=False).module
        return Translation(module, groups, each, barriers).run(entries, exits)


class Translation:
    """Translates one graph, whose collectives are functional ones."""

    def __init__(
        self, module: fx.GraphModule, groups: Mapping[str, list[list[int]]], each: Placement, barriers: bool
    ) -> None:
        self.module, self.groups, self.each, self.barriers = module, groups, each, barriers
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.entries: dict[fx.Node, ProgramInput] = {}  # of inputs that have not entered yet
        self.activations: set[fx.Node] = set()  # what is not computed from parameters alone; of the graph translated
        self.newest: fx.Node | None = None  # the activation that was computed last
        self.channels = 0

    def run(self, entries: Sequence[ProgramInput | None], exits: Sequence[Exit | None]) -> Lowered:
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        for node, entry in zip(placeholders, entries, strict=True):
            self.values[node] = self.graph.placeholder(node.name)
            if entry is not None:
                self._give_shape(self.values[node], node, entry)
                self.entries[node] = entry
                if not entry.is_shard:
                    self.activations.add(node)
        seeds = [node for node in self.module.graph.nodes if node.target is random.seed]
        for node in seeds:
            self.values[node] = self.graph.placeholder("seed")
            entry = ProgramInput(self.each, ())
            self._give_shape(self.values[node], node, entry)
            self.entries[node] = entry
        for node in self.module.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._translate(node)
        lowered = self._leave(placeholders, exits)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return Lowered(fx.GraphModule(self.module, self.graph), lowered, bool(seeds))

    def _give_shape(self, placeholder: fx.Node, local: fx.Node, entry: ProgramInput) -> None:
        with fake_mode_of([local]):
            value = local.meta["val"]
            placeholder.meta["val"] = torch.empty(entry.shape, dtype=value.dtype, device=value.device)

    def call(self, target: Any, *args: Any, name: str | None = None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = VALUES.of(node)
        return node

    def value(self, node: fx.Node) -> fx.Node:
        """Return a value of the local view; an input enters before its first use."""
        entry = self.entries.pop(node, None)
        if entry is not None:
            self.values[node] = self._enter(node, entry)
        return self.values[node]

    def _enter(self, node: fx.Node, entry: ProgramInput) -> fx.Node:
        place = entry.placement
        entered = self.call(operators.enter, self.values[node], list(place.devices), place.tiles, name=node.name)
        if not entry.local and not place.is_replicated:
            entered = self.call(aten.reshape.default, entered, [])
        if entry.scale != 1:
            entered = self.call(aten.mul.Tensor, entered, entry.scale)
        return entered

    def _translate(self, node: fx.Node) -> None:
        target: Any = node.target
        if not self.activations.isdisjoint(node.all_input_nodes):
            self.activations.add(node)
        if target is random.seed:
            return
        if target is _functional.wait_tensor.default:
            self.values[node] = self._argument(node, 0)
        elif target is _functional.all_gather_into_tensor.default:
            self.values[node] = self._gather(node)
        elif target is _functional.reduce_scatter_tensor.default:
            source, op, _, group = node.args
            reduced = self._collective(operators.reduce_scatter, source, group, node.name)
            self.values[node] = self._mean(reduced, op, group)
        elif target is _functional.all_reduce.default:
            source, op, group = node.args
            reduced = self._collective(operators.all_reduce, source, group, node.name)
            self.values[node] = self._mean(reduced, op, group)
        else:
            copy = self.graph.node_copy(node, self.value)
            self.values[node] = copy
            value = copy.meta.get("val")
            if (
                node in self.activations
                and isinstance(value, Tensor)
                and value.is_floating_point()
                and not is_view(node)
            ):
                self.newest = copy

    def _argument(self, node: fx.Node, index: int) -> fx.Node:
        source = node.args[index]
        assert isinstance(source, fx.Node)
        return self.value(source)

    def _groups(self, group: Any) -> tuple[list[int], int]:
        groups = self.groups[group]
        return [device for members in groups for device in members], len(groups[0])

    def _gather(self, node: fx.Node) -> fx.Node:
        source = self._argument(node, 0)
        if self.barriers and self.newest is not None:  # see [Note: barriers]
            source = self.call(operator.getitem, self.call(operators.barrier, [source, self.newest]), 0)
        self.channels += 1
        return self.call(operators.all_gather, source, *self._groups(node.args[2]), self.channels, name=node.name)

    def _collective(self, target: Any, source: Any, group: Any, name: str) -> fx.Node:
        return self.call(target, self.value(source), *self._groups(group), name=name)

    def _mean(self, reduced: fx.Node, op: Any, group: Any) -> fx.Node:
        return self.call(aten.div.Tensor, reduced, float(self._groups(group)[1])) if op == "avg" else reduced

    # Outputs

    def _leave(self, placeholders: list[fx.Node], exits: Sequence[Exit | None]) -> tuple[tuple[str, Any], ...]:
        output = next(node for node in reversed(self.module.graph.nodes) if node.op == "output")
        values: Any = output.args[0]
        results: list[fx.Node] = []
        left: dict[tuple[fx.Node, Exit], int] = {}
        returns: list[tuple[str, Any]] = []
        for value, leaving in zip(values, exits, strict=True):
            if not isinstance(value, fx.Node):
                returns.append(("constant", value))
            elif leaving is None:
                returns.append(("input", placeholders.index(value)))
            else:
                key = (value, leaving)
                if key not in left:
                    left[key] = len(results)
                    results.append(self._exit(self.value(value), leaving))
                returns.append(("result", left[key]))
        self.graph.output(tuple(results))
        return tuple(returns)

    def _exit(self, value: fx.Node, leaving: Exit) -> fx.Node:
        place = leaving.placement
        if leaving.mean:
            devices = list(place.devices)
            value = self.call(operators.all_reduce, value, devices, len(devices))
            value = self.call(aten.div.Tensor, value, float(len(devices)))
        if leaving.scale != 1:
            value = self.call(aten.mul.Tensor, value, leaving.scale)
        if not value.meta["val"].dim() and not place.is_replicated:
            value = self.call(aten.reshape.default, value, [1])
        shape = leaving.shape if leaving.shape is not None else place.global_shape(value.meta["val"].shape)
        return self.call(operators.exit, value, list(shape), list(place.devices), place.tiles)


def varying_nodes(graph: Graph, inputs: Sequence[bool]) -> set[fx.Node]:
    """What can differ between devices, of a graph whose ``inputs`` do or do not: all that is computed from such, but
    for what is gathered. Random numbers are each device's own."""
    found = {node for node, varies in zip(graph.placeholders, inputs, strict=True) if varies}
    for node in graph.fx_graph.nodes:
        if node.op in ("placeholder", "output") or node.target in (dialect.all_gather_start, dialect.all_gather_wait):
            continue
        if is_random(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
