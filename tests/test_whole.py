"""``regions="whole"``: the graphs with functional collectives, as text.

Eight ranks that do nothing; ``test_whole_ranks.py`` has the numbers, ``test_whole_order.py`` the order in which
Inductor runs them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from functional import FunctionalBackend
from models import MLP, UnevenBlock
from printed import graph_text
from test_option_numbers import CHEAP_MESSAGES
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp import UnsupportedError, compat
from graph_fsdp.passes import default_pipeline
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.operands import argument
from graph_fsdp.report.report import GraphReport, engine_of
from graph_fsdp.runtime.backends import BACKENDS
from graph_fsdp.runtime.whole import GatherInput, Lowering

pytestmark = pytest.mark.usefixtures("fake_group")


@pytest.fixture(autouse=True)
def functional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "functional", FunctionalBackend)


def compiled(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    return graph_fsdp.compile(model, mesh, **{"backend": "functional", "regions": "whole", **options})


def report_of(model: nn.Module | None = None, mesh: Any = None, **options: Any) -> GraphReport:
    model = compiled(model if model is not None else MLP(), mesh, **options)
    model(torch.ones(4, 16)).float().sum().backward()
    return graph_fsdp.inspect(model)


def lines_with(report: GraphReport, phase: str, *texts: str) -> str:
    lines = str(getattr(report, phase).program).splitlines()
    return "\n".join(line.strip() for line in lines if any(text in line for text in texts))


def lowered(report: GraphReport, phase: str, *operators: str) -> str:
    """The graph that the compiler gets: its collectives, and calls of these operators."""
    graph = getattr(report, phase).graph
    return graph_text(Lowering(graph).run().graph, *operators)


# The graphs


def test_one_layer() -> None:
    report = report_of(nn.Linear(16, 8), reshard_after_forward=True)
    assert_expected_inline(
        str(report.forward.program),
        """\
def forward(primals_3, shards_gather_root):
    gather_root = torch.ops._c10d_functional.all_gather_into_tensor.default(shards_gather_root, 8, '0')
    full_root = torch.ops._c10d_functional.wait_tensor.default(gather_root)
    reshape_default = torch.ops.aten.reshape.default(full_root, [8, 32])
    slice_tensor = torch.ops.aten.slice.Tensor(reshape_default, 1, 0, 16)
    reshape_default_1 = torch.ops.aten.reshape.default(slice_tensor, [-1])
    weight_1 = torch.ops.aten.view.default(reshape_default_1, [8, 16])
    t = torch.ops.aten.t.default(weight_1)
    reshape_default_2 = torch.ops.aten.reshape.default(full_root, [8, 32])
    slice_tensor_1 = torch.ops.aten.slice.Tensor(reshape_default_2, 1, 16, 17)
    reshape_default_3 = torch.ops.aten.reshape.default(slice_tensor_1, [-1])
    addmm = torch.ops.aten.addmm.default(reshape_default_3, primals_3, t)
    return (addmm, primals_3)
""",
    )
    assert_expected_inline(
        str(report.backward.program),
        """\
def forward(primals_3, tangents_1):
    t_1 = torch.ops.aten.t.default(tangents_1)
    mm = torch.ops.aten.mm.default(t_1, primals_3)
    t_2 = torch.ops.aten.t.default(mm)
    sum_1 = torch.ops.aten.sum.dim_IntList(tangents_1, [0], True)
    view = torch.ops.aten.view.default(sum_1, [8])
    t_3 = torch.ops.aten.t.default(t_2)
    reshape_default = torch.ops.aten.reshape.default(t_3, [8, -1])
    reshape_default_1 = torch.ops.aten.reshape.default(view, [8, -1])
    cat_default = torch.ops.aten.cat.default([reshape_default, reshape_default_1], 1)
    reshape_default_2 = torch.ops.aten.reshape.default(cat_default, [-1])
    reduce_root = torch.ops._c10d_functional.reduce_scatter_tensor.default(reshape_default_2, 'avg', 8, '0')
    reduced_root = torch.ops._c10d_functional.wait_tensor.default(reduce_root)
    weight_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 0, 16)
    bias_grad = torch.ops.aten.slice.Tensor(reduced_root, 0, 16, 17)
    weight_grad_1 = torch.ops.aten.view.default(weight_grad, [1, 16])
    return (weight_grad_1, bias_grad, None)
""",
    )


class Table(nn.Module):
    """Five rows in float8, which is not trained, and a scale that is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 16).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.table.float().sum(0)


def test_float8_is_gathered_as_bytes() -> None:
    """Which gloo can send."""
    report = report_of(Table())
    assert_expected_inline(
        lines_with(report, "forward", "uint8", "float8", "all_gather"),
        """\
gather_root_1 = torch.ops._c10d_functional.all_gather_into_tensor.default(slice_tensor, 8, '0')
view_dtype = torch.ops.aten.view.dtype(shards_gather_root, torch.uint8)
gather_root = torch.ops._c10d_functional.all_gather_into_tensor.default(slice_tensor_1, 8, '0')
view_dtype_1 = torch.ops.aten.view.dtype(constant_pad_nd_default_1, torch.float8_e4m3fn)""",
    )


def test_two_blocks_gather_ahead_and_reduce_behind() -> None:
    report = report_of(reshard_after_forward=True)
    assert_expected_inline(
        lowered(report, "forward"),
        """\
gather_blocks_0 = all_gather_into_tensor(shards_gather_blocks_0, group_size=8)
full_blocks_0 = wait_tensor(gather_blocks_0)
gather_blocks_1 = all_gather_into_tensor(shards_gather_blocks_1, group_size=8)
    addmm(full_blocks_0, full_blocks_0), ..., addmm(full_blocks_0, full_blocks_0), ...
full_blocks_1 = wait_tensor(gather_blocks_1)
gather_root = all_gather_into_tensor(shards_gather_root, group_size=8)
    addmm(full_blocks_1, full_blocks_1), ..., addmm(full_blocks_1, full_blocks_1), ...
full_root = wait_tensor(gather_root)
    addmm(full_root, full_root)
return ...""",
    )
    assert_expected_inline(
        lowered(report, "backward"),
        """\
gather_root = all_gather_into_tensor(shards_gather_root, group_size=8)
full_root = wait_tensor(gather_root)
gather_blocks_1 = all_gather_into_tensor(shards_gather_blocks_1, group_size=8)
    mm(full_root), ...
reduce_root = reduce_scatter_tensor(cat, reduce_op=avg, group_size=8)
full_blocks_1 = wait_tensor(gather_blocks_1)
gather_blocks_0 = all_gather_into_tensor(shards_gather_blocks_0, group_size=8)
    mm(full_blocks_1), ..., mm(full_blocks_1), ...
reduce_blocks_1 = reduce_scatter_tensor(cat, reduce_op=avg, group_size=8)
full_blocks_0 = wait_tensor(gather_blocks_0)
    mm(full_blocks_0), ...
reduced_root = wait_tensor(reduce_root)
    ...
reduce_blocks_0 = reduce_scatter_tensor(cat, reduce_op=avg, group_size=8)
reduced_blocks_1 = wait_tensor(reduce_blocks_1)
reduced_blocks_0 = wait_tensor(reduce_blocks_0)
return reduced_blocks_0, reduced_blocks_0, ..., reduced_blocks_0, reduced_blocks_0, reduced_blocks_1,
    reduced_blocks_1, reduced_blocks_1, reduced_blocks_1, reduced_root, reduced_root""",
    )


def test_messages_of_their_own_land_in_place() -> None:
    passes = default_pipeline(hardware=CHEAP_MESSAGES)
    report = report_of(nn.Linear(16, 8), passes=passes, reshard_after_forward=True)
    assert_expected_inline(
        lowered(report, "forward", "slice", "constant_pad_nd", "cat"),
        """\
    slice(shards_gather_root, 0, 16), slice(shards_gather_root, 16, 17)
gather_root = all_gather_into_tensor(shards_gather_root, group_size=8)
gather_root_1 = all_gather_into_tensor(shards_gather_root, group_size=8)
full_root = wait_tensor(gather_root)
full_root_1 = wait_tensor(gather_root_1)
    addmm(full_root_1, full_root)
return ...""",
    )


def test_a_kept_bucket_of_several_messages_is_put_together() -> None:
    report = report_of(nn.Linear(16, 8), passes=default_pipeline(hardware=CHEAP_MESSAGES), reshard_after_forward=False)
    assert_expected_inline(
        lowered(report, "forward", "slice", "constant_pad_nd", "cat"),
        """\
    slice(shards_gather_root, 0, 16), slice(shards_gather_root, 16, 17)
gather_root = all_gather_into_tensor(shards_gather_root, group_size=8)
gather_root_1 = all_gather_into_tensor(shards_gather_root, group_size=8)
full_root = wait_tensor(gather_root)
full_root_1 = wait_tensor(gather_root_1)
    constant_pad_nd(full_root_1, [0, 120]), cat([full_root, constant_pad_nd]), slice(cat, 0, 128), slice(cat, 128,
        136), ...
return ...""",
    )


def test_parameters_are_cast_before_they_are_gathered_and_gradients_before_they_are_reduced() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    report = report_of(nn.Linear(16, 8, bias=False), mp_policy=policy, reshard_after_forward=True)
    assert_expected_inline(
        lowered(report, "forward", "convert_element_type"),
        """\
    convert_element_type(shards_gather_root, bfloat16)
gather_root = all_gather_into_tensor(convert_element_type, group_size=8)
full_root = wait_tensor(gather_root)
    mm(full_root)
return ...""",
    )
    assert_expected_inline(
        lowered(report, "backward", "convert_element_type"),
        """\
    ..., convert_element_type(mm, float32)
reduce_root = reduce_scatter_tensor(convert_element_type, reduce_op=avg, group_size=8)
reduced_root = wait_tensor(reduce_root)
return reduced_root, ...""",
    )


def test_a_mean_in_float16_divides_before_and_after() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    report = report_of(nn.Linear(16, 8, bias=False), mp_policy=policy)
    assert_expected_inline(
        lowered(report, "backward", "div", "convert_element_type"),
        """\
    ..., convert_element_type(mm, float16), div(convert_element_type, 4.0)
reduce_root = reduce_scatter_tensor(div, reduce_op=sum, group_size=8)
reduced_root = wait_tensor(reduce_root)
    div(reduced_root, 2.0), convert_element_type(div, float32)
return ...""",
    )


def test_uneven_rows_are_padded_and_scalars_are_all_reduced() -> None:
    report = report_of(MLP(depth=1, block=UnevenBlock))
    assert_expected_inline(
        lowered(report, "backward", "constant_pad_nd", "cat"),
        """\
    ...
reduce_root_scalars = all_reduce(sum, reduce_op=avg)
    ..., constant_pad_nd(sum, [0, 0, 0, 7]), constant_pad_nd(mm, [0, 0, 0, 1]), constant_pad_nd(sum, [0, 1]),
        constant_pad_nd(mm, [0, 0, 0, 3]), constant_pad_nd(sum, [0, 3]), cat([constant_pad_nd, constant_pad_nd,
        constant_pad_nd, mm, sum, constant_pad_nd, constant_pad_nd], 1)
reduce_root = reduce_scatter_tensor(cat, reduce_op=avg, group_size=8)
reduced_root_scalars = wait_tensor(reduce_root_scalars)
reduced_root = wait_tensor(reduce_root)
return reduced_root_scalars, reduced_root, reduced_root, ..., reduced_root, reduced_root, reduced_root,
    reduced_root, reduced_root""",
    )


def test_grouped_messages_are_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(nn.Linear(16, 8), passes=default_pipeline(hardware=CHEAP_MESSAGES))
    model(torch.ones(4, 16)).sum().backward()
    graph = graph_fsdp.inspect(model).forward.graph
    assert graph is not None
    monkeypatch.setattr(compat, "launches_groups", lambda *_: True)
    assert_expected_inline(
        graph_text(Lowering(graph).run().graph, "getitem"),
        """\
gather_root = all_gather_into_tensor_coalesced([shards_gather_root, shards_gather_root], group_size=8)
    getitem(gather_root, 0), getitem(gather_root, 1)
full_root = wait_tensor(getitem)
full_root_1 = wait_tensor(getitem)
    constant_pad_nd(full_root_1), cat(full_root), ...
return ...""",
    )


def test_gathers_on_gloo_are_waited_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next one starts, also one of the same bucket."""
    model = compiled(MLP(), passes=default_pipeline(hardware=CHEAP_MESSAGES), reshard_after_forward=True)
    model(torch.ones(4, 16)).sum().backward()
    graph = graph_fsdp.inspect(model).forward.graph
    assert graph is not None
    monkeypatch.setattr(compat.distributed, "uses_gloo", lambda *_: True)
    assert_expected_inline(
        graph_text(Lowering(graph).run().graph),
        """\
gather_blocks_0 = all_gather_into_tensor(shards_gather_blocks_0, group_size=8)
wait_tensor_default = wait_tensor(gather_blocks_0)
gather_blocks_1 = all_gather_into_tensor(shards_gather_blocks_0, group_size=8)
wait_tensor_default_1 = wait_tensor(gather_blocks_1)
gather_blocks_2 = all_gather_into_tensor(shards_gather_blocks_0, group_size=8)
wait_tensor_default_2 = wait_tensor(gather_blocks_2)
gather_blocks_3 = all_gather_into_tensor(shards_gather_blocks_0, group_size=8)
wait_tensor_default_3 = wait_tensor(gather_blocks_3)
gather_blocks_4 = all_gather_into_tensor(shards_gather_blocks_1, group_size=8)
wait_tensor_default_4 = wait_tensor(gather_blocks_4)
gather_blocks_5 = all_gather_into_tensor(shards_gather_blocks_1, group_size=8)
wait_tensor_default_5 = wait_tensor(gather_blocks_5)
gather_blocks_6 = all_gather_into_tensor(shards_gather_blocks_1, group_size=8)
wait_tensor_default_6 = wait_tensor(gather_blocks_6)
gather_blocks_7 = all_gather_into_tensor(shards_gather_blocks_1, group_size=8)
wait_tensor_default_7 = wait_tensor(gather_blocks_7)
    addmm(wait_tensor_default_1, wait_tensor_default), ..., addmm(wait_tensor_default_3, wait_tensor_default_2),
        ...
gather_root = all_gather_into_tensor(shards_gather_root, group_size=8)
wait_tensor_default_8 = wait_tensor(gather_root)
gather_root_1 = all_gather_into_tensor(shards_gather_root, group_size=8)
wait_tensor_default_9 = wait_tensor(gather_root_1)
    addmm(wait_tensor_default_5, wait_tensor_default_4), ..., addmm(wait_tensor_default_7, wait_tensor_default_6),
        ..., addmm(wait_tensor_default_9, wait_tensor_default_8)
return ...""",
    )


def test_what_a_gather_sends_is_one_input_in_place_of_the_shards() -> None:
    model = compiled(MLP())
    model(torch.ones(4, 16)).sum().backward()
    program = engine_of(model).programs[0, "forward"]
    sent = [i for i in program.inputs if isinstance(i, GatherInput)]
    assert [len(i.places) for i in sent] == [4, 4, 2]
    records = [node.meta["fsdp"] for node in program.graph.placeholders if "fsdp" in node.meta]
    storage = engine_of(model).storage
    shards = [storage.parameters[record.params[0]].input for record in records]
    places = {place for i in sent for place in i.places}
    args = [shards.pop(0) if place in places else None for place in range(len(program.graph.placeholders))]
    (memory,) = storage.buffers
    end = memory.data_ptr()
    for i in sent:
        flat = i.of(args)
        assert flat.data_ptr() == end, "a slice of the storage, one behind the other: nothing is packed"
        end += flat.nbytes
    assert end == memory.data_ptr() + memory.nbytes


def test_shards_that_the_graph_computes_are_packed_in_it() -> None:
    """No default pass does that."""
    model = compiled(nn.Linear(16, 8), reshard_after_forward=True)
    model(torch.ones(4, 16)).sum().backward()
    graph = graph_fsdp.inspect(model).forward.graph
    assert graph is not None
    (start,) = [node for node in graph.nodes if node.target is dialect.all_gather_start]
    shards = argument(start, "shards")
    with graph.fx_graph.inserting_before(start):
        doubled = [graph.call(torch.ops.aten.mul.Tensor, (shard, 2.0)) for shard in shards]
    start.args = (doubled, *start.args[1:])
    lowering = Lowering(graph)
    module = lowering.run()
    assert all(isinstance(i, int) for i in lowering.inputs)
    assert_expected_inline(
        graph_text(module.graph, "mul", "constant_pad_nd", "cat"),
        """\
    mul(input, 2.0), mul(input, 2.0), constant_pad_nd(mul, [0, 15]), cat([mul, constant_pad_nd])
gather_root = all_gather_into_tensor(cat, group_size=8)
full_root = wait_tensor(gather_root)
    addmm(full_root, full_root)
return ...""",
    )


# What is said of it


def test_the_report_says_that_graphs_are_whole() -> None:
    model = compiled(MLP())
    assert "compiled whole: 0" in str(graph_fsdp.inspect(model))
    model(torch.ones(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    text = str(report)
    assert "captured graphs: 1; compiled whole: 2" in text
    assert text.count("  compiled whole: the compiler allocates the buffers") == 2, "of each graph"
    assert report.whole and report.peak_gathered_bytes is None
    assert report.collectives == {"all_gather": 5, "reduce": 3}
    assert not report.forward.slots and report.forward.memory is None


def test_collectives_are_counted_as_they_are_between_regions() -> None:
    counts = []
    for options in ({"backend": "eager", "regions": "cut"}, {}):
        model = compiled(MLP(block=UnevenBlock), init_device_mesh("cpu", (2, 4)), **options)
        for _ in range(2):
            model(torch.ones(4, 16)).sum().backward()
        counts.append(graph_fsdp.inspect(model).collectives)
    assert counts[0] == counts[1] and set(counts[0]) == {"all_gather", "reduce", "reduce over replicas"}


def test_what_runs_as_one_function_has_no_profile() -> None:
    with pytest.raises(UnsupportedError, match=r"regions='whole'.*regions='cut'"):
        graph_fsdp.profile(compiled(MLP()), torch.ones(4, 16))
