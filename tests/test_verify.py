"""The verifier rejects broken passes, and says which pass, invariant, node and parameters.

Each ``Mistake`` is a pass that a user could have written, with one thing wrong: its docstring says what.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar

import pytest
import torch
from models import MLP
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import VerificationError
from graph_fsdp.passes import Graph, GraphPass, PassContext, Role, default_pipeline
from graph_fsdp.passes.dialect import free
from graph_fsdp.passes.fake_values import evaluate

aten, prims = torch.ops.aten, torch.ops.prims

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


# Gathered buffers: started, waited for and freed once, used in between


class FreesEarly(Mistake):
    """The free stands before the unit's last operator."""

    invariant, node = "a buffer is not used after its free", "addmm_1"

    def run(self, graph: Graph, context: PassContext) -> None:
        views = [view for view in graph.with_role(Role.UNPACK) if view.meta["fsdp"].bucket == "blocks.0"]
        views[-1].append(node_of(graph, Role.FREE))


class FreesTwice(Mistake):
    """A second free, at the end."""

    invariant, node = "each gathered buffer is freed once", "again"

    def run(self, graph: Graph, context: PassContext) -> None:
        with graph.fx_graph.inserting_before(graph.output):
            copy_of(graph, node_of(graph, Role.FREE))


class NeverFrees(Mistake):
    """The free is gone."""

    phases = ("forward", "inference")
    invariant, node = "each gathered buffer is freed once", "gather_blocks_0"

    def run(self, graph: Graph, context: PassContext) -> None:
        graph.fx_graph.erase_node(node_of(graph, Role.FREE))


class FreesWhatItReturns(Mistake):
    """A free of the buffer that forward keeps for backward."""

    invariant, node, parameters = "a buffer is not used after its free", "output", ROOT

    def run(self, graph: Graph, context: PassContext) -> None:
        with graph.fx_graph.inserting_before(graph.output):
            graph.call(free, (node_of(graph, Role.GATHER_WAIT, "root"),))


class UsesAfterFree(Mistake):
    """An operator at the end reads the transpose of a view of the buffer."""

    invariant, node = "a buffer is not used after its free", "late"

    def run(self, graph: Graph, context: PassContext) -> None:
        with graph.fx_graph.inserting_before(graph.output):
            graph.call(aten.sum.default, (call_of(graph, aten.t.default),), name="late")


class OrdersAUseBeforeItsWait(Mistake):
    """In the new order the wait stands behind the first view of what it waits for."""

    after, invariant, node = "bucket", "a buffer is used after its wait", "blocks_0_up_weight"

    def run(self, graph: Graph, context: PassContext) -> None:
        order, wait = graph.nodes, graph.gathers[0].wait
        order.remove(wait)
        order.insert(order.index(next(iter(wait.users))) + 1, wait)
        graph.reorder(order)


class ExceedsTheBudget(Mistake):
    """All gathers start at the top. The pipeline allows one and a half blocks."""

    after, options, parameters = "prefetch", {"budget": 7000}, BLOCK1
    invariant, node = "bytes gathered and in flight stay under the budget", "gather_blocks_1"

    def run(self, graph: Graph, context: PassContext) -> None:
        for gather in reversed(graph.gathers):
            graph.placeholders[-1].append(gather.start)


class UsesBeforeWait(Mistake):
    """An operator reads the buffer while the gather is under way."""

    after, invariant, node = "bucket", "a buffer is used after its wait", "early"

    def run(self, graph: Graph, context: PassContext) -> None:
        start = node_of(graph, Role.GATHER_START)
        with graph.fx_graph.inserting_after(start):
            graph.call(aten.sum.default, (start,), name="early")


class ReadsAnotherParameter(Mistake):
    """A parameter is read where another of the same shape lies."""

    after, invariant, node, parameters = "bucket", LAYOUT, "blocks_0_up_bias", ("blocks.0.up.bias",)

    def run(self, graph: Graph, context: PassContext) -> None:
        bias = next(n for n in graph.with_role(Role.UNPACK) if n.meta["fsdp"].params == ("blocks.0.up.bias",))
        bias.args = (bias.args[0], 0, 0, 32)


class ReversesShards(Mistake):
    """The chunks of a bucket in another order than they lie in the storage."""

    after, invariant, node = "bucket", LAYOUT, "gather_blocks_0"

    def run(self, graph: Graph, context: PassContext) -> None:
        start = node_of(graph, Role.GATHER_START)
        start.args = (list(reversed(start.args[0])), *start.args[1:])


class DropsWait(Mistake):
    """What read the wait's value reads the start's."""

    after, invariant, node = "bucket", "a buffer is used after its wait", "blocks_0_up_weight"

    def run(self, graph: Graph, context: PassContext) -> None:
        wait = node_of(graph, Role.GATHER_WAIT)
        wait.replace_all_uses_with(wait.args[0])
        graph.fx_graph.erase_node(wait)


class DropsWaitOfReduction(Mistake):
    """Gradients are taken from a reduction that is not waited for."""

    phases, after = ("backward",), "bucket"
    invariant, node = "a buffer is used after its wait", "blocks_0_up_weight_grad"

    def run(self, graph: Graph, context: PassContext) -> None:
        wait = node_of(graph, Role.REDUCE_WAIT)
        wait.replace_all_uses_with(wait.args[0])
        graph.fx_graph.erase_node(wait)


class WaitsTwice(Mistake):
    """A second wait behind the first."""

    after, invariant, node = "bucket", "each collective is waited for once", "again"

    def run(self, graph: Graph, context: PassContext) -> None:
        wait = node_of(graph, Role.GATHER_WAIT)
        with graph.fx_graph.inserting_after(wait):
            copy_of(graph, wait)


class GathersTwice(Mistake):
    """A second gather of the bucket, for one of its parameters."""

    after, invariant, node = "bucket", "each bucket is gathered once", "again"

    def run(self, graph: Graph, context: PassContext) -> None:
        start, view = node_of(graph, Role.GATHER_START), call_of(graph, aten.slice.Tensor)
        with graph.fx_graph.inserting_before(view):
            view.replace_input_with(view.args[0], copy_of(graph, view.args[0], copy_of(graph, start)))


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


# Slots


class SharesSlot(Mistake):
    """Two buffers that are live at once lie in one slot."""

    after, parameters = "slots", BLOCK1
    invariant, node = "live buffers do not share a slot", "gather_blocks_1"

    def run(self, graph: Graph, context: PassContext) -> None:
        slot = node_of(graph, Role.GATHER_START, "blocks.0").meta["fsdp"].slot
        change_record(node_of(graph, Role.GATHER_START, "blocks.1"), slot=slot)


class SharesLandingSlot(SharesSlot):
    """A bucket lands where its own buffer is."""

    phases, node, parameters = ("backward",), "gather_blocks_0", BLOCK0

    def run(self, graph: Graph, context: PassContext) -> None:
        start = node_of(graph, Role.GATHER_START, "blocks.0")
        change_record(start, landing_slot=start.meta["fsdp"].slot)


class SlotTooSmall(Mistake):
    """A slot has fewer bytes than its buffer."""

    after, invariant, node = "slots", "each buffer fits its slot", "gather_blocks_0"

    def run(self, graph: Graph, context: PassContext) -> None:
        context.slots["forward"] = tuple(size - 64 for size in context.slots["forward"])


class SlotThatIsNone(Mistake):
    """A buffer lies in a slot that there is not."""

    after, invariant, node = "slots", "each buffer fits its slot", "gather_blocks_0"

    def run(self, graph: Graph, context: PassContext) -> None:
        change_record(node_of(graph, Role.GATHER_START), slot=len(context.slots["forward"]))


class KeptInSlot(Mistake):
    """A bucket that goes to backward lies in a slot of forward."""

    after, parameters = "slots", ROOT
    invariant, node = "a buffer that outlives the graph has memory of its own", "gather_root"

    def run(self, graph: Graph, context: PassContext) -> None:
        change_record(node_of(graph, Role.GATHER_START, "root"), slot=0)


def change_record(node: fx.Node, **changes: int) -> None:
    node.meta["fsdp"] = dataclasses.replace(node.meta["fsdp"], **changes)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_verifier_names_the_mistake(fake_group: None, mistake: type[Mistake]) -> None:
    pipeline = default_pipeline(**mistake.options).insert_after(mistake.after, mistake())
    model = graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)
    for _ in range(2):  # nothing of the first attempt is left behind
        with pytest.raises(VerificationError) as raised:
            model(batch()).sum().backward()
        error = raised.value
        assert (error.pass_name, error.phase, error.invariant) == (mistake.name, mistake.phases[0], mistake.invariant)
        assert (error.node, set(error.parameters)) == (mistake.node, set(mistake.parameters))
        named = [repr(mistake.name), mistake.phases[0], mistake.invariant, mistake.node, *mistake.parameters]
        assert [word for word in named if word not in str(error)] == []
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert model._graph_fsdp.counter.current == 0


def test_inference_graphs_are_verified_too(fake_group: None) -> None:
    pipeline = default_pipeline().insert_after("free", NeverFrees())
    model = graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)
    with torch.no_grad(), pytest.raises(VerificationError, match="broke the inference graph") as raised:
        model(batch())
    assert (raised.value.phase, raised.value.parameters) == ("inference", BLOCK0)


def test_a_pass_that_raises_is_named(fake_group: None) -> None:
    class Fails(GraphPass):
        name = "fails"

        def run(self, graph: Graph, context: PassContext) -> None:
            raise KeyError("no such unit")

    pipeline = default_pipeline().insert_after("bucket", Fails())
    model = graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)
    with pytest.raises(Exception, match="no such unit") as raised:
        model(batch())
    assert "'fails'" in "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
