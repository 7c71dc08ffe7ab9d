"""A kept program has the graphs that the passes have made of one of Dynamo's, and what else a start needs of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graph_fsdp.passes import Graph, PassContext
from graph_fsdp.passes.ir.agreed_order import Plan
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.effects import mutated_inputs
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.passes.ir.portable import Names, NotPortable, from_data, to_data
from graph_fsdp.passes.repeat.trace import why_no_values_of_its_own
from graph_fsdp.runtime.regions.kept_keys import cut_with_keys, keys_to_data
from graph_fsdp.runtime.regions.regions import Step, cut


def differentiable_outputs(dynamo: fx.Graph, traced: fx.Graph, inputs: int, forward_outputs: int) -> tuple[bool, ...]:
    """Say of each output of a graph of Dynamo's whether it has a gradient. ``traced``: what AOTAutograd has made of the
    graph, a joint graph or one of inference.

    Raises:
        NotPortable: AOTAutograd does more around the graph than to run it: an input is written, an output is a view.
    """
    (returned,) = dynamo.output_node().args
    if not isinstance(returned, (tuple, list)) or not all(isinstance(node, fx.Node) for node in returned):
        raise NotPortable("it returns what is no tensor")
    values: list[Any] = [node.meta.get("example_value") for node in returned if isinstance(node, fx.Node)]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise NotPortable("it returns what is no tensor")
    if forward_outputs != len(values):
        raise NotPortable("it writes to its inputs, or returns views of what it computes")
    nodes = list(traced.nodes)
    placeholders = traced.find_nodes(op="placeholder")
    outputs = operands(traced.output_node())[:forward_outputs]
    if any(source.op == "placeholder" for node in nodes for source in mutated_inputs(node)):
        raise NotPortable("it writes to its inputs")
    if reason := why_no_values_of_its_own(placeholders, outputs):
        raise NotPortable(reason)
    differentiable = tuple(bool(value.requires_grad) for value in values)
    tangents = len(placeholders) - inputs
    if tangents not in (0, sum(differentiable)):
        raise NotPortable("it has other gradients than those of its outputs")
    return differentiable


@dataclass
class KeptProgram:
    """Holds the ``graphs`` after all passes, forward and backward or that of inference, which are all for one start.

    ``kind``: of the graphs, by which ranks have a plan in common; ``plan``: that they keep to. ``differentiable``: of
    each output of the user's, whether it has a gradient. ``absent``: of the backward's ``AbsentGradients`` the tangents
    and parameters. ``stages``: per phase, the name, summary and number of nodes of each. ``cuts``: of graphs that run
    in regions, once it was written or read; these have their keys.
    """

    graphs: list[Graph]
    kind: str
    plan: Plan
    differentiable: tuple[bool, ...]
    absent: tuple[dict[int, int], dict[int, str]] | None
    stages: dict[Phase, list[tuple[str, str | None, int]]]
    cuts: dict[fx.Graph, list[Step]] = field(default_factory=dict)

    @classmethod
    def of(cls, graphs: list[Graph], kind: str, differentiable: tuple[bool, ...], context: PassContext) -> KeptProgram:
        absent = graphs[-1].absent
        found = None if absent is None else (dict(absent.tangents), dict(absent.parameters))
        stages: dict[Phase, list[tuple[str, str | None, int]]] = {
            phase: [(stage.name, stage.summary, len(stage.snapshot)) for stage in found.values()]
            for phase, found in context.stages.items()
            if phase != "capture"
        }
        plan = Plan({graph.phase: graph.collectives for graph in graphs}, context.plan.kept)
        return cls(graphs, kind, plan, differentiable, found, stages)

    def to_data(self, names: Names, whole: bool) -> dict[str, Any]:
        """Return what ``json.dumps`` takes; with ``whole``, nothing is cut into regions. Raises NotPortable."""
        self.cuts = {} if whole else {graph.fx_graph: cut(graph) for graph in self.graphs}
        return {
            "kind": self.kind,
            "plan": self.plan.to_json(),
            "differentiable": list(self.differentiable),
            "absent": None if self.absent is None else [list(map(list, part.items())) for part in self.absent],
            "stages": {phase: list(map(list, found)) for phase, found in self.stages.items()},
            "graphs": [to_data(graph, names) for graph in self.graphs],
            "regions": None if whole else [keys_to_data(self.cuts[g.fx_graph], g.phase, names) for g in self.graphs],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any], names: Names, mode: Any) -> KeptProgram:
        """Make a program of what ``to_data`` gave. Raises what ``passes/ir/portable.py`` does."""
        graphs = [from_data(graph, names, mode) for graph in data["graphs"]]
        absent = data["absent"]
        stages = {
            phase: [(name, said, nodes) for name, said, nodes in found] for phase, found in data["stages"].items()
        }
        keys = zip(graphs, data["regions"], strict=True) if data["regions"] is not None else []
        cuts = {graph.fx_graph: cut_with_keys(graph, found, names) for graph, found in keys}
        return cls(
            graphs,
            data["kind"],
            Plan.from_json(data["plan"]),
            tuple(data["differentiable"]),
            None if absent is None else (dict(absent[0]), dict(absent[1])),
            stages,
            cuts,
        )

    @property
    def tangents(self) -> list[fx.Node]:
        return self.graphs[-1].with_role(Role.TANGENT)
