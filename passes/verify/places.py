"""What stood in a place of a graph, and was not replaced, stands in no other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from graph_fsdp.passes.ir.dialect import record
from graph_fsdp.passes.ir.effects import is_view, mutated_inputs
from graph_fsdp.passes.ir.graph import Graph


def exchanged(before: Sequence[Any], after: Sequence[Any]) -> int | None:
    """Return the first place in which a node stands that stood in another one of ``before`` and is gone from there;
    None if there is none. One that stands in both has taken the place of another that computed the same."""
    places: dict[fx.Node, list[int]] = {}
    for place, node in enumerate(before):
        if isinstance(node, fx.Node):
            places.setdefault(node, []).append(place)
    for place, node in enumerate(after):
        own = places.get(node) if isinstance(node, fx.Node) else None
        if own and place not in own and not any(at < len(after) and after[at] is node for at in own):
            return place
    return None


class Writes:
    """Remembers what writes to inputs of a graph, as a BatchNorm does, and what reads these before."""

    def __init__(self, graph: Graph) -> None:
        writers = [node for node in graph.fx_graph.nodes if record(node) is None and mutated_inputs(node)]
        self._read_before: dict[fx.Node, dict[fx.Node, set[fx.Node]]] = {}  # input → what writes → what read before
        uses = graph.uses_of(graph.placeholders) if writers else {}
        for writer in writers:
            for place in uses.get(writer, ()):
                self._read_before.setdefault(place, {})[writer] = set()
        earlier: dict[fx.Node, set[fx.Node]] = {place: set() for place in self._read_before}
        for node, places in uses.items() if earlier else ():
            for place in places & earlier.keys():
                if node in self._read_before[place]:
                    self._read_before[place][node] = set(earlier[place])
                elif not is_view(node):
                    earlier[place].add(node)

    def broken(self, graph: Graph, nodes: Sequence[fx.Node]) -> tuple[fx.Node | None, str] | None:
        """Find an input that is not written any more, or read behind a write that it was read before, and say so."""
        if not self._read_before:
            return None
        position = {node: place for place, node in enumerate(nodes)}
        for place, writers in self._read_before.items():
            left = [writer for writer in writers if writer in position]
            if not left and not any(map(mutated_inputs, graph.uses_of([place]))):
                return place, f"input {place} was written, and nothing writes to it"
            for writer in left:
                late = (read for read in writers[writer] if position.get(read, -1) > position[writer])
                if (node := min(late, key=position.__getitem__, default=None)) is not None:
                    return node, f"{node} reads {place} behind {writer}, which writes to it"
        return None
