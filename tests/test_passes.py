"""Single passes on tiny hand-built graphs, and the facts about nodes that they stand on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import graph_fsdp
from graph_fsdp.passes import Graph, JustInTime, PassContext, Plan, Prefetch
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, set_record
from graph_fsdp.passes.ir.effects import aliased_inputs, is_cheap, mutated_inputs
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.ir.spec import MeshSpec, ModelSpec, ParameterSpec, make_model_spec
from graph_fsdp.report.report import engine_of

aten = torch.ops.aten


class Builder:
    """Builds a graph with fake values, node by node."""

    def __init__(self) -> None:
        self.module = fx.GraphModule(torch.nn.Module(), fx.Graph())
        self.mode = FakeTensorMode()

    def input(self, name: str, *shape: int, role: Role | None = None) -> fx.Node:
        node = self.module.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        if role is not None:
            set_record(node, NodeRecord(role, "", "", ()))
        return node

    def call(self, target: Any, *args: Any, name: str | None = None, record: NodeRecord | None = None) -> fx.Node:
        node = Graph(self.module, "forward").call(target, args, name=name)
        if record is not None:
            set_record(node, record)
        return node

    def done(self, phase: Phase, *outputs: fx.Node) -> Graph:
        self.module.graph.output(outputs)
        self.module.recompile()
        return Graph(self.module, phase)


def names(graph: Graph) -> str:
    return " ".join(node.name for node in graph.fx_graph.nodes)


def spec_of(*units: str) -> ModelSpec:
    f32 = torch.float32
    mesh = MeshSpec("", "group", 8)
    parameters = [ParameterSpec(f"{unit}.w", unit, (16, 4), f32, f32, f32, True, mesh) for unit in units]
    return make_model_spec(parameters, mesh)


def test_just_in_time_moves_what_is_recomputed_to_where_a_gradient_needs_it() -> None:
    build = Builder()
    first, second = build.input("first", 4, 4), build.input("second", 4, 4)
    tangent = build.input("tangent", 4, 4, role=Role.TANGENT)
    early = build.call(aten.sin.default, first, name="recomputed_of_unit_0")
    late = build.call(aten.cos.default, second, name="recomputed_of_unit_1")
    grad_1 = build.call(aten.mul.Tensor, tangent, late, name="grad_of_unit_1")
    grad_0 = build.call(aten.mul.Tensor, grad_1, early, name="grad_of_unit_0")
    graph = build.done("backward", grad_0, grad_1)
    JustInTime().run(graph, PassContext(spec_of("a")))
    assert_expected_inline(
        names(graph),
        """first second tangent recomputed_of_unit_1 grad_of_unit_1 recomputed_of_unit_0 grad_of_unit_0 output""",
    )


def test_what_forward_computes_for_backward_alone_stands_behind_its_inputs() -> None:
    """Two units, and behind them what the partitioner took out of backward and saves."""
    build = Builder()
    x = build.input("x", 4, 4)
    unit_0 = build.call(aten.sin.default, x, name="unit_0")
    unit_1 = build.call(aten.cos.default, unit_0, name="unit_1")
    of_input = build.call(aten.neg.default, x, name="saved_of_input")
    random = build.call(aten.rand_like.default, unit_0, name="saved_random")
    saved_0 = build.call(aten.exp.default, unit_0, name="saved_of_unit_0")
    also_0 = build.call(aten.mul.Tensor, saved_0, of_input, name="also_saved_of_unit_0")
    saved_1 = build.call(aten.exp.default, unit_1, name="saved_of_unit_1")
    graph = build.done("forward", unit_1, of_input, random, also_0, saved_1)
    JustInTime().run(graph, PassContext(spec_of("a"), forward_outputs=1))
    assert_expected_inline(
        names(graph),
        """x unit_0 saved_of_unit_0 unit_1 saved_of_unit_1 saved_of_input also_saved_of_unit_0 saved_random output""",
    )


def test_what_is_computed_of_a_parameter_and_what_comes_after_a_write_stay() -> None:
    build = Builder()
    x, buffer = build.input("x", 4, 4), build.input("buffer", 4, 4)
    shard = build.input("shard", 2, 4, role=Role.SHARD)
    record = NodeRecord(Role.GATHER, "b", "b", ("b.w",), 64)
    w = build.call(dialect.gather_param, shard, [4, 4], torch.float32, torch.float32, "b.w", "group", record=record)
    unit_0 = build.call(aten.sin.default, x, name="unit_0")
    unit_1 = build.call(aten.cos.default, unit_0, name="unit_1")
    of_parameter = build.call(aten.mul.Tensor, unit_0, w, name="saved_of_parameter")
    build.call(aten.copy_.default, buffer, unit_1, name="write")
    saved = build.call(aten.exp.default, unit_0, name="saved_after_write")
    graph = build.done("forward", unit_1, of_parameter, saved)
    before = names(graph)
    JustInTime().run(graph, PassContext(spec_of("a"), forward_outputs=1))
    assert names(graph) == before


def units_that_read(*units: str) -> str:
    """The last node of each unit reads ``table``, which the first unit computes, and a view of it."""
    build = Builder()
    x, index = build.input("x", 4, 4), build.input("index", 4, 4)
    weights = []
    for unit in units:
        shard, record = build.input(f"shard_{unit}", 2, 4), NodeRecord(Role.GATHER, unit, unit, (f"{unit}.w",), 64)
        arguments = (shard, [4, 4], torch.float32, torch.float32, f"{unit}.w", "group")
        weights.append(build.call(dialect.gather_param, *arguments, name=f"w_{unit}", record=record))
    for unit, weight in zip(units, weights, strict=True):
        x = build.call(aten.mm.default, x, weight, name=f"product_{unit}")
        if unit == units[0]:
            angle = build.call(aten.exp.default, index, name="angle")
            with build.mode:
                one = build.call(aten.full.default, [], 1.0, name="one")
            table = build.call(aten.mul.Tensor, build.call(aten.cos.default, angle, name="cos"), one, name="table")
            view = build.call(aten.t.default, table, name="view")
            own = build.call(aten.sin.default, angle, name="own")
            x = build.call(aten.add.Tensor, x, own, name="add")
        x = build.call(aten.mul.Tensor, x, view, name=f"use_{unit}")
    graph = build.done("forward", x)
    JustInTime().run(graph, PassContext(spec_of("a"), forward_outputs=1))
    return " ".join(node.name for node in graph.fx_graph.nodes if node.op == "call_function")


def test_what_several_units_read_and_one_computes_stands_in_front_of_that() -> None:
    assert_expected_inline(
        units_that_read("a", "b", "c"),
        """w_a w_b w_c angle one cos table product_a view own add use_a product_b use_b product_c use_c""",
    )
    assert_expected_inline(
        units_that_read("a", "b"), """w_a w_b product_a angle one cos table view own add use_a product_b use_b"""
    )
    assert_expected_inline(
        units_that_read("", "b", "c"),
        """w_ w_b w_c product_ angle one cos table view own add use_ product_b use_b product_c use_c""",
    )


def two_gathers(first: str, second: str) -> Graph:
    """Units ``a`` and ``b`` of 8 ranks, used in the order given."""
    build = Builder()
    shards = {name: build.input(f"shard_{name}", 2, 4, role=Role.SHARD) for name in "ab"}
    x = build.input("x", 128)
    for unit in (first, second):
        gather = NodeRecord(Role.GATHER_START, unit, unit, (f"{unit}.w",), 512)
        arguments = ([shards[unit]], [0], 16, torch.float32, 8, "group")
        start = build.call(dialect.all_gather_start, *arguments, name=f"start_{unit}", record=gather)
        wait = NodeRecord(Role.GATHER_WAIT, unit, unit, (f"{unit}.w",), 512)
        full = build.call(dialect.all_gather_wait, start, name=f"wait_{unit}", record=wait)
        x = build.call(aten.dot.default, x, full, name=f"use_{unit}")
        x = build.call(aten.expand.default, x, [128], name=f"expand_{unit}")
    return build.done("forward", x)


def test_prefetch_starts_the_next_gather_when_this_one_has_arrived() -> None:
    graph = two_gathers("a", "b")
    Prefetch(1).run(graph, PassContext(spec_of("a", "b")))
    assert_expected_inline(
        names(graph),
        """shard_a shard_b x start_a wait_a start_b use_a expand_a wait_b use_b expand_b output""",
    )


def test_prefetch_keeps_the_order_of_the_plan_in_a_recompiled_graph_that_uses_units_in_another() -> None:
    graph = two_gathers("b", "a")
    planned = [("gather_start", "a"), ("gather_start", "b")]
    Prefetch(1).run(graph, PassContext(spec_of("a", "b"), plan=Plan({"forward": planned})))
    assert graph.collectives == planned


def test_a_wait_stands_in_front_of_the_norm_whose_weight_it_brings() -> None:
    """The kernel of the norm takes the addition in front of it, and is not cut in two."""

    def order(scale_of_other: bool) -> str:
        build = Builder()
        shards = {name: build.input(f"shard_{name}", 2, 4, role=Role.SHARD) for name in "ab"}
        residual = x = build.input("x", 16, 8)
        for unit, shape in (("a", [8, 16]), ("b", [128])):
            record = NodeRecord(Role.GATHER_START, unit, unit, (f"{unit}.w",), 512)
            arguments = ([shards[unit]], [0], 16, torch.float32, 8, "group")
            start = build.call(dialect.all_gather_start, *arguments, name=f"start_{unit}", record=record)
            wait = replace(record, role=Role.GATHER_WAIT)
            full = build.call(dialect.all_gather_wait, start, name=f"wait_{unit}", record=wait)
            weight = build.call(aten.view.default, full, shape, name=f"weight_{unit}")
            if unit == "b":
                x = build.call(aten.mul.Tensor, x, weight, name="scaled")
                break
            x = build.call(aten.view.default, build.call(aten.mm.default, x, weight, name="product"), [2, 128])
            x = build.call(aten.add.Tensor, x, build.call(aten.view.default, residual, [128]), name="sum")
            if scale_of_other:
                x = build.call(aten.mul.Tensor, x, full, name="scaled_by_a")
            mean = build.call(aten.mean.dim, x, [-1], True, name="mean")
            x = build.call(aten.mul.Tensor, x, mean, name="norm")
        graph = build.done("forward", x)
        Prefetch(1).run(graph, PassContext(spec_of("a", "b")))
        return names(graph).partition("weight_a ")[2]

    assert_expected_inline(
        order(scale_of_other=False),
        """product wait_b view_default view_default_1 sum_1 mean norm weight_b scaled output""",
    )
    assert_expected_inline(  # where "a" is scaled with, it is in memory
        order(scale_of_other=True),
        """product view_default view_default_1 sum_1 scaled_by_a wait_b mean norm weight_b scaled output""",
    )


def gathers_and_reductions() -> Graph:
    """Backward of units ``b`` and ``a``: each is gathered, used and reduced, one after the other."""
    build = Builder()
    shards = {name: build.input(f"shard_{name}", 2, 4, role=Role.SHARD) for name in "ab"}
    grad = build.input("tangent", 128, role=Role.TANGENT)
    reduced = []
    for unit in "ba":
        record = NodeRecord(Role.GATHER_START, unit, unit, (f"{unit}.w",), 512)
        arguments = ([shards[unit]], [0], 16, torch.float32, 8, "group")
        start = build.call(dialect.all_gather_start, *arguments, name=f"gather_{unit}", record=record)
        wait = replace(record, role=Role.GATHER_WAIT)
        full = build.call(dialect.all_gather_wait, start, name=f"full_{unit}", record=wait)
        grad = build.call(aten.mul.Tensor, grad, full, name=f"grad_{unit}")
        record = NodeRecord(Role.REDUCE_START, unit, unit, (f"{unit}.w",), 64)
        arguments = ([grad], torch.float32, 8, "group")
        start = build.call(dialect.reduce_scatter_start, *arguments, name=f"reduce_{unit}", record=record)
        wait = replace(record, role=Role.REDUCE_WAIT)
        reduced.append(build.call(dialect.reduce_wait, start, name=f"reduced_{unit}", record=wait))
    return build.done("backward", *reduced)


def reduction_between(*following: str) -> str:
    """Backward of a unit whose gradient is reduced, and the operators that follow; in order, after ``Prefetch``."""
    build = Builder()
    tangent, x = build.input("tangent", 16, 16, role=Role.TANGENT), build.input("x", 16, 16)
    grad = build.call(aten.mm.default, tangent, x, name="grad")
    record = NodeRecord(Role.REDUCE_START, "a", "a", ("a.w",), 64)
    start = build.call(dialect.reduce_scatter_start, [grad], torch.float32, 8, "group", name="reduce", record=record)
    wait = build.call(dialect.reduce_wait, start, name="reduced", record=replace(record, role=Role.REDUCE_WAIT))
    last = tangent
    for name in following:
        operator = {"add": aten.add.Tensor, "t": aten.t.default, "mm": aten.mm.default}[name]
        last = build.call(operator, last, *(() if name == "t" else (x,)), name=name)
    graph = build.done("backward", wait, last)
    Prefetch(1).run(graph, PassContext(spec_of("a")))
    return names(graph)


def test_a_reduction_starts_behind_the_pointwise_operators_that_follow_its_gradients() -> None:
    assert_expected_inline(reduction_between("add", "t", "mm"), """tangent x grad reduce add t mm reduced output""")
    assert_expected_inline(reduction_between("t", "mm"), """tangent x grad reduce t mm reduced output""")
    assert_expected_inline(reduction_between("mm", "add"), """tangent x grad reduce mm add reduced output""")


def test_a_gather_moves_up_to_keep_the_plan() -> None:
    graph = gathers_and_reductions()
    planned = [("gather_start", "b"), ("gather_start", "a"), ("reduce_start", "b"), ("reduce_start", "a")]
    assert Plan({graph.phase: planned}).keep(graph)
    assert graph.collectives == planned
    assert "grad_b gather_a reduce_b reduced_b full_a grad_a reduce_a reduced_a" in names(graph)


def test_a_gather_moves_down_to_keep_the_plan_as_far_as_its_wait() -> None:
    graph = gathers_and_reductions()
    start = next(node for node in graph.nodes if node.name == "gather_a")
    graph.placeholders[-1].append(start)
    planned = [("gather_start", "b"), ("reduce_start", "b"), ("gather_start", "a"), ("reduce_start", "a")]
    assert graph.collectives != planned
    assert Plan({graph.phase: planned}).keep(graph)
    assert "grad_b reduce_b gather_a reduced_b full_a grad_a reduce_a reduced_a" in names(graph)


def test_a_graph_that_is_scheduled_keeps_its_order() -> None:
    graph = gathers_and_reductions()
    fixed = graph.order = graph.collectives  # by the verifier, behind the pass that schedules
    start = next(node for node in graph.nodes if node.name == "gather_a")
    graph.placeholders[-1].append(start)
    assert graph.collectives != fixed
    assert Plan().keep(graph)
    assert graph.collectives == fixed


@pytest.mark.parametrize(
    "planned",
    [
        [("gather_start", "b"), ("reduce_start", "b"), ("reduce_start", "a"), ("gather_start", "a")],  # a needs itself
        [("gather_start", "b"), ("reduce_start", "b"), ("gather_start", "a")],  # another set of collectives
    ],
)
def test_a_graph_that_cannot_keep_the_plan_is_left_as_it_is(planned: list[tuple[str, str]]) -> None:
    graph = gathers_and_reductions()
    before = names(graph)
    assert not Plan({graph.phase: planned}).keep(graph)
    assert names(graph) == before


def test_a_plan_survives_its_text() -> None:
    plan = Plan({"forward": [("gather_start", "a")], "backward": [("reduce_start", "a")]}, ["a"])
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("target", "alias"),
    [
        (aten.view.default, True),
        (aten.t.default, True),
        (aten.slice.Tensor, True),
        (aten._unsafe_view.default, True),  # whose schema does not say so
        (aten.add.Tensor, False),
        (aten.clone.default, False),
        (dialect.all_gather_wait, True),
        (dialect.all_gather_start, False),
    ],
)
def test_aliases_follow_the_schema(target: Any, alias: bool) -> None:
    graph = fx.Graph()
    source = graph.placeholder("source")
    node = graph.call_function(target, (source,))
    assert aliased_inputs(node) == ([source] if alias else [])


def test_waits_and_frees_write_what_they_take() -> None:
    graph = fx.Graph()
    source = graph.placeholder("source")
    assert [bool(mutated_inputs(graph.call_function(target, (source,)))) for target in (
        dialect.all_gather_wait, dialect.free, dialect.reduce_wait, aten.copy_.default, aten.add.Tensor,
    )] == [True, True, True, True, False]  # fmt: skip


def test_cheap_is_what_fuses_into_its_neighbours() -> None:
    graph = fx.Graph()
    source = graph.placeholder("source")
    cheap = {t: is_cheap(graph.call_function(t, (source,))) for t in (
        aten.add.Tensor, aten.t.default, aten.mm.default, aten.sum.default, dialect.free, dialect.all_gather_wait,
    )}  # fmt: skip
    assert list(cheap.values()) == [True, True, False, False, False, False]


@pytest.mark.usefixtures("fake_group")
def test_a_parameter_that_the_model_returns_is_not_freed() -> None:
    class ReturnsWeight(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.linear.weight.view(-1)

    model = graph_fsdp.compile(ReturnsWeight(), backend="eager", reshard_after_forward=True)
    y, weight = model(torch.randn(4, 8))
    (row,) = graph_fsdp.inspect(model).forward.buckets
    assert row.escapes and row.free is None
    assert weight.shape == (64,)
    counter = engine_of(model).counter  # type: ignore[attr-defined]
    assert counter.current == row.nbytes, "held as long as the user holds it"
    del y, weight
    assert counter.current == 0


@pytest.mark.usefixtures("fake_group")
def test_checkpoint_regions_of_the_user_do_not_make_full_parameters_saved() -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(lambda t, layer=layer: layer(t).tanh(), x, use_reentrant=False)
            return x

    model = graph_fsdp.compile(Checkpointed(), backend="eager", reshard_after_forward=True)
    model(torch.randn(4, 8)).sum().backward()
    saved = graph_fsdp.inspect(model).forward.stages["partition"].graph
    output = next(node for node in reversed(saved.nodes) if node.op == "output")
    assert not [n for n in output.all_input_nodes if n.target is dialect.gather_param]
    assert "gather_param" in graph_fsdp.inspect(model).backward.stages["partition"].code
