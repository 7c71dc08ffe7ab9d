"""Equal layers are traced once: AOTAutograd sees each of them as one operator, whose trace is put in its place later.

AOTAutograd spends some milliseconds on every operator of a model: metadata, autograd, functionalisation, decomposition.
Layers of one class repeat the same trace. So, between Dynamo's graph and the joint graph:

1. *find*: a segment of Dynamo's graph runs from the first use of a unit's parameters to that of the next unit's. Two
   segments are equal when they are so up to the names of nodes and parameters (operators, constants, all metadata of
   values). Gathers of which a segment is the only reader belong to it.
2. *trace* (``trace.py``): of equal segments one is traced, as AOTAutograd traces a whole model.
3. *contract*: each becomes one call, which is differentiated by another call.
4. *expand*: in the joint graph, or that of inference, the nodes of the trace take the place of the calls. Values are
   computed anew for each layer, and have to be those of the trace.

The graph is then what it would have been: the same operators on the same values, in an order that differs at most in
where gathers and their adjoints stand. Where that is not certain a segment is left alone, or NotRepeatable is raised
and the graph is traced in one piece.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graph_fsdp.passes import compat, dialect
from graph_fsdp.passes.fake_values import FakeValues, evaluate, iterate_tensors
from graph_fsdp.passes.graph import Graph
from graph_fsdp.passes.spec import ModelSpec
from graph_fsdp.passes.trace import NotRepeatable, Trace, call, registered, repeat, repeat_backward, trace

WORTH = 3  # equal segments: to trace one by itself costs about what it costs within the model

Prepare = Callable[[fx.GraphModule], fx.GraphModule]

# What changes how operators are traced, and has no value. Anything else without a value might.
_SET_GRAD = torch._C._set_grad_enabled
_WITHOUT_EFFECT = frozenset({torch._C._log_api_usage_once})


@dataclass
class Segment:
    """Nodes of Dynamo's graph, in its order; ``inputs`` in the order of their first use."""

    unit: str
    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)

    @property
    def parameters(self) -> list[str]:
        return [str(node.args[4]) for node in self.nodes if node.target is dialect.gather_param]


def find_repeats(module: fx.GraphModule, model: ModelSpec) -> list[list[Segment]]:
    """Groups of equal segments, large enough to be worth it, of Dynamo's graph after gathers were inserted. Linear."""
    segments = _segments(module.graph, model)
    for segment in segments:
        _complete(segment)
    readers: dict[fx.Node, int] = {}
    for segment in segments:
        for node in segment.inputs:
            readers[node] = readers.get(node, 0) + 1
    groups: dict[Hashable, list[Segment]] = {}
    for segment in segments:
        try:
            key = _key(segment)
        except _NotDescribed:
            continue
        # The gradients of what several segments read would be summed in another order.
        if not any(readers[node] > 1 and node.meta["example_value"].requires_grad for node in segment.inputs):
            groups.setdefault(key, []).append(segment)
    return [group for group in groups.values() if len(group) >= WORTH]


def _segments(graph: fx.Graph, model: ModelSpec) -> list[Segment]:
    found: list[Segment] = []
    seen: set[str] = set()
    current: Segment | None = None
    ambient = as_here = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node.target is dialect.gather_param:
            continue
        units = {_unit(source, model) for source in node.all_input_nodes if source.target is dialect.gather_param}
        if units - seen or "" in units:
            current = None
            if as_here == ambient and len(units) == 1 and "" not in units:
                current = Segment(*units)
                found.append(current)
        seen |= units
        if node.target is _SET_GRAD:
            as_here = node.args[0]
            current = None
        elif next(iterate_tensors(node.meta.get("example_value")), None) is None:
            current = None
            if node.target not in _WITHOUT_EFFECT:
                break  # it may change how all that follows is traced
        elif isinstance(node.target, compat.HigherOrderOperator) or node.op == "call_module":
            current = None
        elif current is not None:
            current.nodes.append(node)
    return [segment for segment in found if segment.nodes]


def _unit(gather: fx.Node, model: ModelSpec) -> str:
    return model.parameters[str(gather.args[4])].unit


def _complete(segment: Segment) -> None:
    """Add the gathers that nothing else reads, and find what goes in and comes out."""
    inside = set(segment.nodes)
    gathers = {
        source: None
        for node in segment.nodes
        for source in node.all_input_nodes
        if source.target is dialect.gather_param and inside.issuperset(source.users)
    }
    segment.nodes = [*gathers, *segment.nodes]
    inside.update(gathers)
    sources = (source for node in segment.nodes for source in node.all_input_nodes)
    segment.inputs = list(dict.fromkeys(source for source in sources if source not in inside))
    segment.outputs = [node for node in segment.nodes if not inside.issuperset(node.users)]


class _NotDescribed(Exception):
    """There is more to a value than a key says."""


class _Name:
    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


def _key(segment: Segment) -> Hashable:
    names: dict[fx.Node, _Name] = {}
    parts: list[Hashable] = []
    for node in segment.inputs:
        parts.append(_described(node.meta.get("example_value")))
        names[node] = _Name(len(names))
    for node in segment.nodes:
        args = node.args[:4] + node.args[5:] if node.target is dialect.gather_param else node.args
        named = fx.map_arg((args, node.kwargs), names.__getitem__)  # type: ignore[arg-type]
        parts.append((node.op, node.target, repr(named), _described(node.meta.get("example_value"))))
        names[node] = _Name(len(names))
    for node in segment.outputs:
        if not isinstance(node.meta.get("example_value"), torch.Tensor):
            raise _NotDescribed
    return tuple(parts), tuple(names[node].index for node in segment.outputs)


def _described(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return tuple(_described(item) for item in value)
    if type(value) is not compat.FakeTensor or value.layout is not torch.strided or value.constant is not None:
        raise _NotDescribed
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if any(type(size) is not int for size in sizes) or value.is_conj() or value.is_neg():
        raise _NotDescribed
    return (len(value.shape), sizes, value.dtype, value.device, value.requires_grad)


class Repeats:
    """The traces of groups of equal segments of ``module``; ``contracted``: the graph with calls in their places.

    Raises:
        NotRepeatable: none of them can be traced by itself.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        groups: list[list[Segment]],
        prepare: Prepare,
        decompositions: dict[Any, Callable[..., Any]] | None,
    ) -> None:
        self._prepare = prepare
        self.traces: list[Trace] = []
        self.segments: list[Segment] = []  # by the index of their calls
        self.traced: list[Segment] = []  # by the index of their traces
        ends: dict[fx.Node, tuple[int, int]] = {}
        for group in groups:
            try:
                made = _trace(len(self.traces), group[0], module, prepare, decompositions)
            except NotRepeatable:
                continue
            for segment in group:
                ends[segment.nodes[-1]] = (made.index, len(self.segments))
                self.segments.append(segment)
            self.traces.append(made)
            self.traced.append(group[0])
        if not self.traces:
            raise NotRepeatable("no segment can be traced by itself")
        self.contracted = self._contract(module, ends)

    def registered(self) -> AbstractContextManager[None]:
        """For as long as the contracted graph is traced."""
        return registered(self.traces)

    def _contract(self, module: fx.GraphModule, ends: dict[fx.Node, tuple[int, int]]) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        inside = {node for segment in self.segments for node in segment.nodes}
        for node in module.graph.nodes:
            if node in ends:
                trace_index, call_index = ends[node]
                segment = self.segments[call_index]
                arguments = (trace_index, call_index, *map(copies.__getitem__, segment.inputs))
                results = graph.call_function(call, arguments)
                for index, output in enumerate(segment.outputs):
                    copies[output] = graph.call_function(operator.getitem, (results, index))
            elif node not in inside:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return compat.with_graph(module, graph, copies)

    def expand(self, module: fx.GraphModule) -> fx.GraphModule:
        """The traced ``module``, prepared, with traces in the places of the calls.

        Raises:
            NotRepeatable: a value is not that of the trace.
        """
        if not any(made.random for made in self.traces):
            return self._expand(self._prepare(module))
        return self._prepare(self._expand(module))

    def _expand(self, module: fx.GraphModule) -> fx.GraphModule:
        values = FakeValues()
        copies: dict[int, dict[fx.Node, fx.Node]] = {}  # by call; node of the trace → its copy
        results: dict[fx.Node, fx.Node] = {}  # item of a call's results → what computes it
        calls = [node for node in module.graph.nodes if node.target is repeat or node.target is repeat_backward]
        for node in calls:
            given, trace_index, call_index = node.args
            made, copied = self.traces[trace_index], copies.setdefault(call_index, {})
            forward = node.target is repeat
            for placeholder, source in zip(made.inputs if forward else made.tangents, given, strict=True):
                copied[placeholder] = results.get(source, source)
                _check(placeholder, copied[placeholder])
            copy = _Copy(module, made.module, self.traced[trace_index], self.segments[call_index], values, copied)
            with module.graph.inserting_before(node):
                for original in made.forward if forward else made.backward:
                    copied[original] = copy(original)
            found = made.outputs if forward else [value for value in made.gradients if value is not None]
            results.update((item, copied[found[item.args[1]]]) for item in node.users)
        Graph(module, "joint").replace(results)
        for node in reversed(calls):
            module.graph.erase_node(node)
        return module


def _trace(
    index: int,
    segment: Segment,
    module: fx.GraphModule,
    prepare: Prepare,
    decompositions: dict[Any, Callable[..., Any]] | None,
) -> Trace:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in segment.inputs:
        copies[node] = graph.placeholder(node.name)
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in segment.outputs))
    function = fx.GraphModule(module, graph)
    arguments = []
    with compat.current_fake_mode():
        for node in segment.inputs:
            value = node.meta["example_value"]
            layout = (value.shape, value.stride())
            argument = torch.empty_strided(*layout, dtype=value.dtype, device=value.device)
            arguments.append(argument.requires_grad_(value.requires_grad))
    differentiable = [node.meta["example_value"].requires_grad for node in segment.outputs]
    return trace(index, function, arguments, differentiable, prepare, decompositions)


@dataclass
class _Copy:
    """Copies nodes of a trace into ``module``, for another segment than the one that was traced."""

    module: fx.GraphModule
    owner: fx.GraphModule  # holds the constants of the trace
    traced: Segment
    segment: Segment
    values: FakeValues
    copied: dict[fx.Node, fx.Node]

    def __post_init__(self) -> None:
        self._parameters = dict(zip(self.traced.parameters, self.segment.parameters, strict=True))
        self._paths: dict[int, Any] = {}

    def __call__(self, original: fx.Node) -> fx.Node:
        target = original.target
        if original.op == "get_attr":
            target = f"_repeated_{target}"
            setattr(self.module, target, getattr(self.owner, str(original.target)))
        args, kwargs = fx.map_arg((original.args, original.kwargs), self.copied.__getitem__)
        if target is dialect.gather_param or target is dialect.reduce_grad:
            args = (*args[:4], self._parameters[args[4]], *args[5:])
        node = self.module.graph.create_node(original.op, target, args, kwargs, original.name)
        node.meta = original.meta.copy()
        if "nn_module_stack" in node.meta:
            node.meta["nn_module_stack"] = self._path(node.meta["nn_module_stack"])
        if node.op == "call_function":
            node.meta["val"] = self._value(node)
            _check(original, node)
        return node

    def _value(self, node: fx.Node) -> Any:
        if node.all_input_nodes:
            return self.values.of(node)
        with compat.current_fake_mode():
            return evaluate(node)

    def _path(self, stack: dict[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
        """The modules that a node is of, in the unit of this segment."""
        if id(stack) not in self._paths:
            old, new = f"L['self'].{self.traced.unit}", f"L['self'].{self.segment.unit}"
            self._paths[id(stack)] = {
                key: (new + path[len(old) :] if f"{path}.".startswith(f"{old}.") else path, *rest)
                for key, (path, *rest) in stack.items()
            }
        return self._paths[id(stack)]  # type: ignore[no-any-return]


def _check(original: fx.Node, node: fx.Node) -> None:
    if _layout(original.meta.get("val")) != _layout(node.meta.get("val")):
        raise NotRepeatable(f"{node} is not as {original} of the trace")


def _layout(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.device)
    return tuple(map(_layout, value)) if isinstance(value, (tuple, list)) else type(value)
