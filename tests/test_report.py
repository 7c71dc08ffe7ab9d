"""The report: a table to read, diffs of passes, rows of buckets, and one entry per captured graph."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from conftest import fake_process_group
from expecttest import assert_expected_inline
from models import MLP
from torch import nn

import graph_fsdp
from graph_fsdp.report.report import GraphReport


@pytest.fixture(scope="module")
def report() -> GraphReport:
    with fake_process_group():
        model = graph_fsdp.compile(MLP(), backend="eager")
        model(torch.ones(4, 16)).sum().backward()
        return graph_fsdp.inspect(model)


def without_times(text: object) -> str:
    return re.sub(r"\d+\.\d ms", "T ms", str(text))


# As text


def test_the_report_prints_a_table_per_graph(report: GraphReport) -> None:
    assert_expected_inline(
        without_times(report),
        """\
graph_fsdp: 10 parameters in 3 buckets over 8 ranks
captured graphs: 1; compute regions: 9, compiled 7; most bytes gathered at once: 10,240

  unit                                 params  elements  bytes  bytes of a rank
  blocks.0 to blocks.1: 2 units, each       4     1,072  4,288              536
  root                                      2        85    340               68

graph 0, forward: 51 nodes
  bucket    kind    params  bytes  start  wait  first use  free  slots  ahead  takes ms  exposed ms
  blocks.0  gather       4  5,120     11    12         14    26   0, 1      0     0.339       0.339
  blocks.1  gather       4  5,120     13    27         29    41   1, 2      1     0.339       0.323
  root      gather       2  1,024     28    42         43  kept      3      1     0.332       0.315
  slots: 4, 16,384 bytes, at most 15,360 at once
    slot 0, 5,120 bytes: blocks.0
    slot 1, 5,120 bytes: landing of blocks.0, blocks.1
    slot 2, 5,120 bytes: landing of blocks.1
    slot 3, 1,024 bytes: landing of root
  copied by packing and unpacking: 22,528 bytes
  predicted peak: 18,560 bytes at add: gathered 10,240, landing 5,120, shards 1,408, saved 1,280, other 512
  held most by: gather_blocks_0 5,120 (gathered), gather_blocks_1 5,120 (gathered), gather_blocks_1 5,120 (landing)
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
  slots: 3, 15,360 bytes, at most 15,360 at once
    slot 0, 5,120 bytes: blocks.1
    slot 1, 5,120 bytes: landing of blocks.1, blocks.0
    slot 2, 5,120 bytes: landing of blocks.0
  copied by packing and unpacking: 38,516 bytes
  predicted peak: 24,100 bytes at mm_5: gathered 10,240, landing 5,120, reducing 4,704, saved 1,536, shards 1,408, other 1,092
  held most by: gather_blocks_1 5,120 (gathered), gather_blocks_0 5,120 (gathered), gather_blocks_0 5,120 (landing)
  predicted on cpu: 1.684 ms, compute 0.069, communication 1.684, of it exposed 1.615
  passes: partition, just_in_time, bucket, reshard, delay_wgrad, prefetch, free, slots""",  # noqa: E501
    )
    assert repr(report) == str(report)


def test_the_report_of_a_model_that_did_not_run(fake_group: None) -> None:
    report = graph_fsdp.inspect(graph_fsdp.compile(MLP(), backend="eager"))
    assert_expected_inline(
        str(report),
        """\
graph_fsdp: 10 parameters in 3 buckets over 8 ranks
captured graphs: 0; compute regions: 0, compiled 0; most bytes gathered at once: 0

  unit                                 params  elements  bytes  bytes of a rank
  blocks.0 to blocks.1: 2 units, each       4     1,072  4,288              536
  root                                      2        85    340               68""",
    )
    assert report.graphs == []


def test_on_one_process_nothing_is_communicated() -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    model(torch.ones(4, 16)).sum().backward()
    assert_expected_inline(
        without_times(graph_fsdp.inspect(model)),
        """\
graph_fsdp: 10 parameters in 3 buckets over 1 rank
captured graphs: 1; compute regions: 2, compiled 2; most bytes gathered at once: 0

  unit                                 params  elements  bytes  bytes of a rank
  blocks.0 to blocks.1: 2 units, each       4     1,072  4,288            4,288
  root                                      2        85    340              340

graph 0, forward: 26 nodes
  nothing gathered or reduced
  predicted peak: 12,032 bytes at add_1: shards 8,960, saved 2,560, other 512
  held most by: addmm 512 (saved), gelu 512 (saved), addmm_2 512 (saved)
  predicted on cpu: 0.037 ms, compute 0.037, communication 0.000, of it exposed 0.000
  passes: partition, just_in_time, bucket, reshard, prefetch, free, slots

graph 0, backward: 58 nodes
  nothing gathered or reduced
  predicted peak: 18,516 bytes at mm_8: shards 8,960, gradients 8,788, other 768
  held most by: mm_3 2,048 (gradients), mm_5 2,048 (gradients), mm_7 2,048 (gradients)
  predicted on cpu: 0.069 ms, compute 0.069, communication 0.000, of it exposed 0.000
  passes: partition, just_in_time, bucket, reshard, delay_wgrad, prefetch, free, slots""",
    )


def test_reading_a_graph_does_not_change_what_is_printed(fake_group: None) -> None:
    report = run(graph_fsdp.compile(MLP(), backend="eager"))
    printed = str(report)
    assert report.capture.stages and report.joint.stages
    assert str(report) == printed


# Rows of buckets


def test_a_bucket_is_started_waited_for_used_and_freed_in_this_order(report: GraphReport) -> None:
    gathered = [row for view in (report.forward, report.backward) for row in view.buckets if row.kind == "gather"]
    assert [row.name for row in gathered] == ["blocks.0", "blocks.1", "root", "blocks.1", "blocks.0"]
    for row in gathered:
        assert row.start < row.wait <= row.first_use
        assert row.free is None if row.escapes else row.first_use < row.free
        assert row.nbytes == 8 * report.spec.bucket_of[row.parameters[0]].shard_numel * 4


def test_a_bucket_that_forward_keeps_comes_back_in_backward(report: GraphReport) -> None:
    (forward,) = (row for row in report.forward.buckets if row.escapes)
    (backward,) = (row for row in report.backward.buckets if row.kind == "kept")
    assert (forward.name, forward.parameters, forward.nbytes) == ("root", ("head.weight", "head.bias"), 1024)
    assert (backward.name, backward.parameters, backward.nbytes) == ("root", ("head.weight", "head.bias"), 1024)
    assert (backward.start, backward.wait) == (None, None)
    assert backward.first_use < backward.free


def test_a_bucket_is_reduced_after_its_gradients_and_waited_for_later(report: GraphReport) -> None:
    reduced = [row for row in report.backward.buckets if row.kind == "reduce"]
    assert [row.name for row in reduced] == ["root", "blocks.1", "blocks.0"]
    assert [row.nbytes for row in reduced] == [68, 536, 536], "of the shards, without padding"
    assert all(row.start < row.wait < row.first_use and row.free is None for row in reduced)
    assert sorted(name for row in reduced for name in row.parameters) == sorted(report.spec.parameters)


# Stages


def test_each_stage_is_a_python_module_headed_by_its_pass(report: GraphReport) -> None:
    for view in (report.capture, report.joint, report.forward, report.backward):
        for name, stage in view.stages.items():
            ast.parse(stage.code)
            assert re.match(rf"# {view.phase} graph after pass '{name}' \(\d+\.\d ms\)\n", stage.code)
            assert (stage.name, stage.phase, stage.seconds >= 0) == (name, view.phase, True)
            assert stage.code.endswith(stage.body)
    assert "\n# 3 buckets gathered, 0 reduced\n" in report.forward.stages["bucket"].code


def test_stages_are_what_each_pass_left_behind(report: GraphReport) -> None:
    assert list(report.capture.stages) == ["causal_attention", "insert_gathers"]
    assert list(report.joint.stages) == ["annotate", "recompute"]
    names = ["partition", "just_in_time", "bucket", "reshard", "prefetch", "free", "slots"]
    assert list(report.forward.stages) == names
    assert list(report.backward.stages) == [*names[:4], "delay_wgrad", *names[4:]]
    without_gathers = [name for name, stage in report.forward.stages.items() if "all_gather_start" not in stage.body]
    assert without_gathers == ["partition", "just_in_time"]


def test_a_diff_has_what_a_pass_changed_in_each_graph(report: GraphReport) -> None:
    assert_expected_inline(
        report.forward.diff("free"),
        """\
--- prefetch
+++ free
@@ -16,2 +16,3 @@
     add = torch.ops.aten.add.Tensor(primals_3, addmm_1)
+    free_blocks_0 = torch.ops.graph_fsdp.free.default(full_blocks_0)
     full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default(gather_blocks_1)
@@ -30,2 +31,3 @@
     add_1 = torch.ops.aten.add.Tensor(add, addmm_3)
+    free_blocks_1 = torch.ops.graph_fsdp.free.default(full_blocks_1)
     full_root = torch.ops.graph_fsdp.all_gather_wait.default(gather_root)""",
    )
    assert report.diff("reshard").splitlines()[:3] == ["# forward graph", "--- bucket", "+++ reshard"]
    assert "\n# backward graph\n--- bucket\n+++ reshard\n" in report.diff("reshard")
    assert report.diff("annotate").startswith("# joint graph\n--- (nothing)\n+++ annotate\n")
    assert "# " not in report.forward.diff("prefetch"), "times differ from run to run and are left out"


def test_a_stage_that_does_not_exist(report: GraphReport) -> None:
    with pytest.raises(
        KeyError, match="the forward graph has no stage 'schedule'; it has partition, just_in_time, bucket, "
    ):
        report.forward.diff("schedule")
    with pytest.raises(KeyError, match=r"no graph has a stage 'schedule'; there are .*partition, "):
        report.diff("schedule")


# Several captures


def run(model: nn.Module, rows: int = 4) -> GraphReport:
    model(torch.ones(rows, 16)).sum().backward()
    return graph_fsdp.inspect(model)


def test_evaluation_adds_an_inference_graph(fake_group: None) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    before = run(model)
    with torch.no_grad():
        model(torch.ones(4, 16))
    report = graph_fsdp.inspect(model)
    assert (len(before.graphs), len(report.graphs)) == (1, 2)
    ran = [[phase for phase, view in captured.views.items() if view.graph is not None] for captured in report.graphs]
    assert ran == [["forward", "backward"], ["inference"]]
    assert list(report.inference.stages) == ["annotate", "bucket", "prefetch", "free", "slots"]
    assert [(row.name, row.escapes) for row in report.inference.buckets] == [
        ("blocks.0", False),
        ("blocks.1", False),
        ("root", False),
    ], "nothing is kept for a backward that does not come"
    with pytest.raises(LookupError, match="no inference graph"):
        _ = before.inference
    assert "graph 1, inference: " in str(report)


def test_another_batch_size_is_another_capture(fake_group: None) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    first, again, other = run(model), run(model), run(model, rows=6)
    assert [len(report.graphs) for report in (first, again, other)] == [1, 1, 2]
    assert other.forward is other.graphs[1].views["forward"]
    assert again.forward is other.graphs[0].views["forward"]
    assert [row.name for row in again.forward.buckets] == [row.name for row in other.forward.buckets]


# What cannot be reported


def test_a_backward_that_runs_after_a_report_is_predicted_in_the_next_one() -> None:
    model = graph_fsdp.compile(nn.Linear(4, 4), backend="eager")
    loss = model(torch.ones(2, 4)).sum()
    assert str(graph_fsdp.inspect(model))
    loss.backward()
    assert graph_fsdp.inspect(model).backward.timeline is not None
    assert "no cost model" not in str(graph_fsdp.inspect(model))


def test_inspecting_a_model_that_was_not_compiled() -> None:
    with pytest.raises(TypeError, match=r"MLP was not compiled by graph_fsdp; call graph_fsdp\.compile first"):
        graph_fsdp.inspect(MLP())


@pytest.mark.parametrize("graph", ["capture", "joint", "forward", "backward", "inference"])
def test_reporting_a_graph_before_any_step(fake_group: None, graph: str) -> None:
    report = graph_fsdp.inspect(graph_fsdp.compile(MLP(), backend="eager"))
    with pytest.raises(LookupError, match=f"no {graph} graph was captured yet; run the model once"):
        getattr(report, graph)
