"""Equal layers are traced once: AOTAutograd sees operators for them, in whose places their trace is put later.

AOTAutograd spends some milliseconds on every operator. So, between Dynamo's graph and the joint graph:

1. *find* (``segments.py``): which parts of Dynamo's graph are equal.
2. *trace* (``trace.py``): of equal segments one is traced, as AOTAutograd traces a whole model.
3. *contract*: those that follow each other (``chains.py``) become one call, differentiated by another call.
4. *expand*: in the joint graph, or that of inference, the nodes of the trace take the place of the calls.

The graph has then the operators, values and order that it would have had without. Where that is not certain a segment
is left alone, or ``NotRepeatable`` is raised and the graph is traced without these calls.

[Note: the order of a joint graph]
Autograd runs adjoints in the reverse order of the operators. The nodes of a segment are consecutive, so nothing comes
between their adjoints, except for gathers: these stand before all other operators, and so their adjoints behind all
others, in the reverse order. The expansion puts them there.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.fake_values import iterate_tensors
from graph_fsdp.passes.ir.operands import argument, item_of, operands
from graph_fsdp.passes.repeat.chains import Chain, Layer, Place, find_chains
from graph_fsdp.passes.repeat.copies import CopiedValues, Origins, layout, value_of
from graph_fsdp.passes.repeat.segments import WORTH, NotRepeatable, Segment
from graph_fsdp.passes.repeat.trace import Decompositions, Prepare, Trace, call, called, repeat, repeat_backward, trace

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"_\d+$")


class Repeats:
    """Holds the traces of groups of equal segments of ``module``; in ``contracted`` calls stand for them.

    ``prepare`` rewrites a traced graph for the backend: it is applied to a trace once, and then to what is around.

    Raises:
        NotRepeatable: none of them can be traced by itself.
    """

    def __init__(
        self, module: fx.GraphModule, groups: list[list[Segment]], prepare: Prepare, decompositions: Decompositions
    ) -> None:
        self._prepare = prepare
        self.traces: list[Trace] = []
        self.layers: list[Layer] = []  # by their index
        for group in groups:
            try:
                made = trace(len(self.traces), group[0], module, prepare, decompositions)
            except NotRepeatable as reason:
                log.info("%s and %d layers like it are traced by themselves: %s", group[0].unit, len(group) - 1, reason)
                continue
            self.traces.append(made)
            self.layers += [Layer(index, made, segment) for index, segment in enumerate(group, len(self.layers))]
        if not self.traces:
            raise NotRepeatable("no layer can be traced for others")
        self.chains = list(find_chains(module.graph, self.layers))
        nodes = module.graph.nodes
        self._gathered = [dialect.parameter_of(node) for node in nodes if node.target is dialect.gather_param]
        self.contracted = self._contract(module)

    def registered(self) -> AbstractContextManager[Any]:
        """Let ``repeat`` and ``repeat_backward`` know the chains while the contracted graph is traced."""
        return called(dict(enumerate(self.chains)))

    def expand(self, module: fx.GraphModule) -> fx.GraphModule:
        """Return ``module``, the trace of ``contracted``, prepared, and with traces in the places of the calls.

        Raises:
            NotRepeatable: a layer has other values or gradients than the trace.
        """
        if failures := [failure for made in self.traces for failure in made.failures]:
            raise failures[0]
        prepared = all(made.prepared for made in self.traces)
        module = self._prepare(module) if prepared else module
        _Expansion(module, self.layers, self.chains, self._gathered).run()
        return module if prepared else self._prepare(module)

    def without(self, layer: int | None) -> list[list[Segment]]:
        """Return the groups of segments that were traced, without that of a layer; none if the layer is not known."""
        groups: dict[int, list[Segment]] = {}
        for one in self.layers:
            if layer is not None and one.index != layer:
                groups.setdefault(one.trace.index, []).append(one.segment)
        return [group for group in groups.values() if len(group) >= WORTH]

    def _contract(self, module: fx.GraphModule) -> fx.GraphModule:
        ends = {chain.last.segment.nodes[-1]: index for index, chain in enumerate(self.chains)}
        inside = {node for layer in self.layers for node in layer.segment.nodes}
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes:
            if node in ends:
                chain = self.chains[ends[node]]
                results = graph.call_function(call, (ends[node], *map(copies.__getitem__, chain.inputs)))
                for index, output in enumerate(chain.last.segment.outputs):
                    copies[output] = graph.call_function(operator.getitem, (results, index))
            elif node not in inside:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return compat.with_graph(module, graph, copies)


class _Expansion:
    """Copies ``module``, the trace of a graph in which calls stand for ``chains`` of ``layers``, into a graph of all
    their nodes. ``gathered``: all parameters in the order of their gathers in Dynamo's graph."""

    def __init__(self, module: fx.GraphModule, layers: list[Layer], chains: list[Chain], gathered: list[str]) -> None:
        self.module, self.layers, self.chains, self.graph = module, layers, chains, fx.Graph()
        self._place_of = {name: index for index, name in enumerate(gathered)}
        self._parameters = [
            dict(zip(layer.trace.segment.parameters, layer.segment.parameters, strict=True)) for layer in layers
        ]
        traces = {layer.trace.index: layer.trace for layer in layers}
        self._origins = {n: Origins(made.segment, (*made.forward, *made.backward)) for n, made in traces.items()}
        self._own_origins = [self._origins[layer.trace.index].of(layer.segment) for layer in layers]
        self._values = CopiedValues()
        self._checked: set[Place] = set()
        self._same: dict[Place, Place] = {}  # an input of a trace → what it is given, a result → the trace's node
        self._copies: dict[Place, fx.Node] = {}
        self._checkpoints: dict[tuple[int | None, int], int] = {}  # by calls and numbers of the trace, in their order

    def run(self) -> None:
        """Expand. Raises NotRepeatable where the graph would not be what a whole trace is."""
        places = [place for node in self.module.graph.nodes for place in self._expanded(node)]
        for place in sorted(places, key=self._order):
            self._copy(place)
        self.module.graph = self.graph

    def _expanded(self, node: fx.Node) -> Iterator[Place]:
        """Yield what is computed where a node of the contracted graph stands."""
        if node.target is not repeat and node.target is not repeat_backward:
            if (None, node) not in self._same:
                yield None, node
            return
        chain = self.chains[argument(node, "call")]
        same, body, returned = (chain.forward if node.target is repeat else chain.backward)(operands(node))
        self._same.update(same)
        for result in node.users:
            self._same[None, result] = returned[item_of(result)]
        yield from body

    def _order(self, place: Place) -> tuple[int, int]:
        """See [Note: the order of a joint graph]."""
        node = place[1]
        if node.target is dialect.gather_param:
            return 1, self._gather_order(place)
        if node.target is dialect.reduce_grad:
            return 3, -self._gather_order(place)
        return {"placeholder": 0, "output": 4}.get(node.op, 2), 0

    def _gather_order(self, place: Place) -> int:
        if (name := self._parameter(place)) not in self._place_of:
            raise NotRepeatable(f"{name} is not gathered in Dynamo's graph", place[0])
        return self._place_of[name]

    def _parameter(self, place: Place) -> str:
        """Return the parameter that a gather or a reduction is for here."""
        index, node = place
        name = dialect.parameter_of(node)
        return name if index is None else self._parameters[index][name]

    def _copy(self, place: Place) -> None:
        index, node = place
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._copy_of((index, source)))
        name = node.name if node.op == "placeholder" else _NUMBER.sub("", node.name)
        target: Any = node.target
        if target is dialect.gather_param or target is dialect.reduce_grad:
            args = dialect.with_parameter(target, args, self._parameter(place))
        elif index is not None and node.op == "get_attr":
            made = self.layers[index].trace
            target = f"_repeated_{made.index}_{node.target}"  # a constant; the layers share it
            setattr(self.module, target, getattr(made.module, str(node.target)))
        copy = self.graph.create_node(node.op, target, args, kwargs, name, node.type)
        copy.meta.update(node.meta)
        if (checkpoint := copy.meta.get("ac_graph_id")) is not None:  # the partitioner compares them
            copy.meta["ac_graph_id"] = self._checkpoints.setdefault((index, checkpoint), len(self._checkpoints))
        self._copies[place] = copy
        if index is not None:
            self._origins[self.layers[index].trace.index].rename(node, copy, self._own_origins[index])
        if node.op == "call_function" and (index is not None or self._lies_in_a_copy(node)):
            if index is not None and self._values.set(node, copy):
                return
            if index is None:
                copy.meta["val"] = value_of(copy)
            _check(node, copy, index)

    def _copy_of(self, place: Place) -> fx.Node:
        """Return the node that takes the place of another, or of what that stands for."""
        index, node = place
        while place in self._same:
            place = self._same[place]
        if place not in self._copies:
            raise NotRepeatable(f"{node} would be computed behind what reads it", index)
        if index is not None and place != (index, node) and (index, node) not in self._checked:
            _check(node, self._copies[place], index)
            self._checked.add((index, node))
        return self._copies[place]

    def _lies_in_a_copy(self, node: fx.Node) -> bool:
        """Say if a value around layers lies in the memory of one of theirs, which is not that of the call's result."""
        memory = {compat.storage_id(tensor) for tensor in iterate_tensors(node.meta.get("val"))}
        for source in node.all_input_nodes:
            old, new = source.meta.get("val"), self._copy_of((None, source)).meta.get("val")
            if old is not new and not memory.isdisjoint(map(compat.storage_id, iterate_tensors(old))):
                return True
        return False


def _check(original: fx.Node, node: fx.Node, index: int | None) -> None:
    if layout(original.meta.get("val")) != layout(node.meta.get("val")):
        raise NotRepeatable(f"{node} is not laid out as {original} of the trace", index)
