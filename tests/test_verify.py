"""The verifier rejects broken passes, and says which pass, invariant, node and parameters.

Each ``Mistake`` is a pass that a user could have written, with one thing wrong: its docstring says what.
``test_verify_values.py`` has those that change what is computed, ``test_verify_constants.py`` those that add tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from mistakes import (
    BLOCK0,
    BLOCK1,
    LAYOUT,
    ROOT,
    Mistake,
    batch,
    call_of,
    change_record,
    check_named,
    copy_of,
    mistakes_of,
    node_of,
    run_on_copies,
)
from models import MLP
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import VerificationError
from graph_fsdp.passes import Graph, GraphPass, PassContext, PassError, Role, default_pipeline
from graph_fsdp.passes.ir.dialect import free

aten = torch.ops.aten


# Inputs


class AddsAnInput(Mistake):
    """An input that nobody gives."""

    after, parameters = "bucket", ()
    invariant, node = "the graph takes what it took", "extra"

    def run(self, graph: Graph, context: PassContext) -> None:
        with graph.fx_graph.inserting_before(graph.nodes[0]):
            graph.fx_graph.placeholder("extra").meta["val"] = graph.placeholders[0].meta["val"]


class ExchangesInputs(Mistake):
    """The first two inputs, of other shapes, stand in the other order."""

    after, parameters = "bucket", ("blocks.0.up.bias",)
    invariant, node = "the graph takes what it took", "primals_2"

    def run(self, graph: Graph, context: PassContext) -> None:
        first, second = graph.placeholders[:2]
        second.append(first)


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


class ExchangesArguments(Mistake):
    """Two gathers gather each other's shards."""

    after, invariant, node = "bucket", LAYOUT, "gather_blocks_0"

    def run(self, graph: Graph, context: PassContext) -> None:
        first, second = (gather.start for gather in graph.gathers[:2])
        first.args, second.args = second.args, first.args


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
        graph.slots = tuple(size - 64 for size in graph.slots)


class SlotThatIsNone(Mistake):
    """A buffer lies in a slot that there is not."""

    after, invariant, node = "slots", "each buffer fits its slot", "gather_blocks_0"

    def run(self, graph: Graph, context: PassContext) -> None:
        change_record(node_of(graph, Role.GATHER_START), slot=len(graph.slots))


class KeptInSlot(Mistake):
    """A bucket that goes to backward lies in a slot of forward."""

    after, parameters = "slots", ROOT
    invariant, node = "a buffer that outlives the graph has memory of its own", "gather_root"

    def run(self, graph: Graph, context: PassContext) -> None:
        change_record(node_of(graph, Role.GATHER_START, "root"), slot=0)


@pytest.mark.parametrize("mistake", mistakes_of(__name__), ids=lambda mistake: mistake.name)
def test_the_verifier_names_the_mistake(fake_group: None, mistake: type[Mistake]) -> None:
    check_named(mistake)


@pytest.mark.parametrize("mistake", [FreesEarly, DropsWaitOfReduction], ids=lambda mistake: mistake.name)
def test_a_model_is_as_it_was_after_a_mistake(fake_group: None, mistake: type[Mistake]) -> None:
    check_named(mistake, whole=True)


def test_the_shared_graphs_pass_without_a_mistake(fake_group: None) -> None:
    run_on_copies(default_pipeline())


def test_inference_graphs_are_verified_too(fake_group: None) -> None:
    pipeline = default_pipeline().insert_after("free", NeverFrees())
    model = graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)
    with torch.no_grad(), pytest.raises(VerificationError, match="broke the inference graph") as raised:
        model(batch())
    assert (raised.value.phase, raised.value.parameters) == ("inference", BLOCK0)


@pytest.mark.parametrize("phase", ["capture", "joint", "forward"])
def test_a_pass_that_puts_an_empty_graph_in_place_of_the_graph_is_named(fake_group: None, phase: str) -> None:
    class Empties(GraphPass):
        name, phases = "empties", (phase,)

        def run(self, graph: Graph, context: PassContext) -> None:
            graph.module.graph = torch.fx.Graph()

    after = {"capture": "insert_gathers", "joint": "annotate", "forward": "bucket"}[phase]
    model = graph_fsdp.compile(MLP(), backend="eager", passes=default_pipeline().insert_after(after, Empties()))
    with pytest.raises(VerificationError, match=f"pass 'empties' broke the {phase} graph: input .* is gone"):
        model(batch())


@pytest.mark.parametrize(
    "returned", [5, True, b"line", ["line"], torch.ones(2)], ids=lambda value: type(value).__name__
)
def test_a_pass_that_returns_no_line_is_named(fake_group: None, returned: Any) -> None:
    class Returns(GraphPass):
        name = "returns"

        def run(self, graph: Graph, context: PassContext) -> Any:
            return returned

    model = graph_fsdp.compile(MLP(), backend="eager", passes=default_pipeline().insert_after("bucket", Returns()))
    with pytest.raises(PassError, match=r"'returns' failed on the forward graph: .*run must return a line"):
        model(batch())


@pytest.mark.parametrize("phase", ["capture", "joint", "forward"])
@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_a_pass_that_raises_is_named(fake_group: None, kind: type[Exception], phase: str) -> None:
    class Fails(GraphPass):
        name, phases = "fails", (phase,)

        def run(self, graph: Graph, context: PassContext) -> None:
            raise kind("no such unit")

    if kind is ValueError and sys.version_info < (3, 11):
        pytest.skip("exceptions have no notes before Python 3.11")
    after = {"capture": "insert_gathers", "joint": "annotate", "forward": "bucket"}[phase]
    pipeline = default_pipeline().insert_after(after, Fails())
    model = graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)
    with pytest.raises(Exception, match="no such unit") as raised:
        model(batch())
    assert type(raised.value) is (ValueError if kind is ValueError else PassError)
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert f"pass 'fails' {'' if kind is ValueError else 'failed '}on the {phase} graph" in told
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_parameters_of_another_bucket_are_named(fake_group: None) -> None:
    pipeline = default_pipeline().insert_after("bucket", ExchangesArguments())
    with pytest.raises(VerificationError, match=r"bucket blocks\.0 and gathers \['blocks\.1\.up\.weight'"):
        run_on_copies(pipeline)
