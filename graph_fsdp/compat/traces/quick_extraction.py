"""Forward and backward are taken out of a joint graph without copies of what they do not return.

torch copies each node that can be computed from a graph's inputs, and then drops what nothing reads: of a joint graph
with many layers that is half of the copies. Here it is given what the outputs need. What it makes of that is its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from graph_fsdp.compat.traces.quick_nodes import inputs_of

Extract = Callable[..., torch.fx.Graph]


class _Backward(NamedTuple):
    """Holds a backward graph, and of what it was made."""

    joint: Any
    inputs: list[torch.fx.Node]
    rest: tuple[Any, ...]
    graph: torch.fx.Graph

    def with_inputs(self, inputs: list[torch.fx.Node]) -> torch.fx.Graph | None:
        """Return the graph with fewer inputs, where nothing reads the others, else None."""
        kept = set(inputs)
        if [node for node in self.inputs if node in kept] != inputs:
            return None
        placeholders = self.graph.find_nodes(op="placeholder")
        unread = [made for node, made in zip(self.inputs, placeholders, strict=True) if node not in kept]
        if any(made.users for made in unread) or any(map(_may_have_effect, set(self.inputs) - kept)):
            return None
        for made in unread:
            self.graph.erase_node(made)
        return self.graph


class Extractions:
    """Does what ``extract``, torch's ``_extract_graph_with_inputs_outputs``, does, while one graph is partitioned.

    ``unread``: nodes that a copy is not needed of, but for its name. A forward graph counts the names of what it drops,
    and later passes' names come after them. A backward graph is copied once more, which counts them anew; where it is
    not, torch makes it of all nodes.
    """

    def __init__(self, extract: Extract) -> None:
        self._extract = extract
        self._backward: _Backward | None = None
        self.unread: set[torch.fx.Node] = set()

    def __call__(
        self, joint: Any, inputs: list[torch.fx.Node], outputs: list[Any], *args: Any, **kwargs: Any
    ) -> torch.fx.Graph:
        needed = _needed(joint.nodes, inputs, outputs)
        if "backward" not in (*args, kwargs.get("subgraph")):
            self.unread = {node for node in joint.nodes if node not in needed}
            try:
                return self._extract(joint, inputs, outputs, *args, **kwargs)
            finally:
                self.unread = set()
        rest = outputs, args, kwargs
        before = self._backward
        if before is not None and before.joint is joint and before.rest == rest:
            self._backward = None
            if (smaller := before.with_inputs(inputs)) is not None:
                return smaller
        part = SimpleNamespace(nodes=[node for node in joint.nodes if node in needed])
        made = self._extract(part, inputs, outputs, *args, **kwargs)
        if not any("tangents" in str(node.target) and node.users for node in made.find_nodes(op="placeholder")):
            return self._extract(joint, inputs, outputs, *args, **kwargs)
        self._backward = _Backward(joint, list(inputs), rest, made)
        return made


def _needed(
    nodes: Iterable[torch.fx.Node], inputs: Iterable[torch.fx.Node], outputs: Iterable[Any]
) -> set[torch.fx.Node]:
    """Return what outputs, and nodes that may have an effect, are computed of, from the inputs on."""
    given = set(inputs)
    stack = [node for node in outputs if isinstance(node, torch.fx.Node)]
    stack += filter(_may_have_effect, nodes)
    found = set(stack)
    while stack:
        node = stack.pop()
        if node not in given:
            new = [source for source in inputs_of(node) if source not in found]
            found.update(new)
            stack += new
    return found


# By the identity of an operator, which is kept with it: to hash one is a call of Python's.
_EFFECTS: dict[int, tuple[Any, bool]] = {}


def _may_have_effect(node: torch.fx.Node) -> bool:
    """Say whether torch may keep a node that nothing reads."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem:
        return node.op in ("call_module", "call_method")
    if not isinstance(target, torch._ops.OpOverload):
        return True
    known = _EFFECTS.get(id(target))
    if known is None:
        known = _EFFECTS[id(target)] = target, bool(node.is_impure(True))
    return known[1]
