"""A chain of layers, each of which alone reads what the one before it computes, is traced as one call.

AOTAutograd passes what goes in and comes out of each call through proxies and functional tensors: of a chain, what goes
from layer to layer is spared that, and the operators that stand for layers are as few as the chains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.repeat.segments import NotRepeatable, Segment
from graph_fsdp.passes.repeat.trace import Trace

Place = tuple[int | None, fx.Node]  # a node of the trace that a layer has, by the layer's index, or one around


@dataclass(frozen=True)
class Layer:
    """Holds one of the equal layers: its index among all, its trace, and its part of Dynamo's graph."""

    index: int
    trace: Trace
    segment: Segment

    @property
    def gradients(self) -> dict[fx.Node, fx.Node]:
        """Return the trace's node for the gradient of each input that has one."""
        pairs = zip(self.segment.inputs, self.trace.gradients, strict=True)
        return {node: gradient for node, gradient in pairs if gradient is not None}

    @property
    def differentiable(self) -> list[fx.Node]:
        """Return the outputs that have gradients."""
        return [n for n, yes in zip(self.segment.outputs, self.trace.differentiable, strict=True) if yes]


class Chain:
    """Holds layers in their order. ``inputs``: what the call of them is given, of Dynamo's graph."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers, self.last = layers, layers[-1]
        inside = {node for layer in layers for node in layer.segment.outputs}
        read = (node for layer in layers for node in layer.segment.inputs)
        self.inputs = list(dict.fromkeys(node for node in read if node not in inside))
        gradients = {node: found for layer in layers for node, found in layer.gradients.items()}
        self.outputs, self.differentiable = self.last.trace.outputs, self.last.trace.differentiable
        self.gradients = [gradients.get(node) for node in self.inputs]

    def fail(self, reason: str, which: int | None = None) -> None:
        """Note that a layer cannot have the trace of others: because of the call's input of a number, or its output."""
        layer = self.last
        if which is not None:
            layer = next(one for one in self.layers if self.inputs[which] in one.segment.inputs)
        layer.trace.failures.append(NotRepeatable(reason, layer.index))

    def forward(self, given: list[fx.Node]) -> tuple[dict[Place, Place], list[Place], list[Place]]:
        """Return what the placeholders of traces stand for where the call is ``given`` nodes, what is computed, and
        what the call returns."""
        same: dict[Place, Place] = {}
        at: dict[fx.Node, Place] = {node: (None, value) for node, value in zip(self.inputs, given, strict=True)}
        for layer in self.layers:
            pairs = zip(layer.trace.inputs, layer.segment.inputs, strict=True)
            same.update(((layer.index, place), at[node]) for place, node in pairs)
            pairs = zip(layer.segment.outputs, layer.trace.outputs, strict=True)
            at.update((node, (layer.index, value)) for node, value in pairs)
        body: list[Place] = [(layer.index, node) for layer in self.layers for node in layer.trace.forward]
        return same, body, [at[node] for node in self.last.segment.outputs]

    def backward(self, given: list[fx.Node]) -> tuple[dict[Place, Place], list[Place], list[Place]]:
        """Return the same of the call that differentiates this one."""
        same: dict[Place, Place] = {}
        values = zip(self.last.differentiable, given, strict=True)
        at: dict[fx.Node, Place] = {node: (None, value) for node, value in values}
        for layer in reversed(self.layers):
            pairs = zip(layer.trace.tangents, layer.differentiable, strict=True)
            same.update(((layer.index, place), at[node]) for place, node in pairs)
            at.update((node, (layer.index, gradient)) for node, gradient in layer.gradients.items())
        body: list[Place] = [(layer.index, node) for layer in reversed(self.layers) for node in layer.trace.backward]
        returned = [at[node] for node, found in zip(self.inputs, self.gradients, strict=True) if found is not None]
        return same, body, returned


def find_chains(graph: fx.Graph, layers: list[Layer]) -> Iterator[Chain]:
    """Yield the chains of a graph's layers, in its order; a layer that does not follow another is one by itself."""
    nodes = (node for node in graph.nodes if not _stands_before_all(node))
    place = {node: number for number, node in enumerate(nodes)}
    chain: list[Layer] = []
    for layer in sorted(layers, key=lambda layer: place[layer.segment.nodes[-1]]):
        if chain and not _follows(layer, chain[-1], place):
            yield Chain(chain)
            chain = []
        chain.append(layer)
    if chain:
        yield Chain(chain)


def _follows(layer: Layer, before: Layer, place: dict[fx.Node, int]) -> bool:
    """Say whether a layer is next to the one ``before``, and nothing else reads what that computes, all of whose
    gradients it gives."""
    both = {*before.segment.nodes, *layer.segment.nodes}
    first = next(node for node in layer.segment.nodes if not _stands_before_all(node))
    return (
        place[first] == place[before.segment.nodes[-1]] + 1
        and all(both.issuperset(node.users) for node in before.segment.outputs)
        and layer.gradients.keys() >= set(before.differentiable)
    )


def _stands_before_all(node: fx.Node) -> bool:
    """Say whether a node computes nothing where it stands: an input, a constant, or a gather, which come first."""
    return node.op in ("placeholder", "get_attr") or node.target is dialect.gather_param
