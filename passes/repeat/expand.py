"""Traces of layers take the places of the calls that stood for them (``repeat.py``, step 4).

[Note: the order of a joint graph]
Autograd runs the adjoints of operators in the reverse order of the operators. The nodes of a segment are consecutive,
so nothing comes between their adjoints. The exception are gathers: they stand in front of all other operators, and so
their adjoints behind all others, in the reverse order. The expansion puts them there.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.fake_values import VALUES, evaluate, iterate_tensors
from graph_fsdp.passes.repeat.segments import Segment
from graph_fsdp.passes.repeat.trace import NotRepeatable, Trace, repeat, repeat_backward

_NUMBER = re.compile(r"_\d+$")


class _Copies:
    """Copies nodes into ``graph``. ``of``: node → its copy, or what takes its place."""

    call: int | None = None

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.of: dict[fx.Node, fx.Node] = {}

    def add(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in self.of:
                raise NotRepeatable(f"{node} reads {source}, which would be computed behind it", self.call)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.of.__getitem__)
        name = node.name if node.op == "placeholder" else _NUMBER.sub("", node.name)
        copy = self.graph.create_node(node.op, self.target(node), self.arguments(node, args), kwargs, name, node.type)
        copy.meta = node.meta.copy()
        self.of[node] = copy
        self.describe(node, copy)

    def target(self, node: fx.Node) -> Any:
        return node.target

    def arguments(self, node: fx.Node, args: Any) -> Any:
        return args

    def describe(self, node: fx.Node, copy: fx.Node) -> None:
        """Correct the metadata of a copy. Of what is around layers: the values that lie in the memory of theirs."""
        memory = {compat.storage_id(tensor) for tensor in iterate_tensors(node.meta.get("val"))}
        for source in node.all_input_nodes:
            old, new = source.meta.get("val"), self.of[source].meta.get("val")
            if old is not new and not memory.isdisjoint(map(compat.storage_id, iterate_tensors(old))):
                copy.meta["val"] = VALUES.of(copy)
                self.check(node, copy)
                return

    def check(self, original: fx.Node, node: fx.Node) -> None:
        if _layout(original.meta.get("val")) != _layout(node.meta.get("val")):
            raise NotRepeatable(f"{node} is not laid out as {original} of the trace", self.call)


class _Layer(_Copies):
    """Copies a trace for ``segment``. ``traced``: the segment that was traced."""

    def __init__(
        self,
        graph: fx.Graph,
        into: fx.GraphModule,
        call: int,
        made: Trace,
        traced: Segment,
        segment: Segment,
    ) -> None:
        super().__init__(graph)
        self.trace, self.call, self._into = made, call, into
        self._parameters = dict(zip(traced.parameters, segment.parameters, strict=True))
        self._origins = _origins(traced, segment)

    def give(self, places: Sequence[fx.Node], given: Sequence[fx.Node], around: _Copies) -> None:
        """Nodes of the trace, ``places``, are those of the graph around, ``given``, as far as these are there."""
        for place, node in zip(places, given, strict=True):
            if node in around.of:
                self.of[place] = around.of[node]
                self.check(place, around.of[node])

    def parameter(self, node: fx.Node) -> str:
        """What a gather or a reduction of the trace gathers or reduces here."""
        return self._parameters[dialect.parameter_of(node)]

    def target(self, node: fx.Node) -> Any:
        if node.op != "get_attr":
            return node.target
        name = f"_repeated_{self.trace.index}_{node.target}"  # a constant; the layers share it
        setattr(self._into, name, getattr(self.trace.module, str(node.target)))
        return name

    def arguments(self, node: fx.Node, args: Any) -> Any:
        is_named = node.target is dialect.gather_param or node.target is dialect.reduce_grad
        return dialect.with_parameter(node.target, args, self.parameter(node)) if is_named else args

    def describe(self, node: fx.Node, copy: fx.Node) -> None:
        for key, renamed in self._origins.items():
            if key in copy.meta:
                copy.meta[key] = renamed.get(_hashable(copy.meta[key]), copy.meta[key])
        if node.op == "call_function":
            copy.meta["val"] = self._value(copy)
            self.check(node, copy)

    def _value(self, copy: fx.Node) -> Any:
        if copy.all_input_nodes:
            return VALUES.of(copy)
        with compat.current_fake_mode():
            return evaluate(copy)


class Expansion:
    """``module`` is the trace of a graph in which ``calls`` stand for layers: per call the trace, the segment that was
    traced and the one that is meant. ``gathered``: all parameters in the order of their gathers in Dynamo's graph."""

    def __init__(
        self, module: fx.GraphModule, calls: Sequence[tuple[Trace, Segment, Segment]], gathered: Sequence[str]
    ) -> None:
        self.module, self.gathered = module, gathered
        self.graph = fx.Graph()
        self.around = _Copies(self.graph)
        self.layers = [_Layer(self.graph, module, index, *call) for index, call in enumerate(calls)]
        # A gradient's reduction → where it comes from; what reads it.
        self._reductions: dict[str, tuple[_Copies, fx.Node]] = {}
        self._reduced: list[tuple[fx.Node, _Layer, fx.Node]] = []

    def run(self) -> None:
        """Raises NotRepeatable where the expanded graph would not be what a whole trace is."""
        nodes = list(self.module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self.around.add(node)
        self._gather(nodes)
        for node in nodes:
            if node.op == "placeholder" or node.target is dialect.gather_param or _is_result(node):
                continue
            if node.target is repeat:
                self._forward(node)
            elif node.target is repeat_backward:
                self._backward(node)
            elif node.target is dialect.reduce_grad:
                self._reductions[dialect.parameter_of(node)] = (self.around, node)
            else:
                if node.op == "output":
                    self._reduce()
                self.around.add(node)
        self.module.graph = self.graph

    def _gather(self, nodes: Sequence[fx.Node]) -> None:
        gathers: dict[str, tuple[_Copies, fx.Node]] = {}
        for node in nodes:
            if node.target is dialect.gather_param:
                gathers[dialect.parameter_of(node)] = (self.around, node)
            elif node.target is repeat:
                layer, given = self._layer(node)
                layer.give(layer.trace.inputs, given, self.around)
                for original in layer.trace.forward:
                    if original.target is dialect.gather_param:
                        gathers[layer.parameter(original)] = (layer, original)
        for name in self.gathered:
            if name in gathers:
                copies, original = gathers[name]
                copies.add(original)

    def _forward(self, node: fx.Node) -> None:
        layer, given = self._layer(node)
        layer.give(layer.trace.inputs, given, self.around)
        for original in layer.trace.forward:
            if original.target is not dialect.gather_param:
                layer.add(original)
        for result in node.users:
            self.around.of[result] = layer.of[layer.trace.outputs[_index(result)]]

    def _backward(self, node: fx.Node) -> None:
        layer, given = self._layer(node)
        layer.give(layer.trace.tangents, given, self.around)
        for original in layer.trace.backward:
            if original.target is dialect.reduce_grad:
                self._reductions[layer.parameter(original)] = (layer, original)
            else:
                layer.add(original)
        for result in node.users:
            gradient = layer.trace.found_gradients[_index(result)]
            if gradient.target is dialect.reduce_grad:
                self._reduced.append((result, layer, gradient))
            else:
                self.around.of[result] = layer.of[gradient]

    def _reduce(self) -> None:
        for name in reversed(self.gathered):
            if name in self._reductions:
                copies, original = self._reductions[name]
                copies.add(original)
        for result, layer, gradient in self._reduced:
            self.around.of[result] = layer.of[gradient]

    def _layer(self, node: fx.Node) -> tuple[_Layer, Any]:
        given, _, call_index = node.args
        assert isinstance(call_index, int)
        return self.layers[call_index], given


def _is_result(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and (source.target is repeat or source.target is repeat_backward)


def _origins(traced: Segment, segment: Segment) -> dict[str, dict[Hashable, Any]]:
    """Where nodes come from: per kind of metadata, that of the traced segment → that of this one."""
    found: dict[str, dict[Hashable, Any]] = {}
    for key, source in (("stack_trace",) * 2, ("nn_module_stack",) * 2, ("fwd_nn_module_stack", "nn_module_stack")):
        olds, news = ([node.meta.get(source) for node in s.nodes] for s in (traced, segment))
        pairs = zip(olds, news, strict=True)
        found[key] = {_hashable(old): new for old, new in pairs if old is not None and new is not None}
    return found


def _hashable(value: Any) -> Hashable:
    return tuple(value.items()) if isinstance(value, dict) else value


def _layout(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.device)
    return tuple(map(_layout, value)) if isinstance(value, (tuple, list)) else type(value)


def _index(result: fx.Node) -> int:
    """Of the output of a call that a ``getitem`` takes."""
    index = result.args[1]
    assert isinstance(index, int)
    return index
