"""Equal layers are traced once: AOTAutograd sees each of them as one operator, whose trace is put in its place later.

AOTAutograd spends some milliseconds on every operator of a model: metadata, autograd, functionalisation, decomposition.
Layers of one class repeat the same trace. So, between Dynamo's graph and the joint graph:

1. *find* (``segments.py``): which parts of Dynamo's graph are equal.
2. *trace* (``trace.py``): of equal segments one is traced, as AOTAutograd traces a whole model.
3. *contract*: each becomes one call, which is differentiated by another call.
4. *expand* (``expand.py``): in the joint graph, or that of inference, the nodes of the trace take the place of the
   calls.

The graph is then what it would have been without: the same operators on the same values, in the same order. Where that
is not certain a segment is left alone, or ``NotRepeatable`` is raised and the graph is traced without these calls.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.repeat.expand import Expansion
from graph_fsdp.passes.repeat.segments import WORTH, Segment
from graph_fsdp.passes.repeat.trace import NotRepeatable, Trace, call, raise_failures, registered, trace

log = logging.getLogger(__name__)

Prepare = Callable[[fx.GraphModule], fx.GraphModule]
Decompositions = dict[Any, Callable[..., Any]] | None


class Repeats:
    """The traces of groups of equal segments of ``module``; ``contracted``: its graph with calls in their places.
    ``prepare`` rewrites a traced graph for the backend: it is applied to a trace once, and then to what is around.

    Raises:
        NotRepeatable: none of them can be traced by itself.
    """

    def __init__(
        self, module: fx.GraphModule, groups: list[list[Segment]], prepare: Prepare, decompositions: Decompositions
    ) -> None:
        self._prepare = prepare
        self.traces: list[Trace] = []
        # By the index of a call: its trace, the segment that was traced, and the one that is meant.
        self.calls: list[tuple[Trace, Segment, Segment]] = []
        for group in groups:
            try:
                made = _trace(len(self.traces), group[0], module, prepare, decompositions)
            except NotRepeatable as reason:
                log.info("%s and %d layers like it are traced by themselves: %s", group[0].unit, len(group) - 1, reason)
                continue
            self.traces.append(made)
            self.calls += [(made, group[0], segment) for segment in group]
        if not self.traces:
            raise NotRepeatable("no layer can be traced for others")
        nodes = module.graph.nodes
        self._gathered = [dialect.parameter_of(node) for node in nodes if node.target is dialect.gather_param]
        self.contracted = self._contract(module)

    def registered(self) -> AbstractContextManager[None]:
        """For as long as the contracted graph is traced."""
        return registered(self.traces)

    def expand(self, module: fx.GraphModule) -> fx.GraphModule:
        """``module``, the trace of ``contracted``, prepared, and with traces in the places of the calls.

        Raises:
            NotRepeatable: a layer has other values or gradients than the trace.
        """
        raise_failures()
        prepared = all(made.prepared for made in self.traces)
        module = self._prepare(module) if prepared else module
        Expansion(module, self.calls, self._gathered).run()
        return module if prepared else self._prepare(module)

    def without(self, call: int | None) -> list[list[Segment]]:
        """The groups of segments that were traced, without that of a call; without any if it is not known which."""
        groups: dict[int, list[Segment]] = {}
        for index, (made, _, segment) in enumerate(self.calls):
            if call is not None and index != call:
                groups.setdefault(made.index, []).append(segment)
        return [group for group in groups.values() if len(group) >= WORTH]

    def _contract(self, module: fx.GraphModule) -> fx.GraphModule:
        ends = {segment.nodes[-1]: index for index, (_, _, segment) in enumerate(self.calls)}
        inside = {node for _, _, segment in self.calls for node in segment.nodes}
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes:
            if node in ends:
                made, _, segment = self.calls[ends[node]]
                arguments: tuple[Any, ...] = (made.index, ends[node], *map(copies.__getitem__, segment.inputs))
                results = graph.call_function(call, arguments)
                for index, output in enumerate(segment.outputs):
                    copies[output] = graph.call_function(operator.getitem, (results, index))
            elif node not in inside:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return compat.with_graph(module, graph, copies)


def _trace(
    index: int, segment: Segment, module: fx.GraphModule, prepare: Prepare, decompositions: Decompositions
) -> Trace:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in segment.inputs}
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in segment.outputs))
    arguments = []
    with compat.current_fake_mode():
        for node in segment.inputs:
            value = node.meta["example_value"]
            argument = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            arguments.append(argument.requires_grad_(value.requires_grad))
    differentiable = [node.meta["example_value"].requires_grad for node in segment.outputs]
    return trace(index, fx.GraphModule(module, graph), arguments, differentiable, prepare, decompositions)
