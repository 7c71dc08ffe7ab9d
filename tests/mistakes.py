"""Broken passes, and the test that each is made for: the verifier names its mistake.

A model is traced once for all of them: most stand behind the partitioner, and the pipeline then runs on copies of the
forward and backward graph that it was given. ``check_named(mistake, whole=True)`` is a model's own attempt."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from typing import Any, ClassVar

import pytest
import torch
from models import MLP
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import VerificationError
from graph_fsdp.passes import Graph, GraphPass, PassContext, PassPipeline, Plan, Role, default_pipeline
from graph_fsdp.passes.ir.stage import Snapshot
from graph_fsdp.report.report import engine_of

LAYOUT = "a gathered bucket has its own layout"
BLOCK0, BLOCK1 = (
    tuple(f"blocks.{i}.{leaf}" for leaf in ("up.weight", "up.bias", "down.weight", "down.bias")) for i in (0, 1)
)
ROOT = ("head.weight", "head.bias")
UP = BLOCK0[:2]


class Mistake(GraphPass):
    """A broken pass, where in the pipeline it stands, and what the verifier must say of it."""

    phases: ClassVar = ("forward",)
    after = "free"
    options: ClassVar[dict[str, Any]] = {}  # of the pipeline
    invariant: str
    node: str
    parameters: tuple[str, ...] = BLOCK0

    def __init_subclass__(cls) -> None:
        cls.name = re.sub("(?<!^)([A-Z])", r"_\1", cls.__name__).lower()
        MISTAKES.append(cls)


MISTAKES: list[type[Mistake]] = []


def mistakes_of(module: str) -> list[type[Mistake]]:
    return [mistake for mistake in MISTAKES if mistake.__module__ == module]


def node_of(graph: Graph, role: Role, bucket: str = "blocks.0") -> fx.Node:
    """The first node of a role in a bucket."""
    return next(node for node in graph.with_role(role) if node.meta["fsdp"].bucket == bucket)


def call_of(graph: Graph, target: object) -> fx.Node:
    """The first call of an operator."""
    return next(node for node in graph.nodes if node.target is target)


def copy_of(graph: Graph, node: fx.Node, *args: object) -> fx.Node:
    """Another call like ``node``'s, with its metadata, called "again"."""
    copy = graph.fx_graph.create_node(node.op, node.target, args or node.args, node.kwargs, name="again")
    copy.meta = dict(node.meta)
    return copy


def batch() -> Tensor:
    return torch.ones(4, 16)


def change_record(node: fx.Node, **changes: int) -> None:
    node.meta["fsdp"] = dataclasses.replace(node.meta["fsdp"], **changes)


def check_named(mistake: type[Mistake], *, whole: bool = False) -> None:
    """The verifier's error has everything that the mistake says of itself.

    Args:
        whole: a model tries to run, twice, and is each time as it was before.
    """
    pipeline = default_pipeline(**mistake.options).insert_after(mistake.after, mistake())
    if not (whole or mistake.options or mistake.phases[0] == "joint"):
        with pytest.raises(VerificationError) as raised:
            run_on_copies(pipeline)
        return check_says(raised.value, mistake)
    model = graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)
    for _ in range(1 + whole):  # nothing of the first attempt is left behind
        with pytest.raises(VerificationError) as raised:
            model(batch()).sum().backward()
        check_says(raised.value, mistake)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert engine_of(model).counter.current == 0


def check_says(error: VerificationError, mistake: type[Mistake]) -> None:
    assert (error.pass_name, error.phase, error.invariant) == (mistake.name, mistake.phases[0], mistake.invariant)
    assert (error.node, set(error.parameters)) == (mistake.node, set(mistake.parameters))
    named = [repr(mistake.name), mistake.phases[0], mistake.invariant, mistake.node, *mistake.parameters]
    assert [word for word in named if word not in str(error)] == []


class Take(GraphPass):
    """Keeps forward and backward as the first pass behind the partitioner is given them."""

    name, phases = "take", ("forward", "backward")

    def __init__(self) -> None:
        self.graphs: list[tuple[Graph, Snapshot]] = []
        self.context: PassContext

    def run(self, graph: Graph, context: PassContext) -> None:
        self.graphs.append((graph, Snapshot(graph.fx_graph)))
        self.context = _copy_of_context(context)


def _copy_of_context(context: PassContext) -> PassContext:
    """With collections of its own. Nothing in it is a node of forward or backward before the first pass there."""
    values = {field.name: getattr(context, field.name) for field in dataclasses.fields(context)}
    copies = {name: copy.copy(value) for name, value in values.items() if isinstance(value, (dict, list))}
    copies["stages"] = {phase: dict(stages) for phase, stages in context.stages.items()}
    return dataclasses.replace(context, **copies, plan=Plan())


@functools.cache
def partitioned() -> Take:
    take = Take()
    model = graph_fsdp.compile(MLP(), backend="eager", passes=default_pipeline().insert_before("just_in_time", take))
    model(batch())
    return take


def run_on_copies(pipeline: PassPipeline) -> None:
    """The pipeline on the graphs of the model that all mistakes share."""
    taken = partitioned()
    graphs = [Graph(fx.GraphModule(graph.module, kept.copy()), graph.phase) for graph, kept in taken.graphs]
    context = _copy_of_context(taken.context)
    for graph in graphs:
        graph.cost = context.cost
    pipeline.run(graphs, context)
