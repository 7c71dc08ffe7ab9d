"""Graphs that are built and copied without torch's checks are those that torch builds with them."""

from __future__ import annotations

import contextlib
import operator
import warnings

import pytest
import torch
from models import GPT
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.compat.traces import quick_graphs

aten = torch.ops.aten


class Writes(nn.Module):
    """Counts its calls in a buffer, and computes what nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        torch.exp(x)
        return self.down(nn.functional.dropout(self.up(x).relu(), 0.5)) + self.calls


MODELS = {"plain": GPT, "checkpointed": lambda: GPT(checkpointed=True, dropout=0.1), "writes": Writes}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", MODELS)
def test_the_partitioner_makes_the_same_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for quick in (True, False):
        if not quick:
            monkeypatch.setattr(compat, "quick_copies", contextlib.nullcontext)
        torch._dynamo.reset()
        model = graph_fsdp.compile(MODELS[name](), backend="eager")
        inputs = torch.ones(2, 8) if name == "writes" else torch.ones(2, 8, dtype=torch.int64)
        model(inputs).sum().backward()
        (captured,) = graph_fsdp.inspect(model).graphs
        stages = [captured.stages[phase] for phase in ("forward", "backward")]
        texts = [stage.body for of_phase in stages for stage in of_phase.values()]
        nodes = [node for of_phase in stages for node in of_phase["partition"].graph.nodes]
        found.append((texts, [(node.name, list(node.meta)) for node in nodes]))
    assert found[0] == found[1]


def test_nodes_with_effects_stay_and_others_that_nothing_reads_go() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    unread = graph.call_function(aten.exp.default, (graph.call_function(aten.neg.default, (x,)),))
    written = graph.call_function(aten.add_.Tensor, (x, 1))
    graph.output((x,))
    copy, eliminate = fx.Graph.node_copy, fx.Graph.eliminate_dead_code
    with compat.quick_copies():
        assert graph.eliminate_dead_code()
    assert [node for node in graph.nodes if node.op == "call_function"] == [written]
    assert unread not in graph.nodes
    assert (fx.Graph.node_copy, fx.Graph.eliminate_dead_code) == (copy, eliminate)


def test_new_nodes_are_searched_for_symbolic_sizes_again_afterwards() -> None:
    trees = fx.graph.pytree
    size = ShapeEnv().create_unbacked_symint()

    def call() -> None:
        fx.Graph().call_function(operator.neg, (size,))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quick_graphs.arguments_unsearched():
            call()
    assert fx.graph.pytree is trees


def test_copies_have_the_names_and_arguments_that_torch_gives_them() -> None:
    names = ["x", "x_1", "a_1_2", "_1", "__1", "y_02", "y_2", "y", "if_1", "x_7"]
    graphs = []
    for _ in range(2):
        graphs.append(fx.Graph())
        for name in names:  # of two graphs, so that a third has some of them twice
            graphs[-1].create_node("call_function", aten.neg.default, (1, [2, 3]), {}, name)

    def copied() -> list[object]:
        made = fx.Graph()
        for graph in graphs:
            for node in graph.nodes:
                made.node_copy(node)
        made.create_node("call_function", aten.neg.default, (), {}, "x")
        made.create_node("call_function", aten.neg.default, (), {}, "y")
        made.lint()
        found = made.find_nodes(op="call_function", target=aten.neg.default)
        assert found == list(made.nodes)
        return [len(made.nodes), str(made), [(node.name, node.args, node.kwargs) for node in made.nodes]]

    with compat.quick_copies():
        quick = copied()
    assert quick == copied()


def test_leaves_of_arguments_are_those_that_torch_finds() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(
        aten.cat.default, ([x, [x, 1], ()], slice(x, None), 2.0, "a", None), {"dim": [x], "b": x}
    )
    given = node.args, dict(node.kwargs)
    assert quick_graphs.leaves_of(*given[0], **given[1]) == pytree.arg_tree_leaves(*given[0], **given[1])


def test_what_a_node_reads() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    node = graph.call_function(aten.cat.default, ([y, x, y],), {"dim": 1})
    assert list(compat.inputs_of(node)) == node.all_input_nodes == [y, x]
    assert compat.arguments_of(node) == (node.args, node.kwargs) == (([y, x, y],), {"dim": 1})


def joint_graph() -> dict[str, fx.Node]:
    """Return the nodes of a joint graph, with some that only backward reads, that nothing reads, and that write."""
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1")}

    def add(name: str, *args: object, target: object = aten.mul.Tensor, tag: str | None = None) -> None:
        nodes[name] = graph.call_function(target, tuple(nodes.get(arg, arg) for arg in args))
        nodes[name].meta["partitioner_tag"] = tag

    add("saved", "primals_1", "primals_1")
    add("recomputed", "saved", 2)
    add("unread", "recomputed", 3)
    add("drawn", "saved", target=aten.bernoulli.default)
    add("result", "saved", "primals_2")
    add("gradient", "tangents_1", "recomputed", tag="is_backward")
    add("other", "recomputed", "saved", tag="is_backward")
    add("late", "recomputed", 5)
    add("written", "tangents_1", 1, target=aten.add_.Tensor, tag="is_backward")
    graph.output((nodes["result"], nodes["gradient"]))
    return nodes


def described(graph: fx.Graph) -> tuple[object, ...]:
    """Return what a graph has, and how the next nodes of it are called."""
    nodes = [(node.op, node.name, node.target, str(node.args), list(node.users), node.meta) for node in graph.nodes]
    names = [graph.call_function(target, (1, 2)).name for target in (aten.mul.Tensor, aten.add.Tensor)]
    return str(nodes), names


SAVED = [("saved", "recomputed"), ("recomputed", "saved"), ("saved",), ("primals_1", "saved")]


@pytest.mark.parametrize("given", SAVED)
def test_forward_and_backward_are_taken_out_as_torch_takes_them(given: tuple[str, ...]) -> None:
    def extracted() -> list[object]:
        nodes = joint_graph()
        joint = nodes["saved"].graph
        extract = torch._functorch.partitioners._extract_graph_with_inputs_outputs

        def of(inputs: tuple[str, ...], outputs: tuple[str, ...], phase: str) -> fx.Graph:
            both = [[nodes[name] for name in names] for names in (inputs, outputs)]
            return extract(joint, *both, [None] * len(outputs), phase)

        primals = ("primals_1", "primals_2")
        found: list[object] = [described(of(primals, ("result",), "forward"))]
        backward = of((*given, "tangents_1"), ("gradient",), "backward")
        unread = [node.name for node in backward.find_nodes(op="placeholder") if not node.users]
        found += [str(backward), unread]
        found.append(described(of(primals, ("result", *given), "forward")))
        read = tuple(name for name in (*given, "tangents_1") if nodes[name].name not in unread)
        found.append(str(of(read, ("gradient",), "backward")))
        # An input that was read is left out, so that it is computed; and one that draws.
        for inputs in (("saved", "recomputed", "drawn", "tangents_1"), ("saved", "drawn", "tangents_1")):
            found.append(str(of(inputs, ("gradient",), "backward")))
        for inputs in (("saved", "recomputed", "drawn", "tangents_1"), ("saved", "recomputed", "tangents_1")):
            found.append(str(of(inputs, ("gradient",), "backward")))
        # Nothing in it reads a tangent, so that it is not put in another order, and its names are counted as they are.
        found.append(described(of(("saved", "recomputed"), ("other",), "backward")))
        return found

    with compat.quick_copies():
        quick = extracted()
    assert quick == extracted()
