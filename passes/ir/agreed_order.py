"""The plan holds what all ranks of a model decide alike. It is made once, and every later graph keeps to it.

Ranks may see other shapes, compile at other times and measure other costs, and still have to start the same collectives
in the same order. So the first rank of the mesh decides for each *kind* of graph: the phases that are scheduled
together, and the buckets that they gather and reduce. Recompilations for other shapes are of the same kind.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.canonical_form import digest
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.passes.ir.settings import Settings
from graph_fsdp.passes.ir.spec import ModelSpec

COMMUNICATES = (dialect.gather_param, dialect.reduce_grad)  # a captured graph, by these
Starts = list[tuple[str, str]]  # (role of the start, bucket), in the order in which they start


@dataclass
class Plan:
    """Holds the decisions for one kind of graph: the order of ``collectives`` per phase, and the buckets that stay
    ``kept`` from forward to backward, None before the reshard pass has decided."""

    collectives: dict[Phase, Starts] = field(default_factory=dict)
    kept: list[str] | None = None

    def keep(self, graph: Graph) -> bool:
        """Move the starts of a graph's collectives into the planned order; a pass that schedules ends with it.

        Behind a pass that provides ``scheduled``, the order is the one that it has fixed. Gathers move up where that is
        enough, else reductions down, and gathers down as far as their waits. Returns True, also where nothing is
        planned yet; False, with the order as it was, where the graph has other collectives or needs them in another
        order: the ranks then have to agree on another plan.
        """
        planned = self.collectives.get(graph.phase) if graph.order is None else graph.order
        if planned is None:
            return True
        starts = dict(zip(graph.collectives, graph.starts, strict=True))
        if sorted(starts) != sorted(planned):
            return False
        ordered = [starts[entry] for entry in planned]
        positions = graph.positions()
        order = list(graph.fx_graph.nodes)
        moved: dict[fx.Node, float] = {}
        limit = float(len(order))
        for node in reversed(ordered):  # a gather that stands behind its successor moves up to just before it
            place = float(positions[node])
            if place > limit and has_role(node, Role.GATHER_START):
                place = limit
            moved[node] = place
            limit = min(limit, place)
        earliest = -1.0
        for node in ordered:  # what stands before its predecessor moves down to just behind it
            place = max(moved[node], earliest)
            if place > max(positions[node], moved[node]) and place >= min(positions[user] for user in node.users):
                return False
            moved[node] = earliest = place
        # Starts that share a place keep the planned order, behind the node there if that is their own place.
        rank = {node: index for index, node in enumerate(ordered)}
        keys = {node: (moved.get(node, float(positions[node])), node in moved, rank.get(node, 0)) for node in order}
        graph.reorder(sorted(order, key=keys.__getitem__))
        return True

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        value = json.loads(text)
        collectives = {phase: [(k, b) for k, b in entries] for phase, entries in value["collectives"].items()}
        return cls(collectives, value["kept"])


def plan_kind(graph: Graph, model: ModelSpec, settings: Settings) -> str:
    """Digest what a joint or inference graph gathers and reduces, and the settings: equal where a plan is shared."""
    parts: list[str] = [graph.phase, settings.key()]
    for target in COMMUNICATES:
        names = {dialect.parameter_of(node) for node in graph.calls_of([target])}
        parts += sorted({model.bucket_of[name].name if name in model.bucket_of else name for name in names})
        parts.append("")
    return digest(parts)[:16]
