"""The verifier rejects passes that change what a graph computes, its order, its outputs or its gradients."""

from __future__ import annotations

import pytest
import torch
from mistakes import (
    BLOCK0,
    BLOCK1,
    ROOT,
    UP,
    Mistake,
    call_of,
    check_named,
    copy_of,
    mistakes_of,
    node_of,
)
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp.passes import Graph, GraphPass, PassContext, Role, default_pipeline
from graph_fsdp.passes.ir.fake_values import evaluate

aten, prims = torch.ops.aten, torch.ops.prims


# Values and order


class ChangesDtype(Mistake):
    """A cast to bfloat16 whose fake value is the float32 one of before."""

    after, parameters = "bucket", UP
    invariant, node = "shapes, dtypes and devices agree with the fake tensors", "cast"

    def run(self, graph: Graph, context: PassContext) -> None:
        gelu = call_of(graph, aten.gelu.default)
        with graph.fx_graph.inserting_after(gelu):
            cast = graph.call(prims.convert_element_type.default, (gelu, torch.bfloat16), name="cast")
        cast.meta["val"] = gelu.meta["val"]
        gelu.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


class ChangesShape(Mistake):
    """A weight is transposed, and what reads it has the fake values of before."""

    invariant, node = "shapes, dtypes and devices agree with the fake tensors", "addmm"
    parameters = UP

    def run(self, graph: Graph, context: PassContext) -> None:
        weight = call_of(graph, aten.t.default)
        with graph.fx_graph.inserting_after(weight):
            transposed = graph.call(aten.t.default, (weight,))
        weight.replace_all_uses_with(transposed, delete_user_cb=lambda user: user is not transposed)


class DropsTranspose(Mistake):
    """The shapes do not fit any more: the operator cannot run."""

    after, parameters = "bucket", UP
    invariant, node = "shapes, dtypes and devices agree with the fake tensors", "addmm"

    def run(self, graph: Graph, context: PassContext) -> None:
        transpose = call_of(graph, aten.t.default)
        transpose.replace_all_uses_with(transpose.args[0])
        graph.fx_graph.erase_node(transpose)


class AnnotatesTheSecondOfTwoEqualCallsWrongly(Mistake):
    """The first one's value is right."""

    after, parameters = "bucket", UP
    invariant, node = "shapes, dtypes and devices agree with the fake tensors", "again"

    def run(self, graph: Graph, context: PassContext) -> None:
        gelu = call_of(graph, aten.gelu.default)
        with graph.fx_graph.inserting_after(gelu):
            copy_of(graph, gelu).meta["val"] = gelu.meta["val"].double()


class ChangesWhatAnOperatorReads(Mistake):
    """A weight is viewed in another shape, and has the fake value of it; its transpose has that of before."""

    after, parameters = "bucket", UP[:1]
    invariant, node = "shapes, dtypes and devices agree with the fake tensors", "t"

    def run(self, graph: Graph, context: PassContext) -> None:
        weight = call_of(graph, aten.t.default).args[0]
        weight.args = (weight.args[0], list(reversed(weight.args[1])))
        weight.meta["val"] = evaluate(weight)


class LeavesOutFakeValue(Mistake):
    """A new node without a value for the passes that follow."""

    after, parameters, invariant, node = "bucket", UP, "every node has a fake value", "new"

    def run(self, graph: Graph, context: PassContext) -> None:
        gelu = call_of(graph, aten.gelu.default)
        with graph.fx_graph.inserting_after(gelu):
            graph.fx_graph.create_node("call_function", aten.relu.default, (gelu,), name="new")


class ReversesOrder(Mistake):
    """All operators come in the opposite order."""

    after, parameters, invariant, node = "bucket", ROOT, "the order is topological", "addmm_4"

    def run(self, graph: Graph, context: PassContext) -> None:
        inputs = len(graph.placeholders)
        graph.reorder([*graph.nodes[:inputs], *reversed(graph.nodes[inputs:-1]), graph.output])


class MovesInput(Mistake):
    """An input stands behind an operator."""

    after, parameters, invariant, node = "bucket", ("head.bias",), "inputs come first", "primals_11"

    def run(self, graph: Graph, context: PassContext) -> None:
        call_of(graph, aten.gelu.default).append(graph.placeholders[-1])


class InsertsBeforeAnErasedNode(Mistake):
    """Which loses nodes as soon as others move there."""

    after, parameters, invariant, node = "bucket", UP, "the list of nodes is whole", "new"

    def run(self, graph: Graph, context: PassContext) -> None:
        gelu = call_of(graph, aten.gelu.default)
        with graph.fx_graph.inserting_after(gelu):
            erased = graph.call(aten.relu.default, (gelu,))
        graph.fx_graph.erase_node(erased)
        with graph.fx_graph.inserting_before(erased):
            graph.call(aten.relu.default, (gelu,), name="new")


# Outputs and gradients

RETURNS = "the graph returns what it returned"


class DropsUserOutput(Mistake):
    """The model's output is not returned."""

    parameters, invariant, node = (), RETURNS, "output"

    def run(self, graph: Graph, context: PassContext) -> None:
        graph.output.args = (graph.output.args[0][1:],)


class AddsOutput(Mistake):
    """The model's output is returned twice."""

    parameters, invariant, node = (), RETURNS, "output"

    def run(self, graph: Graph, context: PassContext) -> None:
        graph.output.args = ((graph.output.args[0][0], *graph.output.args[0]),)


class SwapsSavedTensors(Mistake):
    """Backward takes two tensors of one shape for each other."""

    parameters, invariant, node = (), RETURNS, "output"

    def run(self, graph: Graph, context: PassContext) -> None:
        outputs = list(graph.outputs)
        gelus = [node for node in graph.nodes if node.target is aten.gelu.default]
        saved = [outputs.index(node) for node in gelus]
        outputs[saved[0]], outputs[saved[-1]] = outputs[saved[-1]], outputs[saved[0]]
        graph.output.args = (tuple(outputs),)


class DropsSavedTensor(Mistake):
    """A tensor that backward takes is not saved."""

    parameters, invariant, node = (), RETURNS, "output"

    def run(self, graph: Graph, context: PassContext) -> None:
        graph.output.args = (graph.output.args[0][:-1],)


class DropsShardGradient(Mistake):
    """A parameter gets None for its gradient."""

    phases, parameters, invariant, node = ("backward",), BLOCK0[:1], RETURNS, "output"

    def run(self, graph: Graph, context: PassContext) -> None:
        graph.output.args = ((None, *graph.output.args[0][1:]),)


class ZeroesShardGradient(Mistake):
    """A parameter gets something of the right shape that is not its gradient."""

    phases, parameters, invariant, node = ("backward",), BLOCK0[:1], RETURNS, "output"

    def run(self, graph: Graph, context: PassContext) -> None:
        gradient, *others = graph.output.args[0]
        with graph.fx_graph.inserting_before(graph.output):
            graph.output.args = ((graph.call(aten.zeros_like.default, (gradient,)), *others),)


class SwapsShardGradients(Mistake):
    """Two parameters of one shape get each other's gradients."""

    phases, parameters, invariant, node = ("backward",), BLOCK0[:1], RETURNS, "output"

    def run(self, graph: Graph, context: PassContext) -> None:
        outputs = list(graph.output.args[0])
        shards = [node for node in outputs if node is not None and node.meta["val"].shape == (4, 16)]
        swapped = dict(zip(shards, reversed(shards), strict=True))
        graph.output.args = (tuple(swapped.get(node, node) for node in outputs),)


OWN = "each gradient is its parameter's"


class ReducesAnotherGradient(Mistake):
    """Two parameters of one shape are reduced as each other's gradients."""

    phases, after, parameters = ("backward",), "just_in_time", ("blocks.1.up.weight",)
    invariant, node = OWN, "reduce_grad_5"

    def run(self, graph: Graph, context: PassContext) -> None:
        first, last = [n for n in graph.with_role(Role.REDUCE) if n.meta["fsdp"].params[0].endswith("up.weight")]
        first.args, last.args = (last.args[0], *first.args[1:]), (first.args[0], *last.args[1:])


class ReadsAnotherGradient(Mistake):
    """A gradient is read where the one before it lies in what was reduced."""

    phases, after, parameters = ("backward",), "bucket", ("blocks.0.down.bias",)
    invariant, node = OWN, "blocks_0_down_bias_grad"

    def run(self, graph: Graph, context: PassContext) -> None:
        piece = graph.buckets["blocks.0"].reduction.results[-1]
        flat, dim, begin, end = piece.args
        piece.args = (flat, dim, begin - (end - begin), begin)


class DropsReduction(Mistake):
    """Each rank would keep its own gradient of a parameter."""

    phases, after, parameters = ("backward",), "just_in_time", ("blocks.0.up.weight",)
    invariant, node = "each gradient is reduced exactly once", "own"

    def run(self, graph: Graph, context: PassContext) -> None:
        reduction = graph.with_role(Role.REDUCE)[-1]
        gradient, shard_shape = reduction.args[:2]
        with graph.fx_graph.inserting_before(reduction):
            own = graph.call(aten.slice.Tensor, (gradient, 0, 0, shard_shape[0]), name="own")
        reduction.replace_all_uses_with(own)
        graph.fx_graph.erase_node(reduction)


class DropsReductionAndReturnsNothing(Mistake):
    """A parameter gets None, and nothing reduces its gradient."""

    phases, after, parameters = ("backward",), "just_in_time", ("blocks.0.up.weight",)
    invariant, node = "each gradient is reduced exactly once", "output"

    def run(self, graph: Graph, context: PassContext) -> None:
        reduction = graph.with_role(Role.REDUCE)[-1]
        reduction.replace_all_uses_with(None)
        graph.fx_graph.erase_node(reduction)


class DropsReducedGradient(Mistake):
    """What comes out of a reduction goes nowhere."""

    phases, after, parameters = ("backward",), "bucket", ("blocks.0.up.weight",)
    invariant, node = "each reduced gradient is returned", "reduce_blocks_0"

    def run(self, graph: Graph, context: PassContext) -> None:
        result = graph.buckets["blocks.0"].reduction.results[0]
        result.replace_all_uses_with(None)
        graph.fx_graph.erase_node(result)


class DropsReductionFromJointGraph(DropsReduction):
    """The same before forward and backward are parted."""

    phases, after = ("joint",), "recompute"


class ReducesTwice(Mistake):
    """A second reduction of the same gradient."""

    phases, after, parameters = ("backward",), "just_in_time", ("head.bias",)
    invariant, node = "each gradient is reduced exactly once", "reduce_grad"

    def run(self, graph: Graph, context: PassContext) -> None:
        reduction = graph.with_role(Role.REDUCE)[0]
        with graph.fx_graph.inserting_before(reduction):
            copy_of(graph, reduction)


class ReordersCollectives(Mistake):
    """The second gather starts before the first, on this rank."""

    after, parameters = "prefetch", BLOCK1
    invariant, node = "the sequence of collectives is the plan's", "gather_blocks_1"

    def run(self, graph: Graph, context: PassContext) -> None:
        node_of(graph, Role.GATHER_START, "blocks.0").prepend(node_of(graph, Role.GATHER_START, "blocks.1"))


class Counted(nn.Module):
    """Reads a buffer and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) + self.calls.sin()
        self.calls += 1
        return x


@pytest.mark.parametrize("wrong", ["erased", "early"])
def test_a_buffer_is_written_where_it_was(fake_group: None, wrong: str) -> None:
    class WritesElsewhere(GraphPass):
        name, phase = "writes_elsewhere", "forward"

        def run(self, graph: Graph, context: PassContext) -> None:
            write, read = call_of(graph, aten.copy_.default), call_of(graph, aten.sin.default)
            if wrong == "erased":
                graph.fx_graph.erase_node(write)
            else:
                read.prepend(write.args[1])
                read.prepend(write)

    model = Counted()
    pipeline = default_pipeline().insert_after("prefetch", WritesElsewhere())
    graph_fsdp.compile(model, backend="eager", passes=pipeline)
    with pytest.raises(graph_fsdp.VerificationError) as raised:
        model(torch.ones(2, 4))
    assert raised.value.invariant == "inputs are written as they were"
    assert raised.value.node == ("primals_4" if wrong == "erased" else "sin")
    assert model.calls.sum() == 0


@pytest.mark.parametrize("mistake", mistakes_of(__name__), ids=lambda mistake: mistake.name)
def test_the_verifier_names_the_mistake(fake_group: None, mistake: type[Mistake]) -> None:
    check_named(mistake)
