"""What a mesh changes in the graphs: hybrid sharding, replication, bad meshes. Eight ranks that do nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP, UnevenBlock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

import graph_fsdp
from graph_fsdp.passes import default_pipeline
from graph_fsdp.passes.dialect import keep_shard
from graph_fsdp.report import GraphReport

pytestmark = pytest.mark.usefixtures("fake_group")


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def report_of(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> GraphReport:
    model = graph_fsdp.compile(model if model is not None else MLP(), mesh, backend="eager", **options)
    model(torch.randn(4, 16)).float().sum().backward()
    return graph_fsdp.inspect(model)


def collectives(report: GraphReport, phase: str = "backward") -> str:
    """The calls of a program that communicate, in order."""
    lines = str(getattr(report, phase).program).splitlines()
    calls = [line.strip() for line in lines if "frame." in line]
    return "\n".join(call.split(", [")[0].split("  #")[0] for call in calls)


def lines_with(report: GraphReport, phase: str, *texts: str) -> str:
    body = getattr(report, phase).stages["free"].body
    return "\n".join(line.strip() for line in body.splitlines() if any(text in line for text in texts))


# Hybrid: the first dimension replicates, the second shards


@pytest.mark.parametrize("names", [None, ("dp_replicate", "dp_shard"), ("a", "b")])
def test_two_dimensions_replicate_and_shard(names: tuple[str, ...] | None) -> None:
    model = graph_fsdp.compile(MLP(), mesh_of(2, 4, names=names), backend="eager")
    model(torch.randn(4, 16)).sum().backward()
    for p in model.parameters():
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
        assert p.placements == p.grad.placements == (Replicate(), Shard(0))
        assert p.to_local().shape[0] == -(-p.shape[0] // 4)


def test_a_bucket_is_reduced_over_shards_and_then_over_replicas_both_deferred() -> None:
    report = report_of(mesh_of(2, 4))
    assert_expected_inline(
        report.backward.table(),
        """\
  bucket    kind       params  bytes  start  wait  first use  free
  root      kept            2    768      -     -         14    26
  blocks.1  gather          4  4,608     13    28         30    54
  root      reduce          2    136     27    76         77     -
  blocks.0  gather          4  4,608     29    56         57    75
  blocks.1  reduce          4  1,072     55    79         80     -
  root      replicate       2    136     77    81         82     -
  blocks.0  reduce          4  1,072     78    85         86     -
  blocks.1  replicate       4  1,072     80    87         88     -
  blocks.0  replicate       4  1,072     86    94         95     -""",
    )
    assert_expected_inline(
        collectives(report),
        """\
gather_blocks_1 = frame.gather_start(plan_0
reduce_root = frame.reduce_start(plan_3
full_blocks_1 = frame.wait(gather_blocks_1)
gather_blocks_0 = frame.gather_start(plan_5
frame.free(full_blocks_1)
reduce_blocks_1 = frame.reduce_start(plan_8
full_blocks_0 = frame.wait(gather_blocks_0)
frame.free(full_blocks_0)
reduced_root = frame.wait(reduce_root)
replicate_root = frame.reduce_start(plan_13, reduced_root)
reduce_blocks_0 = frame.reduce_start(plan_14
reduced_blocks_1 = frame.wait(reduce_blocks_1)
replicate_blocks_1 = frame.reduce_start(plan_16, reduced_blocks_1)
replicated_root = frame.wait(replicate_root)
reduced_blocks_0 = frame.wait(reduce_blocks_0)
replicate_blocks_0 = frame.reduce_start(plan_20, reduced_blocks_0)
replicated_blocks_1 = frame.wait(replicate_blocks_1)
replicated_blocks_0 = frame.wait(replicate_blocks_0)""",
    )


def test_the_shard_of_a_bucket_is_reduced_in_place() -> None:
    report = report_of(mesh_of(2, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert_expected_inline(
        lines_with(report, "backward", "root"),
        """\
free_root = torch.ops.graph_fsdp.free.default(kept_0)
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default([t_8, view], torch.float32, 4, '5', 2)
reduced_root = torch.ops.graph_fsdp.reduce_wait.default(reduce_root)
replicate_root = torch.ops.graph_fsdp.all_reduce_shard_start.default(reduced_root, 8, '1')
replicated_root = torch.ops.graph_fsdp.reduce_wait.default(replicate_root)
head_weight_grad = torch.ops.aten.slice.Tensor(replicated_root, 0, 0, 32)
head_bias_grad = torch.ops.aten.slice.Tensor(replicated_root, 0, 32, 34)""",
    )


def test_one_reduction_in_flight() -> None:
    report = report_of(mesh_of(2, 4), passes=default_pipeline(reductions_in_flight=1))
    assert_expected_inline(
        report.backward.table(),
        """\
  bucket    kind       params  bytes  start  wait  first use  free
  root      kept            2    768      -     -         14    26
  blocks.1  gather          4  4,608     13    28         30    54
  root      reduce          2    136     27    55         56     -
  blocks.0  gather          4  4,608     29    58         59    77
  root      replicate       2    136     56    78         79     -
  blocks.1  reduce          4  1,072     57    82         83     -
  blocks.1  replicate       4  1,072     83    85         86     -
  blocks.0  reduce          4  1,072     84    92         93     -
  blocks.0  replicate       4  1,072     93    94         95     -""",
    )


def test_reshard_after_forward_on_two_dimensions() -> None:
    again, kept = (report_of(mesh_of(2, 4), reshard_after_forward=value) for value in (True, False))
    kinds = [[row.kind for row in report.backward.buckets] for report in (again, kept)]
    assert [found.count("gather") for found in kinds] == [3, 0]
    assert [found.count("kept") for found in kinds] == [0, 3]
    assert all(row.nbytes in (4608, 768) for row in again.forward.buckets), "gathered over 4 ranks, not 8"


def test_scalars_are_reduced_over_both_dimensions() -> None:
    report = report_of(mesh_of(2, 4), MLP(depth=1, block=UnevenBlock))
    assert_expected_inline(
        lines_with(report, "backward", "all_reduce"),
        """\
reduce_root_scalars = torch.ops.graph_fsdp.all_reduce_start.default([sum_2], torch.float32, 4, '5', 2)
replicate_root_scalars = torch.ops.graph_fsdp.all_reduce_shard_start.default(reduced_root_scalars, 8, '1')
replicate_root = torch.ops.graph_fsdp.all_reduce_shard_start.default(reduced_root, 8, '1')""",
    )


def test_a_shard_dimension_of_one_rank_gathers_nothing() -> None:
    report = report_of(mesh_of(8, 1))
    assert report.forward.buckets == []
    assert_expected_inline(
        collectives(report),
        """\
reduce_root = frame.reduce_start(plan_1
reduce_blocks_1 = frame.reduce_start(plan_3
reduced_root = frame.wait(reduce_root)
reduce_blocks_0 = frame.reduce_start(plan_7
reduced_blocks_1 = frame.wait(reduce_blocks_1)
reduced_blocks_0 = frame.wait(reduce_blocks_0)""",
    )


def test_a_replicate_dimension_of_one_rank_is_like_one_dimension() -> None:
    two, one = report_of(mesh_of(1, 8)), report_of(mesh_of(8))
    assert two.forward.table() == one.forward.table()
    assert two.backward.table() == one.backward.table()


def test_the_report_names_both_dimensions() -> None:
    text = str(report_of(mesh_of(2, 4)))
    assert text.splitlines()[0] == "graph_fsdp: 10 parameters in 3 buckets over 2 replicas of 4 ranks"


# Resharded to smaller groups after forward


def test_backward_gathers_what_forward_kept_over_a_smaller_group() -> None:
    report = report_of(mesh_of(8), reshard_after_forward=2)
    assert_expected_inline(
        f"{report.forward.table()}\n\n{report.backward.table()}",
        """\
  bucket    kind    params  bytes  start  wait  first use  free
  blocks.0  gather       4  5,120     11    12         14    27
  blocks.1  gather       4  5,120     13    28         30    43
  root      gather       2  1,024     29    44         45    53

  bucket    kind    params  bytes  start  wait  first use  free
  root      gather       2  1,024     15    16         18    30
  blocks.1  gather       4  5,120     17    32         34    58
  root      reduce       2     68     31    80         81     -
  blocks.0  gather       4  5,120     33    60         61    79
  blocks.1  reduce       4    536     59    85         86     -
  blocks.0  reduce       4    536     84    92         93     -""",
    )
    assert_expected_inline(
        without_group(lines_with(report, "forward", "_start", "keep_shard", "free")),
        """\
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default([primals_1, primals_2, primals_4, primals_5], [0, 64, 80, 144], 160, torch.float32, 8, '0')
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_7, primals_8, primals_9], [0, 64, 80, 144], 160, torch.float32, 8, '0')
shard_blocks_0 = torch.ops.graph_fsdp.keep_shard.default(full_blocks_0, [0, 64, 80, 144], [64, 4, 64, 2], 160, 8, 2, 'small')
free_blocks_0 = torch.ops.graph_fsdp.free.default(full_blocks_0)
gather_root = torch.ops.graph_fsdp.all_gather_start.default([primals_10, primals_11], [0, 16], 32, torch.float32, 8, '0')
shard_blocks_1 = torch.ops.graph_fsdp.keep_shard.default(full_blocks_1, [0, 64, 80, 144], [64, 4, 64, 2], 160, 8, 2, 'small')
free_blocks_1 = torch.ops.graph_fsdp.free.default(full_blocks_1)
shard_root = torch.ops.graph_fsdp.keep_shard.default(full_root, [0, 16], [16, 1], 32, 8, 2, 'small')
free_root = torch.ops.graph_fsdp.free.default(full_root)""",
    )
    assert_expected_inline(
        without_group(lines_with(report, "backward", "all_gather_start")),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default([shard_2], [0], 128, torch.float32, 2, 'small', [], [64])
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([shard_1], [0, 320], 640, torch.float32, 2, 'small', [], [256, 256])
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default([shard_0], [320], 640, torch.float32, 2, 'small', [], [256])""",
    )


def without_group(text: str) -> str:
    """The name of the group is a digest of its ranks."""
    return re.sub("'[0-9a-f]{40}'", "'small'", text)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_keeps_its_part_of_each_bucket(size: int) -> None:
    report = report_of(mesh_of(2, 4) if size == 2 else mesh_of(8), reshard_after_forward=size)
    shards = [n for n in report.forward.stages["free"].graph.nodes if n.target is keep_shard]
    (block, other, root) = [n.meta["val"].numel() * 4 for n in shards]
    assert block == other
    gathered = {row.name: row.nbytes for row in report.forward.buckets}
    assert [block, root] == [gathered["blocks.0"] // size, gathered["root"] // size]
    again = {row.name: row.nbytes for row in report.backward.buckets if row.kind == "gather"}
    assert again == gathered


def test_all_ranks_and_one_rank_are_true_and_false() -> None:
    tables = [report_of(mesh_of(2, 4), reshard_after_forward=value).backward.table() for value in (4, True, False)]
    with pytest.warns(UserWarning, match="reshard_after_forward=1 keeps every parameter whole"):
        one = report_of(mesh_of(2, 4), reshard_after_forward=1).backward.table()
    assert tables[0] == tables[1]
    assert one == tables[2]


@pytest.mark.parametrize("size", [3, 5, 8, 0, -2])
def test_a_number_of_ranks_that_does_not_divide(size: int) -> None:
    model = MLP()
    with pytest.raises(ValueError, match=rf"reshard_after_forward={size} .* divide the 4 .* pass 2, True or False"):
        graph_fsdp.compile(model, mesh_of(2, 4), reshard_after_forward=size)
    graph_fsdp.compile(model, mesh_of(2, 4), reshard_after_forward=2)


def test_nothing_to_divide() -> None:
    with pytest.raises(ValueError, match="divide the 1 that parameters are sharded over; pass True or False"):
        graph_fsdp.compile(MLP(), mesh_of(8, names=("replicate",)), reshard_after_forward=2)


def test_models_share_the_groups_that_they_reshard_to() -> None:
    def group(size: int) -> str:
        model = graph_fsdp.compile(MLP(), mesh_of(8), backend="eager", reshard_after_forward=size)
        return model._graph_fsdp.spec.reshard_group

    assert group(2) == group(2) != group(4), "a process group has threads and files, and nobody destroys it"


def test_evaluation_keeps_no_shards() -> None:
    model = graph_fsdp.compile(MLP(), mesh_of(8), backend="eager", reshard_after_forward=2)
    with torch.no_grad():
        model(torch.randn(4, 16))
    assert "keep" not in str(graph_fsdp.inspect(model).inference.program)


# Replicated: one dimension with a name that says so


@pytest.mark.parametrize("name", ["replicate", "dp_replicate"])
def test_a_dimension_named_replicate_shards_nothing(name: str) -> None:
    model = graph_fsdp.compile(MLP(), mesh_of(8, names=(name,)), backend="eager")
    model(torch.randn(4, 16)).sum().backward()
    for p in model.parameters():
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
        assert p.placements == p.grad.placements == (Replicate(),)
        assert p.to_local().shape == p.shape


def test_replicated_parameters_are_used_as_they_are_and_gradients_reduced_by_bucket() -> None:
    report = report_of(mesh_of(8, names=("replicate",)))
    assert report.forward.buckets == []
    assert report.peak_gathered_bytes == 0
    assert_expected_inline(
        report.backward.table(),
        """\
  bucket    kind    params  bytes  start  wait  first use  free
  root      reduce       2    340     21    59         60     -
  blocks.1  reduce       4  4,288     42    64         65     -
  blocks.0  reduce       4  4,288     63    71         72     -""",
    )
    assert_expected_inline(
        lines_with(report, "backward", "_start", "reduce_wait"),
        """\
reduce_root = torch.ops.graph_fsdp.all_reduce_start.default([t_8, view], torch.float32, 8, '0')
reduce_blocks_1 = torch.ops.graph_fsdp.all_reduce_start.default([t_16, view_2, t_12, view_1], torch.float32, 8, '0')
reduced_root = torch.ops.graph_fsdp.reduce_wait.default(reduce_root)
reduce_blocks_0 = torch.ops.graph_fsdp.all_reduce_start.default([t_23, view_4, t_20, view_3], torch.float32, 8, '0')
reduced_blocks_1 = torch.ops.graph_fsdp.reduce_wait.default(reduce_blocks_1)
reduced_blocks_0 = torch.ops.graph_fsdp.reduce_wait.default(reduce_blocks_0)""",
    )


def test_replicated_parameters_are_cast_where_they_are_used() -> None:
    report = report_of(mesh_of(8, names=("replicate",)), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert_expected_inline(
        lines_with(report, "backward", "_start", "convert_element_type"),
        """\
convert_element_type_default = torch.ops.prims.convert_element_type.default(primals_10, torch.bfloat16)
t_4 = torch.ops.aten.t.default(convert_element_type_default)
reduce_root = torch.ops.graph_fsdp.all_reduce_start.default([t_8, view], torch.float32, 8, '0')
convert_element_type_default_1 = torch.ops.prims.convert_element_type.default(primals_8, torch.bfloat16)
t_3 = torch.ops.aten.t.default(convert_element_type_default_1)
convert_element_type_default_2 = torch.ops.prims.convert_element_type.default(primals_6, torch.bfloat16)
t_2 = torch.ops.aten.t.default(convert_element_type_default_2)
reduce_blocks_1 = torch.ops.graph_fsdp.all_reduce_start.default([t_16, view_2, t_12, view_1], torch.float32, 8, '0')
convert_element_type_default_3 = torch.ops.prims.convert_element_type.default(primals_4, torch.bfloat16)
t_1 = torch.ops.aten.t.default(convert_element_type_default_3)
reduce_blocks_0 = torch.ops.graph_fsdp.all_reduce_start.default([t_23, view_4, t_20, view_3], torch.float32, 8, '0')""",
    )


def test_replicated_evaluation_communicates_nothing() -> None:
    model = graph_fsdp.compile(MLP(), mesh_of(8, names=("replicate",)), backend="eager")
    expected = MLP()
    expected.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    x = torch.randn(4, 16)
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))
    assert collectives(graph_fsdp.inspect(model), "inference") == ""
