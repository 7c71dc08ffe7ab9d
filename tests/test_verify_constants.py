"""The verifier rejects passes that add constants which a program cannot have."""

from __future__ import annotations

import pytest
import torch
from mistakes import UP, Mistake, call_of, check_named, mistakes_of
from torch import fx, nn

import graph_fsdp
from graph_fsdp.passes import Graph, GraphPass, PassContext, default_pipeline

aten = torch.ops.aten

CONSTANTS = "constants are nodes, or tensors of the graph's module"
OUTSIDE = torch.ones(())


class AddsATensor(Mistake):
    """A tensor is an argument; it is a fake one, as all that run() makes."""

    after, parameters, invariant, node = "bucket", UP, CONSTANTS, "new"

    def run(self, graph: Graph, context: PassContext) -> None:
        add(graph, torch.ones(()))


class ReadsAFakeTensor(Mistake):
    """It is made in run()."""

    after, parameters, invariant, node = "bucket", (), CONSTANTS, "constant"

    def run(self, graph: Graph, context: PassContext) -> None:
        add(graph, constant(graph, torch.ones(())))


class ReadsAConstantDirectly(Mistake):
    """Inductor cannot; the eager backend could."""

    after, parameters, invariant, node = "bucket", (), CONSTANTS, "constant"

    def run(self, graph: Graph, context: PassContext) -> None:
        add(graph, constant(graph, OUTSIDE))


class ReadsWhatIsNotThere(Mistake):
    """The graph's module has no such tensor."""

    after, parameters, invariant, node = "bucket", (), CONSTANTS, "constant"

    def run(self, graph: Graph, context: PassContext) -> None:
        read = constant(graph, OUTSIDE)
        del graph.fx_graph.owning_module.constant
        add(graph, read)


def constant(graph: Graph, value: torch.Tensor) -> fx.Node:
    graph.fx_graph.owning_module.register_buffer("constant", value)
    with graph.fx_graph.inserting_before(call_of(graph, aten.gelu.default)):
        return graph.fx_graph.get_attr("constant")


def add(graph: Graph, other: object) -> None:
    gelu = call_of(graph, aten.gelu.default)
    with graph.fx_graph.inserting_after(gelu):
        new = graph.fx_graph.create_node("call_function", aten.add.Tensor, (gelu, other), name="new")
    new.meta["val"] = gelu.meta["val"].clone()


class AddsAConstant(GraphPass):
    name = "adds_a_constant"

    def run(self, graph: Graph, context: PassContext) -> None:
        if graph.phase != "forward":
            return
        read = constant(graph, OUTSIDE)
        gelu = call_of(graph, aten.gelu.default)
        with graph.fx_graph.inserting_after(gelu):
            lifted = graph.fx_graph.call_function(aten.lift_fresh_copy.default, (read,))
        read.meta["val"] = lifted.meta["val"] = gelu.meta["val"].new_ones(())
        with graph.fx_graph.inserting_after(lifted):
            new = graph.call(aten.add.Tensor, (gelu, lifted))
        gelu.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def test_a_constant_that_is_lifted_runs() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    expected = layer(torch.ones(2, 4)) + 1
    passes = default_pipeline().insert_after("bucket", AddsAConstant())
    torch.testing.assert_close(graph_fsdp.compile(layer, backend="eager", passes=passes)(torch.ones(2, 4)), expected)


@pytest.mark.parametrize("mistake", mistakes_of(__name__), ids=lambda mistake: mistake.name)
def test_the_verifier_names_the_mistake(fake_group: None, mistake: type[Mistake]) -> None:
    check_named(mistake)
