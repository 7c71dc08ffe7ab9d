"""``regions="whole"``: the graphs with functional collectives, as text.

Eight ranks that do nothing; ``test_whole_ranks.py`` has the numbers, ``test_whole_order.py`` the order in which Inductor
runs them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from functional import FunctionalBackend
from models import MLP, UnevenBlock
from test_option_numbers import CHEAP_MESSAGES
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp import UnsupportedError
from graph_fsdp.passes import default_pipeline, dialect
from graph_fsdp.report import GraphReport
from graph_fsdp.runtime.backends import BACKENDS
from graph_fsdp.runtime.functional import ShardSlice, lower

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


def test_two_blocks_gather_ahead_and_reduce_behind() -> None:
    report = report_of(reshard_after_forward=True)
    assert_expected_inline(
        lines_with(report, "forward", "_c10d_functional", "mm"),
        """\
gather_blocks_0 = torch.ops._c10d_functional.all_gather_into_tensor.default(shards_gather_blocks_0, 8, '0')
full_blocks_0 = torch.ops._c10d_functional.wait_tensor.default(gather_blocks_0)
gather_blocks_1 = torch.ops._c10d_functional.all_gather_into_tensor.default(shards_gather_blocks_1, 8, '0')
addmm = torch.ops.aten.addmm.default(reshape_default_3, primals_3, t)
gelu = torch.ops.aten.gelu.default(addmm)
addmm_1 = torch.ops.aten.addmm.default(reshape_default_7, gelu, t_1)
add = torch.ops.aten.add.Tensor(primals_3, addmm_1)
full_blocks_1 = torch.ops._c10d_functional.wait_tensor.default(gather_blocks_1)
gather_root = torch.ops._c10d_functional.all_gather_into_tensor.default(shards_gather_root, 8, '0')
addmm_2 = torch.ops.aten.addmm.default(reshape_default_11, add, t_2)
gelu_1 = torch.ops.aten.gelu.default(addmm_2)
addmm_3 = torch.ops.aten.addmm.default(reshape_default_15, gelu_1, t_3)
add_1 = torch.ops.aten.add.Tensor(add, addmm_3)
full_root = torch.ops._c10d_functional.wait_tensor.default(gather_root)
addmm_4 = torch.ops.aten.addmm.default(head_bias_1, add_1, t_4)
return (addmm_4, primals_3, primals_4, primals_6, primals_8, primals_10, addmm, gelu, add, addmm_2, gelu_1, add_1)""",
    )
    assert_expected_inline(
        lines_with(report, "backward", "_c10d_functional", "mm"),
        """\
def forward(primals_3, addmm, gelu, add, addmm_2, gelu_1, add_1, tangents_1, shards_gather_root, shards_gather_blocks_1, shards_gather_blocks_0):
gather_root = torch.ops._c10d_functional.all_gather_into_tensor.default(shards_gather_root, 8, '0')
full_root = torch.ops._c10d_functional.wait_tensor.default(gather_root)
gather_blocks_1 = torch.ops._c10d_functional.all_gather_into_tensor.default(shards_gather_blocks_1, 8, '0')
mm = torch.ops.aten.mm.default(tangents_1, t_5)
mm_1 = torch.ops.aten.mm.default(t_6, add_1)
t_7 = torch.ops.aten.t.default(mm_1)
reduce_root = torch.ops._c10d_functional.reduce_scatter_tensor.default(reshape_default_4, 'avg', 8, '0')
full_blocks_1 = torch.ops._c10d_functional.wait_tensor.default(gather_blocks_1)
gather_blocks_0 = torch.ops._c10d_functional.all_gather_into_tensor.default(shards_gather_blocks_0, 8, '0')
mm_2 = torch.ops.aten.mm.default(mm, t_9)
t_10 = torch.ops.aten.t.default(mm)
mm_3 = torch.ops.aten.mm.default(t_10, gelu_1)
t_11 = torch.ops.aten.t.default(mm_3)
sum_2 = torch.ops.aten.sum.dim_IntList(mm, [0], True)
gelu_backward = torch.ops.aten.gelu_backward.default(mm_2, addmm_2)
mm_4 = torch.ops.aten.mm.default(gelu_backward, t_13)
mm_5 = torch.ops.aten.mm.default(t_14, add)
t_15 = torch.ops.aten.t.default(mm_5)
add_2 = torch.ops.aten.add.Tensor(mm, mm_4)
reduce_blocks_1 = torch.ops._c10d_functional.reduce_scatter_tensor.default(reshape_default_13, 'avg', 8, '0')
full_blocks_0 = torch.ops._c10d_functional.wait_tensor.default(gather_blocks_0)
mm_6 = torch.ops.aten.mm.default(add_2, t_17)
mm_7 = torch.ops.aten.mm.default(t_18, gelu)
t_19 = torch.ops.aten.t.default(mm_7)
gelu_backward_1 = torch.ops.aten.gelu_backward.default(mm_6, addmm)
mm_8 = torch.ops.aten.mm.default(t_21, primals_3)
t_22 = torch.ops.aten.t.default(mm_8)
reduced_root = torch.ops._c10d_functional.wait_tensor.default(reduce_root)
reduce_blocks_0 = torch.ops._c10d_functional.reduce_scatter_tensor.default(reshape_default_20, 'avg', 8, '0')
reduced_blocks_1 = torch.ops._c10d_functional.wait_tensor.default(reduce_blocks_1)
reduced_blocks_0 = torch.ops._c10d_functional.wait_tensor.default(reduce_blocks_0)""",
    )


def test_messages_of_their_own_land_in_place() -> None:
    passes = default_pipeline(hardware=CHEAP_MESSAGES)
    report = report_of(nn.Linear(16, 8), passes=passes, reshard_after_forward=True)
    assert_expected_inline(
        str(report.forward.program),
        """\
def forward(primals_3, shards_gather_root):
    slice_tensor = torch.ops.aten.slice.Tensor(shards_gather_root, 0, 0, 16)
    slice_tensor_1 = torch.ops.aten.slice.Tensor(shards_gather_root, 0, 16, 17)
    gather_root = torch.ops._c10d_functional.all_gather_into_tensor.default(slice_tensor, 8, '0')
    gather_root_1 = torch.ops._c10d_functional.all_gather_into_tensor.default(slice_tensor_1, 8, '0')
    full_root = torch.ops._c10d_functional.wait_tensor.default(gather_root)
    full_root_1 = torch.ops._c10d_functional.wait_tensor.default(gather_root_1)
    weight_1 = torch.ops.aten.view.default(full_root, [8, 16])
    t = torch.ops.aten.t.default(weight_1)
    addmm = torch.ops.aten.addmm.default(full_root_1, primals_3, t)
    return (addmm, primals_3)
""",
    )


def test_a_kept_bucket_of_several_messages_is_put_together() -> None:
    report = report_of(nn.Linear(16, 8), passes=default_pipeline(hardware=CHEAP_MESSAGES), reshard_after_forward=False)
    assert_expected_inline(
        str(report.forward.program),
        """\
def forward(primals_3, shards_gather_root):
    slice_tensor = torch.ops.aten.slice.Tensor(shards_gather_root, 0, 0, 16)
    slice_tensor_1 = torch.ops.aten.slice.Tensor(shards_gather_root, 0, 16, 17)
    gather_root = torch.ops._c10d_functional.all_gather_into_tensor.default(slice_tensor, 8, '0')
    gather_root_1 = torch.ops._c10d_functional.all_gather_into_tensor.default(slice_tensor_1, 8, '0')
    full_root = torch.ops._c10d_functional.wait_tensor.default(gather_root)
    full_root_1 = torch.ops._c10d_functional.wait_tensor.default(gather_root_1)
    constant_pad_nd_default = torch.ops.aten.constant_pad_nd.default(full_root_1, [0, 120])
    cat_default = torch.ops.aten.cat.default([full_root, constant_pad_nd_default])
    weight = torch.ops.aten.slice.Tensor(cat_default, 0, 0, 128)
    weight_1 = torch.ops.aten.view.default(weight, [8, 16])
    t = torch.ops.aten.t.default(weight_1)
    bias = torch.ops.aten.slice.Tensor(cat_default, 0, 128, 136)
    addmm = torch.ops.aten.addmm.default(bias, primals_3, t)
    return (addmm, cat_default, primals_3)
""",
    )


def test_parameters_are_cast_before_they_are_gathered_and_gradients_before_they_are_reduced() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    report = report_of(nn.Linear(16, 8, bias=False), mp_policy=policy, reshard_after_forward=True)
    words = ("_c10d_functional", "convert_element_type")
    assert_expected_inline(
        lines_with(report, "forward", *words),
        """\
convert_element_type_default = torch.ops.prims.convert_element_type.default(shards_gather_root, torch.bfloat16)
gather_root = torch.ops._c10d_functional.all_gather_into_tensor.default(convert_element_type_default, 8, '0')
full_root = torch.ops._c10d_functional.wait_tensor.default(gather_root)""",
    )
    assert_expected_inline(
        lines_with(report, "backward", *words),
        """\
convert_element_type_default = torch.ops.prims.convert_element_type.default(reshape_default, torch.float32)
reshape_default_1 = torch.ops.aten.reshape.default(convert_element_type_default, [-1])
reduce_root = torch.ops._c10d_functional.reduce_scatter_tensor.default(reshape_default_1, 'avg', 8, '0')
reduced_root = torch.ops._c10d_functional.wait_tensor.default(reduce_root)""",
    )


def test_a_mean_in_float16_divides_before_and_after() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    report = report_of(nn.Linear(16, 8, bias=False), mp_policy=policy)
    assert_expected_inline(
        lines_with(report, "backward", "_c10d_functional", "div", "convert"),
        """\
convert_element_type_default = torch.ops.prims.convert_element_type.default(reshape_default, torch.float16)
reshape_default_1 = torch.ops.aten.reshape.default(convert_element_type_default, [-1])
div_tensor = torch.ops.aten.div.Tensor(reshape_default_1, 4.0)
reduce_root = torch.ops._c10d_functional.reduce_scatter_tensor.default(div_tensor, 'sum', 8, '0')
reduced_root = torch.ops._c10d_functional.wait_tensor.default(reduce_root)
div_tensor_1 = torch.ops.aten.div.Tensor(reduced_root, 2.0)
convert_element_type_default_1 = torch.ops.prims.convert_element_type.default(div_tensor_1, torch.float32)
weight_grad = torch.ops.aten.slice.Tensor(convert_element_type_default_1, 0, 0, 16)""",
    )


def test_uneven_rows_are_padded_and_scalars_are_all_reduced() -> None:
    report = report_of(MLP(depth=1, block=UnevenBlock))
    assert_expected_inline(
        lines_with(report, "backward", "_c10d_functional", "pad", "cat"),
        """\
reduce_root_scalars = torch.ops._c10d_functional.all_reduce.default(reshape_default, 'avg', '0')
constant_pad_nd_default = torch.ops.aten.constant_pad_nd.default(sum_4, [0, 0, 0, 7])
reshape_default_1 = torch.ops.aten.reshape.default(constant_pad_nd_default, [8, -1])
constant_pad_nd_default_1 = torch.ops.aten.constant_pad_nd.default(t_13, [0, 0, 0, 1])
reshape_default_2 = torch.ops.aten.reshape.default(constant_pad_nd_default_1, [8, -1])
constant_pad_nd_default_2 = torch.ops.aten.constant_pad_nd.default(view_2, [0, 1])
reshape_default_3 = torch.ops.aten.reshape.default(constant_pad_nd_default_2, [8, -1])
constant_pad_nd_default_3 = torch.ops.aten.constant_pad_nd.default(t_6, [0, 0, 0, 3])
reshape_default_6 = torch.ops.aten.reshape.default(constant_pad_nd_default_3, [8, -1])
constant_pad_nd_default_4 = torch.ops.aten.constant_pad_nd.default(view, [0, 3])
reshape_default_7 = torch.ops.aten.reshape.default(constant_pad_nd_default_4, [8, -1])
cat_default = torch.ops.aten.cat.default([reshape_default_1, reshape_default_2, reshape_default_3, reshape_default_4, reshape_default_5, reshape_default_6, reshape_default_7], 1)
reshape_default_8 = torch.ops.aten.reshape.default(cat_default, [-1])
reduce_root = torch.ops._c10d_functional.reduce_scatter_tensor.default(reshape_default_8, 'avg', 8, '0')
reduced_root_scalars = torch.ops._c10d_functional.wait_tensor.default(reduce_root_scalars)
reduced_root = torch.ops._c10d_functional.wait_tensor.default(reduce_root)""",
    )


def test_grouped_messages_are_one_collective() -> None:
    model = compiled(nn.Linear(16, 8), passes=default_pipeline(hardware=CHEAP_MESSAGES))
    model(torch.ones(4, 16)).sum().backward()
    graph = graph_fsdp.inspect(model).forward.graph
    assert graph is not None
    lowered = lower(graph, grouped=True)
    lines = [line.strip().split(";")[0] for line in lowered.module.code.splitlines()]
    assert_expected_inline(
        "\n".join(line for line in lines if "c10d" in line or "getitem" in line),
        """\
gather_root = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([slice_tensor, slice_tensor_1], 8, '0')
getitem = gather_root[0]
getitem_1 = gather_root[1]
full_root = torch.ops._c10d_functional.wait_tensor.default(getitem)
full_root_1 = torch.ops._c10d_functional.wait_tensor.default(getitem_1)""",
    )


def test_what_a_gather_sends_is_one_input_in_place_of_the_shards() -> None:
    model = compiled(MLP())
    model(torch.ones(4, 16)).sum().backward()
    program = model._graph_fsdp.programs[0, "forward"]
    sent = [i for i in program.inputs if isinstance(i, ShardSlice)]
    assert [len(i.places) for i in sent] == [4, 4, 2]
    records = [node.meta["fsdp"] for node in program.graph.placeholders if "fsdp" in node.meta]
    storage = model._graph_fsdp.storage
    shards = [storage.parameters[record.params[0]].input for record in records]
    places = {place for i in sent for place in i.places}
    args = [shards.pop(0) if place in places else None for place in range(len(program.graph.placeholders))]
    (memory,) = storage.buffers.values()
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
    shards = dialect.argument(start, "shards")
    with graph.fx_graph.inserting_before(start):
        doubled = [graph.call(torch.ops.aten.mul.Tensor, (shard, 2.0)) for shard in shards]
    start.args = (doubled, *start.args[1:])
    lowered = lower(graph)
    assert all(isinstance(i, int) for i in lowered.inputs)
    text = "\n".join(line.strip().split(";")[0] for line in lowered.module.code.splitlines())
    assert_expected_inline(
        text.split("full_root")[0].strip(),
        """\
def forward(self, primals_1, primals_2, primals_3):
mul_tensor = torch.ops.aten.mul.Tensor(primals_1, 2.0)
mul_tensor_1 = torch.ops.aten.mul.Tensor(primals_2, 2.0)
reshape_default = torch.ops.aten.reshape.default(mul_tensor, [-1])
reshape_default_1 = torch.ops.aten.reshape.default(mul_tensor_1, [-1])
constant_pad_nd_default = torch.ops.aten.constant_pad_nd.default(reshape_default_1, [0, 15])
cat_default = torch.ops.aten.cat.default([reshape_default, constant_pad_nd_default])
gather_root = torch.ops._c10d_functional.all_gather_into_tensor.default(cat_default, 8, '0')""",
    )


# What is said of it


def test_the_report_says_that_graphs_are_whole() -> None:
    model = compiled(MLP())
    assert "compiled whole: 0" in str(graph_fsdp.inspect(model))
    model(torch.ones(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        re.sub(r"\d+\.\d ms", "T ms", str(report)),
        """\
graph_fsdp: 10 parameters in 3 buckets over 8 ranks
captured graphs: 1; compiled whole: 2

  unit                                 params  elements  bytes  bytes of a rank
  blocks.0 to blocks.1: 2 units, each       4     1,072  4,288              536
  root                                      2        85    340               68

graph 0, forward: 51 nodes
  bucket    kind    params  bytes  start  wait  first use  free  slots  ahead  takes ms  exposed ms
  blocks.0  gather       4  5,120     11    12         14    26   0, 1      0     0.339       0.339
  blocks.1  gather       4  5,120     13    27         29    41   1, 2      1     0.339       0.323
  root      gather       2  1,024     28    42         43  kept      3      1     0.332       0.315
  compiled whole: the compiler allocates the buffers
  predicted on cpu: 1.014 ms, compute 0.037, communication 1.010, of it exposed 0.977
  passes: partition, just_in_time, bucket, reshard, prefetch, free, slots

graph 0, backward: 96 nodes
  bucket    kind    params  bytes  start  wait  first use  free  slots  ahead  takes ms  exposed ms
  root      kept         2  1,024      -     -         14    26      -      -         -           -
  blocks.1  gather       4  5,120     13    28         30    54   0, 1      1     0.339       0.327
  root      reduce       2     68     27    76         77     -      -      2     0.331       0.000
  blocks.0  gather       4  5,120     29    56         57    75   1, 2      1     0.339       0.637
  blocks.1  reduce       4    536     55    81         82     -      -      1     0.338       0.313
  blocks.0  reduce       4    536     80    88         89     -      -      0     0.338       0.338
  compiled whole: the compiler allocates the buffers
  predicted on cpu: 1.684 ms, compute 0.069, communication 1.684, of it exposed 1.615
  passes: partition, just_in_time, bucket, reshard, prefetch, free, slots""",
    )
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
