"""What a mesh changes in the graphs: hybrid sharding, replication, bad meshes. Eight ranks that do nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from models import MLP, UnevenBlock
from printed import bucket_table, bucket_tables, calls, sequence, stage_text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

import graph_fsdp
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.passes import default_pipeline
from graph_fsdp.passes.ir.dialect import keep_shard
from graph_fsdp.report.report import GraphReport, engine_of

pytestmark = pytest.mark.usefixtures("fake_group_of_module")


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def report_of(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> GraphReport:
    """After a step. Tests of a two-block MLP with the same mesh and options share one."""
    if model is not None:
        return _step(model, mesh, **options)
    names = mesh.mesh_dim_names
    return _mlp_report(
        tuple(mesh.shape),
        None if names is None else tuple(names),
        tuple((name, repr(value), value) for name, value in sorted(options.items())),
    )


@functools.cache
def _mlp_report(shape: tuple[int, ...], names: Any, options: tuple[tuple[str, str, Any], ...]) -> GraphReport:
    return _step(MLP(), mesh_of(*shape, names=names), **{name: value for name, _, value in options})


def _step(model: nn.Module, mesh: DeviceMesh, **options: Any) -> GraphReport:
    graph_fsdp.compile(model, mesh, backend="eager", **options)
    model(torch.randn(4, 16)).float().sum().backward()
    return graph_fsdp.inspect(model)


# Hybrid: the first dimension replicates, the second shards


@pytest.mark.parametrize("names", [None, ("dp_replicate", "dp_shard")])
def test_two_dimensions_replicate_and_shard(names: tuple[str, ...] | None) -> None:
    model = graph_fsdp.compile(MLP(depth=1), mesh_of(2, 4, names=names), backend="eager")
    model(torch.randn(4, 16)).sum().backward()
    for p in model.parameters():
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
        assert p.placements == p.grad.placements == (Replicate(), Shard(0))
        assert p.to_local().shape[0] == -(-p.shape[0] // 4)


def test_a_bucket_is_reduced_over_shards_and_then_over_replicas_both_deferred() -> None:
    report = report_of(mesh_of(2, 4))
    assert_expected_inline(
        bucket_table(report.backward),
        """\
root kept 2 768
blocks.1 gather 4 4,608
root reduce 2 136
blocks.0 gather 4 4,608
root replicate 2 136
blocks.1 reduce 4 1,072
blocks.1 replicate 4 1,072
blocks.0 reduce 4 1,072
blocks.0 replicate 4 1,072""",
    )
    assert_expected_inline(
        sequence(report.backward),
        """\
gather_blocks_1 free_root reduce_root full_blocks_1 gather_blocks_0 free_blocks_1 reduced_root replicate_root
reduce_blocks_1 full_blocks_0 free_blocks_0 reduced_blocks_1 replicate_blocks_1 reduce_blocks_0 reduced_blocks_0
replicate_blocks_0 replicated_root replicated_blocks_1 replicated_blocks_0""",
    )


def test_the_shard_of_a_bucket_is_reduced_in_place() -> None:
    report = report_of(mesh_of(2, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert_expected_inline(
        calls(report.backward, "reduce_scatter_start", "all_reduce_shard_start"),
        """\
reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=4, replicas=2)
replicate_root = all_reduce_shard_start(reduced_root, ranks=8)
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=4, replicas=2)
replicate_blocks_1 = all_reduce_shard_start(reduced_blocks_1, ranks=8)
reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=4, replicas=2)
replicate_blocks_0 = all_reduce_shard_start(reduced_blocks_0, ranks=8)""",
    )


def test_one_reduction_in_flight() -> None:
    report = report_of(mesh_of(2, 4), passes=default_pipeline(reductions_in_flight=1))
    assert_expected_inline(
        bucket_table(report.backward),
        """\
root kept 2 768
blocks.1 gather 4 4,608
root reduce 2 136
blocks.0 gather 4 4,608
root replicate 2 136
blocks.1 reduce 4 1,072
blocks.1 replicate 4 1,072
blocks.0 reduce 4 1,072
blocks.0 replicate 4 1,072""",
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
        calls(report.backward, "all_reduce_start", "all_reduce_shard_start"),
        """\
reduce_root_scalars = all_reduce_start([blocks.0.scale: sum], float32, world_size=4, replicas=2)
replicate_root_scalars = all_reduce_shard_start(reduced_root_scalars, ranks=8)
replicate_root = all_reduce_shard_start(reduced_root, ranks=8)""",
    )


def test_a_shard_dimension_of_one_rank_gathers_nothing() -> None:
    report = report_of(mesh_of(8, 1))
    assert report.forward.buckets == []
    assert_expected_inline(
        sequence(report.backward),
        """reduce_root reduce_blocks_1 reduced_root reduce_blocks_0 reduced_blocks_1 reduced_blocks_0""",
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
        bucket_tables(report),
        """\
forward
blocks.0 gather 4 5,120
blocks.1 gather 4 5,120
root gather 2 1,024
backward
root gather 2 1,024
blocks.1 gather 4 5,120
root reduce 2 68
blocks.0 gather 4 5,120
blocks.1 reduce 4 536
blocks.0 reduce 4 536""",
    )
    assert_expected_inline(
        stage_text(report.forward),
        """\
gather_blocks_0 = all_gather_start([blocks.0.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
full_blocks_0 = all_gather_wait(gather_blocks_0)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
    addmm(blocks.0.up.{bias, weight}), ..., addmm(blocks.0.down.{bias, weight}), ...
shard_blocks_0 = keep_shard(full_blocks_0, world_size=8, ranks=2)
free(full_blocks_0)
full_blocks_1 = all_gather_wait(gather_blocks_1)
gather_root = all_gather_start([head.{weight, bias}], float32, world_size=8)
    addmm(blocks.1.up.{bias, weight}), ..., addmm(blocks.1.down.{bias, weight}), ...
shard_blocks_1 = keep_shard(full_blocks_1, world_size=8, ranks=2)
free(full_blocks_1)
full_root = all_gather_wait(gather_root)
    addmm(head.{bias, weight})
shard_root = keep_shard(full_root, world_size=8, ranks=2)
free(full_root)
return ..., shard_blocks_0, shard_blocks_1, shard_root, ..., blocks.0.down.weight, blocks.1.{up.weight,
    down.weight}, head.weight, ...""",
    )
    assert_expected_inline(
        calls(report.backward, "all_gather_start"),
        """\
gather_root = all_gather_start([kept_shard(root)], float32, world_size=2)
gather_blocks_1 = all_gather_start([kept_shard(blocks.1)], float32, world_size=2)
gather_blocks_0 = all_gather_start([kept_shard(blocks.0)], float32, world_size=2)""",
    )


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_keeps_its_part_of_each_bucket(size: int) -> None:
    report = report_of(mesh_of(8), reshard_after_forward=size)
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
        return engine_of(model).spec.reshard_group

    assert group(2) == group(2) != group(4), "a process group has threads and files, and nobody destroys it"


def test_its_own_ranks_alone_make_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a default group that is bound to a device, torch would divide the communicator, on all of its ranks."""
    world, device = dist.group.WORLD, torch.device("cuda", 0)
    mesh = DataParallelMesh.of(init_device_mesh("cpu", (4,)))
    monkeypatch.setattr(world, "bound_device_id", device)  # as init_process_group(device_id=device)
    made = mesh.subgroup(2, "a use of its own")
    assert dist.get_process_group_ranks(made) == [0, 1]
    assert made.bound_device_id is None and world.bound_device_id == device


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
        bucket_table(report.backward),
        """\
root reduce 2 340
blocks.1 reduce 4 4,288
blocks.0 reduce 4 4,288""",
    )
    assert_expected_inline(
        calls(report.backward, "all_reduce_start"),
        """\
reduce_root = all_reduce_start([head.{weight: mm, bias: sum}], float32, world_size=8)
reduce_blocks_1 = all_reduce_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
reduce_blocks_0 = all_reduce_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)""",
    )


def test_replicated_parameters_are_cast_where_they_are_used() -> None:
    report = report_of(mesh_of(8, names=("replicate",)), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert_expected_inline(
        calls(report.backward, "all_reduce_start", "convert_element_type"),
        """\
convert_element_type(head.weight, bfloat16)
reduce_root = all_reduce_start([head.{weight: mm, bias: sum}], float32, world_size=8)
convert_element_type(blocks.1.down.weight, bfloat16)
convert_element_type(blocks.1.up.weight, bfloat16)
reduce_blocks_1 = all_reduce_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
convert_element_type(blocks.0.down.weight, bfloat16)
reduce_blocks_0 = all_reduce_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)""",
    )


def test_replicated_evaluation_communicates_nothing() -> None:
    model = graph_fsdp.compile(MLP(), mesh_of(8, names=("replicate",)), backend="eager")
    expected = MLP()
    expected.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    x = torch.randn(4, 16)
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))
    assert sequence(graph_fsdp.inspect(model).inference) == ""
