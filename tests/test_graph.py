"""Graphs tell what uses a buffer, and snapshots of them keep what a pass has changed."""

from __future__ import annotations

import pytest
import torch
from models import GPT
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import graph_fsdp
from graph_fsdp.passes import Graph, GraphPass, PassContext, Role, default_pipeline
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.stage import Snapshot


class Collect(GraphPass):
    """Collects the graphs that it is given, and changes nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.graphs = name, dict[str, Graph]()

    def run(self, graph: Graph, context: PassContext) -> str | None:
        self.graphs[graph.phase] = graph
        return None


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("reshard", [True, False])
def test_uses_of_buffers_are_those_of_alias_roots(reshard: bool) -> None:
    last = Collect("last")
    pipeline = default_pipeline().insert_after("slots", last)
    model = graph_fsdp.compile(GPT(depth=2), backend="eager", passes=pipeline, reshard_after_forward=reshard)
    model(torch.ones(2, 8, dtype=torch.int64)).sum().backward()
    for graph in last.graphs.values():
        buffers = graph.with_role(Role.GATHER_START, Role.KEPT, Role.REDUCE_START)
        roots = graph.alias_roots()
        used = {n: {root for source in n.all_input_nodes for root in roots[source]} for n in graph.nodes}
        expected = {node: found for node in graph.nodes if (found := used[node].intersection(buffers))}
        found = graph.uses_of(buffers)
        assert buffers and found == expected and list(found) == list(expected)
        executed = [n for n in graph.nodes if n.op == "call_function" and n.target in dialect.EXECUTED]
        assert graph.calls_of(dialect.EXECUTED) == executed != []


def test_calls_are_in_the_order_that_a_graph_has_been_given() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [graph.call_function(aten, (x,)) for aten in (torch.relu, torch.neg) * 4]
    graph.output(x)
    wrapped = Graph(fx.GraphModule({}, graph), "forward")
    assert repr(wrapped) == "<Graph forward: 10 nodes>"
    for order in (calls[::-1], calls[1::2] + calls[::2], calls[5:] + calls[:5]):
        wrapped.reorder([x, *order, wrapped.output])
        assert wrapped.calls_of({torch.relu, torch.neg}) == order
    calls[0].target = torch.abs
    graph.erase_node(calls[1])
    assert wrapped.calls_of({torch.neg}) == [call for call in order if call in calls[3::2]]
    assert calls[0] in wrapped.calls_of({torch.relu, torch.abs})


def test_snapshots_share_what_did_not_change_and_keep_what_did() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    second = graph.call_function(torch.neg, (first,))
    graph.output(second)
    second.meta["val"] = 1
    before = Snapshot(graph)
    same = Snapshot(graph, before)
    assert all(a is b for a, b in zip(before.entries, same.entries, strict=True))

    texts = [str(before.copy())]
    second.args = (x,)
    second.meta["val"] = 2
    with graph.inserting_before(second):
        graph.call_function(torch.abs, (x,))
    after = Snapshot(graph, before)
    graph.erase_node(graph.find_nodes(op="call_function", target=torch.abs)[0])
    second.meta["fsdp"] = "a record"
    last = Snapshot(graph, after)
    texts += [str(after.copy()), str(last.copy())]
    values = [[node.meta for node in s.copy().find_nodes(op="call_function", target=torch.neg)] for s in (before, last)]
    assert values == [[{"val": 1}], [{"val": 2, "fsdp": "a record"}]]
    assert [text.count("call_function") for text in texts] == [2, 3, 2] and str(before.copy()) == texts[0]


def test_a_snapshot_compares_no_values_of_tensors() -> None:
    """Of fake ones that would make a symbol, with which whatever is traced next ends in an error."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        given, other = torch.empty(1), torch.empty(1)
    node.meta["example_value"] = given
    before = Snapshot(graph)
    node.meta = {"example_value": given}  # the same tensor in another dictionary
    assert Snapshot(graph, before).entries[0] is before.entries[0]
    node.meta["example_value"] = other
    assert Snapshot(graph, before).entries[0] is not before.entries[0]
    with mode:
        make_fx(torch.neg)(given)
