"""Pipelines: contracts are checked when one is built; a user's schedule pass reorders by the dependency graph."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from marks import mostly_long
from models import MLP
from torch import Tensor, fx, nn

import graph_fsdp
from graph_fsdp.passes import Free, Graph, GraphPass, PassContext, PassPipeline, PipelineError, Role, default_pipeline
from graph_fsdp.passes import pipeline as pipelines
from graph_fsdp.passes.pipeline import collector_paused, garbage_collected


class Nothing(GraphPass):
    """Changes nothing, under any name and contract."""

    def __init__(self, name: str = "nothing", **contract: Any) -> None:
        self.name = name
        self.__dict__.update(contract)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        return None


# Contracts


def refuse(build: Callable[[], PassPipeline], *words: str) -> None:
    with pytest.raises(PipelineError) as raised:
        build()
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_an_edit_returns_a_new_pipeline() -> None:
    pipeline = default_pipeline()
    edited = pipeline.insert_before("free", Nothing("before")).insert_after("free", Nothing("after"))
    assert [p.name for p in edited.replace("after", Nothing("end"))][-4:] == ["before", "free", "end", "slots"]
    assert [p.name for p in edited.remove("before")][-3:] == ["free", "after", "slots"]
    assert "before" not in repr(pipeline)
    assert repr(edited).endswith("prefetch, before, free, after, slots)")


@pytest.mark.parametrize(
    "edit",
    [
        lambda pipeline: pipeline.replace("schedule", Nothing()),
        lambda pipeline: pipeline.remove("schedule"),
        lambda pipeline: pipeline.insert_before("schedule", Nothing()),
        lambda pipeline: pipeline.insert_after("schedule", Nothing()),
    ],
    ids=["replace", "remove", "insert_before", "insert_after"],
)
def test_editing_at_a_pass_that_the_pipeline_does_not_have(edit: Callable[[PassPipeline], PassPipeline]) -> None:
    refuse(lambda: edit(default_pipeline()), "has no pass 'schedule'", "attention, insert_gathers", "prefetch, free")


def test_a_pass_whose_requirement_nobody_provides() -> None:
    refuse(lambda: default_pipeline().remove("annotate"), "'recompute'", "['annotated']", "joint graph")
    needs_units = Nothing("mine", requires={"colours"})
    refuse(lambda: default_pipeline().insert_after("free", needs_units), "'mine' requires ['colours']", "forward")


def test_a_pass_before_the_one_that_it_requires() -> None:
    early = Nothing("early", phases=("backward",), requires={"bucketed"})
    refuse(lambda: default_pipeline().insert_before("bucket", early), "'early' requires ['bucketed']", "backward")
    default_pipeline().insert_after("bucket", early)


def test_two_passes_of_one_name() -> None:
    refuse(lambda: default_pipeline().insert_after("free", Free()), "Free('free')", "a name of its own")
    refuse(lambda: default_pipeline().insert_after("free", Nothing("")), "needs a name")


def test_a_pipeline_without_what_the_executor_needs() -> None:
    without_slots = default_pipeline().remove("slots")
    refuse(lambda: without_slots.remove("free"), "no pass makes the forward graph 'freed'", "executor")
    refuse(lambda: default_pipeline().remove("insert_gathers"), "no pass makes the capture graph 'gathered'")


def test_unknown_phases_and_things_that_are_no_passes() -> None:
    typo = Nothing("typo", phases=("forwards",))
    refuse(lambda: default_pipeline().insert_after("free", typo), "'typo'", "forwards", "forward, backward")
    refuse(lambda: default_pipeline().insert_after("free", Nothing("idle", phases=())), "'idle'", "would never run")
    refuse(lambda: default_pipeline().insert_after("free", Nothing(5)), "needs a name")  # type: ignore[arg-type]
    refuse(lambda: PassPipeline([*default_pipeline(), Free]), "must be GraphPass objects", "Free")  # type: ignore[list-item]
    refuse(lambda: PassPipeline(Free()), "must be a list of GraphPass objects", "Free")  # type: ignore[arg-type]
    refuse(lambda: PassPipeline(None), "must be a list of GraphPass objects", "None")  # type: ignore[arg-type]


def test_one_phase_is_shorthand_for_phases() -> None:
    seen = []

    class Look(GraphPass):
        name, phase = "look", "backward"

        def run(self, graph: Graph, context: PassContext) -> None:
            seen.append(graph.phase)

    class LookThere(Look):
        name, phases = "look_there", ["forward", "inference"]

    class LookHere(LookThere):
        name, phase = "look_here", "forward"

    assert [p.runs_in() for p in (Look(), LookThere(), LookHere())] == [
        ("backward",),
        ("forward", "inference"),
        ("forward",),
    ], "what a subclass says counts"
    model = graph_fsdp.compile(MLP(), backend="eager", passes=default_pipeline().insert_after("free", Look()))
    model(torch.ones(4, 16)).sum().backward()
    assert seen == ["backward"]


@pytest.mark.parametrize(
    "contract, words",
    [
        ({"phase": "backward", "phases": ("forward",)}, ("phase to 'backward'", "phases to ('forward',)")),
        ({"phase": ("forward", "backward")}, ("phase must be one of capture, joint", "set phases to name several")),
        ({"phase": "backwards"}, ("unknown phases ['backwards']",)),
        ({"phases": "backward"}, ("phases must be a set, tuple or list", "'backward'", "write ('backward',)")),
        ({"requires": "bucketed"}, ("requires must be a set, tuple or list", "write ('bucketed',)")),
        ({"provides": "scheduled"}, ("provides must be a set, tuple or list", "write ('scheduled',)")),
        ({"requires": None}, ("requires must be a set, tuple or list of strings, got None",)),
        ({"provides": [Role.FREE]}, ("provides must be a set, tuple or list of strings",)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else " ".join(value),
)
def test_contracts_that_say_nothing_or_two_things(contract: dict[str, Any], words: tuple[str, ...]) -> None:
    refuse(lambda: default_pipeline().insert_after("free", Nothing(**contract)), "Nothing('nothing')", *words)


@pytest.mark.parametrize("kind", [set, tuple, list, frozenset])
def test_contracts_are_any_collection_of_strings(kind: type) -> None:
    contract = {"phases": kind(["backward"]), "requires": kind(["bucketed"]), "provides": kind(["mine"])}
    default_pipeline().insert_after("bucket", Nothing(**contract))


# Dependencies


class Visit(GraphPass):
    """Hands each graph to a function."""

    def __init__(self, visit: Callable[[Graph], None], name: str = "visit") -> None:
        self.visit, self.name = visit, name

    def run(self, graph: Graph, context: PassContext) -> str | None:
        return self.visit(graph)


class Everything(nn.Module):
    """Units, two random draws that do not depend on each other, a buffer that is read, changed and read again,
    and a view that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        before = self.calls.clone()
        self.calls += 1
        left, right = nn.functional.dropout(self.norm(x), 0.3), nn.functional.dropout(x, 0.3)
        self.calls *= 3
        left[:, 0].mul_(2)
        return self.mlp(left + 2 * right) + self.calls + 5 * before


def run(model: nn.Module) -> dict[str, Tensor]:
    """Two steps from a fixed seed: outputs, gradients and buffers."""
    torch.manual_seed(1)
    found = {}
    for step in range(2):
        found[f"output {step}"] = model(torch.arange(64.0).sin().view(4, 16))
        found[f"output {step}"].square().sum().backward()
    found.update({name: parameter.grad for name, parameter in model.named_parameters()})
    return {name: tensor.detach().clone() for name, tensor in [*found.items(), *model.named_buffers()]}


def compiled(model: nn.Module, *visits: Callable[[Graph], None], after: str = "prefetch") -> nn.Module:
    pipeline = default_pipeline()
    for index, visit in enumerate(visits):
        pipeline = pipeline.insert_after(after, Visit(visit, f"visit{index}"))
    return graph_fsdp.compile(model, backend="eager", passes=pipeline)


def test_every_graph_is_in_a_topological_order_of_its_dependencies(fake_group: None) -> None:
    phases = []

    def visit(graph: Graph) -> None:
        dag, positions = graph.dependencies(), graph.positions()
        assert nx.is_directed_acyclic_graph(dag)
        assert set(dag.nodes) == set(graph.nodes)
        assert all(positions[before] < positions[after] for before, after in dag.edges)
        assert [node for node, degree in dag.out_degree if degree == 0] == [graph.output], "it comes last"
        assert {kind for *_, kind in dag.edges(data="kind")} <= {"data", "memory", "collective", "random"}
        phases.append(graph.phase)

    model = compiled(Everything(), visit)
    run(model)
    with torch.no_grad():
        model(torch.ones(4, 16))
    assert phases == ["forward", "backward", "inference"]


def test_what_reads_a_buffer_comes_between_its_wait_and_its_free(fake_group: None) -> None:
    readers = []

    def visit(graph: Graph) -> None:
        dag, roots = graph.dependencies(), graph.alias_roots()
        for freed in graph.with_role(Role.FREE):
            (wait,) = freed.all_input_nodes
            for node in graph.nodes:
                aliases = frozenset().union(*(roots[source] for source in node.all_input_nodes))
                if roots[wait] <= aliases and node not in (wait, freed):
                    assert nx.has_path(dag, wait, node) and dag.has_edge(node, freed)
                    readers.append(node.name)

    run(compiled(MLP(), visit, after="free"))
    assert {"blocks_0_up_weight", "blocks_0_up_weight_1", "t", "addmm", "addmm_1"} <= set(readers)


def test_collectives_and_random_numbers_keep_their_order(fake_group: None) -> None:
    def visit(graph: Graph) -> None:
        dag = graph.dependencies()
        for kind, count in {"collective": len(graph.collectives) - 1, "random": 1}.items():
            chain = nx.DiGraph((a, b) for a, b, k in dag.edges(data="kind") if k == kind)
            assert len(chain.edges) == (count if graph.phase == "forward" or kind == "collective" else 0)
            assert not chain or nx.dag_longest_path_length(chain) == len(chain.edges), "one chain"

    run(compiled(Everything(), visit))


@pytest.mark.parametrize("seed", mostly_long(range(4), [0]))
def test_any_topological_order_computes_the_same(seed: int) -> None:
    """One process, no collectives: results are the proof that no dependency is missing."""
    changed = []

    def shuffle(graph: Graph) -> None:
        generator = random.Random(seed)
        places = {"placeholder": 0, "output": 2}
        key = {node: (places.get(node.op, 1), generator.random()) for node in graph.nodes}
        key.update({node: (0, index) for index, node in enumerate(graph.placeholders)})
        order = list(nx.lexicographical_topological_sort(graph.dependencies(), key=key.__getitem__))
        changed.append(order != graph.nodes)
        graph.reorder(order)

    model = Everything()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = run(compiled(model))
    model = Everything()
    model.load_state_dict(state)
    torch._dynamo.reset()
    actual = run(compiled(model, shuffle))
    assert changed == [True, True]
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_a_users_schedule_replaces_prefetch(fake_group: None) -> None:
    class Serial(GraphPass):
        """Every gather right before its unit, as the dependencies allow."""

        name, requires, provides = "serial", {"bucketed"}, {"scheduled"}

        def run(self, graph: Graph, context: PassContext) -> str:
            graph.reorder(list(nx.topological_sort(graph.dependencies())))
            return "in networkx's order"

    pipeline = default_pipeline().replace("prefetch", Serial())
    model = graph_fsdp.compile(MLP(), backend="eager", passes=pipeline)
    model(torch.ones(4, 16)).sum().backward()
    stage = graph_fsdp.inspect(model).backward.stages["serial"]
    assert stage.summary == "in networkx's order"
    assert "# in networkx's order" in stage.code
    assert "prefetch" not in graph_fsdp.inspect(model).forward.stages


@pytest.mark.parametrize(
    "wrong",
    [
        lambda nodes, other: nodes[:-2] + nodes[-1:],
        lambda nodes, other: [*nodes[:-1], nodes[-2], nodes[-1]],
        lambda nodes, other: [*nodes[:-2], nodes[-3], nodes[-1]],
        lambda nodes, other: [*nodes[:-2], other, nodes[-1]],
    ],
    ids=["one missing", "one twice", "one twice and one missing", "one of another graph"],
)
def test_reorder_takes_each_node_once(wrong: Callable[..., list[fx.Node]]) -> None:
    graph = Graph(fx.symbolic_trace(MLP()), "forward")
    nodes = graph.nodes
    with pytest.raises(ValueError, match="give each node of the graph once"):
        graph.reorder(wrong(nodes, fx.Graph().placeholder("other")))
    assert graph.nodes == nodes


# What running leaves behind


def test_a_stage_shows_the_graph_as_it_was_whatever_later_passes_do(fake_group: None) -> None:
    before = []

    def look(graph: Graph) -> None:
        before.append(str(graph.fx_graph))

    def ruin(graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["colour"] = "red"
        gelu = next(node for node in graph.nodes if node.target is torch.ops.aten.gelu.default)
        gelu.replace_all_uses_with(gelu.args[0])
        graph.fx_graph.erase_node(gelu)

    model = compiled(MLP(), ruin, look)  # visit1 comes first
    with torch.no_grad():
        model(torch.ones(4, 16))
    stages = graph_fsdp.inspect(model).inference.stages
    bodies = [stages["visit1"].body, stages["visit0"].body]
    assert str(stages["visit1"].graph) == before[0]
    assert [body.count("gelu.default(") for body in bodies] == [2, 1]
    assert not any("colour" in node.meta for node in stages["visit1"].graph.nodes)
    assert [node.name for node in stages["visit0"].graph.nodes if "colour" in node.meta]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_left_as_it_was(fake_group: None, enabled: bool) -> None:
    def fail(graph: Graph) -> None:
        assert not gc.isenabled()
        raise KeyError

    gc.enable() if enabled else gc.disable()
    try:
        with pytest.raises(Exception, match="KeyError"):
            compiled(MLP(depth=1), fail)(torch.ones(4, 16))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


# The garbage collector


@pytest.fixture
def nothing_seen_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "frozen", False)


def test_what_is_allocated_while_the_collector_pauses_is_old_afterwards(nothing_seen_frozen: None) -> None:
    with collector_paused():
        assert not gc.isenabled()
        made: list[int] = []
    assert gc.isenabled() and any(thing is made for thing in gc.get_objects(generation=2))


def test_what_the_user_has_frozen_stays_so(nothing_seen_frozen: None) -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        with collector_paused():
            pass
        assert gc.get_freeze_count() > frozen / 2, "but for what died meanwhile"
    finally:
        gc.unfreeze()


def test_frozen_objects_are_counted_until_there_are_some(
    nothing_seen_frozen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [0, 7]
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.pop(0))
    for left in (1, 0, 0):
        with collector_paused():
            pass
        assert len(counts) == left


def test_graphs_on_the_way_to_others_are_freed_while_the_collector_pauses(nothing_seen_frozen: None) -> None:
    with collector_paused():
        before = fx.Graph()
        seen = [weakref.ref(before), None]
        with garbage_collected():
            del before
            graph = fx.Graph()
            graph.output(graph.placeholder("x"))
            seen[1] = weakref.ref(graph)
            del graph
        assert seen[1]() is None and gc.get_freeze_count() == 0
