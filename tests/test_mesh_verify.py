"""The verifier on meshes of two dimensions and on kept shards: it names the mistake of each broken pass."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from models import MLP
from test_mesh import mesh_of
from torch import fx

import graph_fsdp
from graph_fsdp import VerificationError
from graph_fsdp.passes import Graph, GraphPass, PassContext, Role, default_pipeline

pytestmark = pytest.mark.usefixtures("fake_group")


# The verifier


class DropsReductionOverReplicas(GraphPass):
    """Each row of the mesh would keep the mean of its own ranks."""

    name, phases = "drops_reduction_over_replicas", ("backward",)
    invariant = "each gradient is reduced once over each group"
    node, parameters = "blocks_1_up_weight_grad_1", ("blocks.1.up.weight",)
    after: ClassVar = "bucket"

    def run(self, graph: Graph, context: PassContext) -> None:
        start, wait = node_of(graph, Role.REPLICATE_START), node_of(graph, Role.REPLICATE_WAIT)
        wait.replace_all_uses_with(start.args[0])
        graph.fx_graph.erase_node(wait)
        graph.fx_graph.erase_node(start)


class ReadsGradientsBetweenReductions(GraphPass):
    """The second reduction is there, and a gradient is what was before it."""

    name, phases = "reads_gradients_between_reductions", ("backward",)
    invariant = "each gradient is reduced once over each group"
    node, parameters = "blocks_1_up_weight_grad_1", ("blocks.1.up.weight",)
    after: ClassVar = "bucket"

    def run(self, graph: Graph, context: PassContext) -> None:
        start, wait = node_of(graph, Role.REPLICATE_START), node_of(graph, Role.REPLICATE_WAIT)
        next(iter(wait.users)).replace_input_with(wait, start.args[0])


class ReducesBeforeTheFirstHasArrived(GraphPass):
    """The second reduction starts on what the first has not delivered."""

    name, phases = "reduces_before_the_first_has_arrived", ("backward",)
    invariant, node = "a buffer is used after its wait", "replicate_blocks_1"
    parameters = tuple(f"blocks.1.{leaf}" for leaf in ("up.weight", "up.bias", "down.weight", "down.bias"))
    after: ClassVar = "bucket"

    def run(self, graph: Graph, context: PassContext) -> None:
        first, second = node_of(graph, Role.REDUCE_START), node_of(graph, Role.REPLICATE_START)
        second.replace_input_with(node_of(graph, Role.REDUCE_WAIT), first)
        first.append(second)


class NeverWaitsForTheSecond(GraphPass):
    """Gradients are read while the second reduction writes them."""

    name, phases = "never_waits_for_the_second", ("backward",)
    invariant, node = "a buffer is used after its wait", "blocks_1_up_weight_grad"
    parameters = ReducesBeforeTheFirstHasArrived.parameters
    after: ClassVar = "bucket"

    def run(self, graph: Graph, context: PassContext) -> None:
        start, wait = node_of(graph, Role.REPLICATE_START), node_of(graph, Role.REPLICATE_WAIT)
        wait.replace_all_uses_with(start)
        graph.fx_graph.erase_node(wait)


class ReducesTwiceOverReplicas(GraphPass):
    """A second reduction over the replicas, of what was reduced over them."""

    name, phases = "reduces_twice_over_replicas", ("backward",)
    invariant, node = "each gradient is reduced once over each group", "again"
    parameters = ReducesBeforeTheFirstHasArrived.parameters
    after: ClassVar = "bucket"

    def run(self, graph: Graph, context: PassContext) -> None:
        start, wait = node_of(graph, Role.REPLICATE_START), node_of(graph, Role.REPLICATE_WAIT)
        with graph.fx_graph.inserting_after(wait):
            again = graph.fx_graph.create_node("call_function", start.target, (wait, *start.args[1:]), name="again")
        again.meta = dict(start.meta)


class ReordersReductionsOverReplicas(GraphPass):
    """On this rank the second reductions start in another order than planned."""

    name, phases = "reorders_reductions_over_replicas", ("backward",)
    invariant, node = "the sequence of collectives is the plan's", "replicate_blocks_1"
    parameters = ReducesBeforeTheFirstHasArrived.parameters
    after: ClassVar = "prefetch"

    def run(self, graph: Graph, context: PassContext) -> None:
        first, second = node_of(graph, Role.REPLICATE_START, "root"), node_of(graph, Role.REPLICATE_START)
        wait = second.args[0]
        for node in (node_of(graph, Role.REDUCE_START), wait, second):
            first.prepend(node)


def node_of(graph: Graph, role: Role, bucket: str = "blocks.1") -> fx.Node:
    return next(node for node in graph.with_role(role) if node.meta["fsdp"].bucket == bucket)


MISTAKES: list[Any] = [
    DropsReductionOverReplicas,
    ReadsGradientsBetweenReductions,
    ReducesBeforeTheFirstHasArrived,
    NeverWaitsForTheSecond,
    ReducesTwiceOverReplicas,
    ReordersReductionsOverReplicas,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_verifier_names_the_mistake(mistake: Any) -> None:
    pipeline = default_pipeline(reductions_in_flight=2).insert_after(mistake.after, mistake())
    model = graph_fsdp.compile(MLP(), mesh_of(2, 4), backend="eager", passes=pipeline)
    with pytest.raises(VerificationError) as raised:
        model(torch.ones(4, 16))
    error = raised.value
    assert (error.pass_name, error.phase, error.invariant) == (mistake.name, "backward", mistake.invariant)
    assert (error.node, error.parameters) == (mistake.node, mistake.parameters)


class KeepsOtherChunks(GraphPass):
    """A parameter's shard is cut out where another lies."""

    name, phases, after = "keeps_other_chunks", ("forward",), "reshard"
    node = "shard_blocks_1"

    def run(self, graph: Graph, context: PassContext) -> None:
        kept = node_of(graph, Role.KEEP_SHARD)
        kept.args = (kept.args[0], list(reversed(kept.args[1])), *kept.args[2:])


class KeepsOneOfAnother(GraphPass):
    """The shard is cut out of another bucket of the same layout."""

    name, phases, after = "keeps_one_of_another", ("forward",), "reshard"
    node = "shard_blocks_1"

    def run(self, graph: Graph, context: PassContext) -> None:
        kept = node_of(graph, Role.KEEP_SHARD)
        kept.replace_input_with(kept.args[0], node_of(graph, Role.GATHER_WAIT, "blocks.0"))


class GathersOverAllRanks(GraphPass):
    """A shard of the small group is gathered over the large one."""

    name, phases, after = "gathers_over_all_ranks", ("backward",), "reshard"
    node = "gather_blocks_1"

    def run(self, graph: Graph, context: PassContext) -> None:
        start = node_of(graph, Role.GATHER_START)
        start.args = (*start.args[:5], context.model.mesh.group, *start.args[6:])


@pytest.mark.parametrize(
    "mistake", [KeepsOtherChunks, KeepsOneOfAnother, GathersOverAllRanks], ids=lambda mistake: mistake.name
)
def test_the_verifier_proves_where_kept_shards_lie(mistake: Any) -> None:
    pipeline = default_pipeline().insert_after(mistake.after, mistake())
    model = graph_fsdp.compile(MLP(), mesh_of(8), backend="eager", passes=pipeline, reshard_after_forward=2)
    with pytest.raises(VerificationError) as raised:
        model(torch.ones(4, 16))
    error = raised.value
    assert (error.pass_name, error.invariant) == (mistake.name, "a kept shard has its bucket's layout")
    assert (error.node, error.parameters) == (mistake.node, ReducesBeforeTheFirstHasArrived.parameters)
