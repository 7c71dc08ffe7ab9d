"""``activation_checkpointing``: what forward saves and backward computes again, on the printed graphs."""

from __future__ import annotations

import pytest
import torch
from checkpointed_models import COMPUTE, Net, calls, saved, traced
from expecttest import assert_expected_inline

from graph_fsdp import ActivationCheckpointing
from graph_fsdp.passes import dialect
from graph_fsdp.passes.dialect import Role


def test_without_it_what_the_partitioner_chooses_is_saved() -> None:
    found = traced(None)
    assert_expected_inline(str(saved(found)), """['mm', 'gelu', 'add', 'mm_2', 'gelu_1', 'add_1', 'gelu_2', 'mm_4']""")
    assert_expected_inline(
        calls(found, *COMPUTE),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default
mm_5 = torch.ops.aten.mm.default
full_root = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default
mm_6 = torch.ops.aten.mm.default
gelu_backward = torch.ops.aten.gelu_backward.default
free_root = torch.ops.graph_fsdp.free.default
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default
mm_7 = torch.ops.aten.mm.default
full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default
mm_8 = torch.ops.aten.mm.default
gelu_backward_1 = torch.ops.aten.gelu_backward.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
add_2 = torch.ops.aten.add.Tensor
free_blocks_1 = torch.ops.graph_fsdp.free.default
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default
mm_11 = torch.ops.aten.mm.default
full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default
mm_12 = torch.ops.aten.mm.default
gelu_backward_2 = torch.ops.aten.gelu_backward.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor
free_blocks_0 = torch.ops.graph_fsdp.free.default
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default""",
    )


def test_unit_saves_what_goes_into_units_and_what_the_root_reads_of_them() -> None:
    found = traced("unit")
    assert_expected_inline(str(saved(found)), """['add', 'add_1', 'gelu_2', 'mm_4']""")
    assert_expected_inline(
        calls(found, *COMPUTE),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default
mm_5 = torch.ops.aten.mm.default
full_root = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default
mm_6 = torch.ops.aten.mm.default
gelu_backward = torch.ops.aten.gelu_backward.default
free_root = torch.ops.graph_fsdp.free.default
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default
full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default
mm_2 = torch.ops.aten.mm.default
gelu_1 = torch.ops.aten.gelu.default
mm_7 = torch.ops.aten.mm.default
mm_8 = torch.ops.aten.mm.default
gelu_backward_1 = torch.ops.aten.gelu_backward.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
add_2 = torch.ops.aten.add.Tensor
free_blocks_1 = torch.ops.graph_fsdp.free.default
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default
full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default
mm = torch.ops.aten.mm.default
gelu = torch.ops.aten.gelu.default
mm_11 = torch.ops.aten.mm.default
mm_12 = torch.ops.aten.mm.default
gelu_backward_2 = torch.ops.aten.gelu_backward.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor
free_blocks_0 = torch.ops.graph_fsdp.free.default
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default""",
    )


def test_selective_saves_matrix_multiplications_too() -> None:
    found = traced("selective")
    assert_expected_inline(str(saved(found)), """['mm', 'add', 'mm_2', 'add_1', 'gelu_2', 'mm_4']""")
    assert_expected_inline(
        calls(found, *COMPUTE),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default
mm_5 = torch.ops.aten.mm.default
full_root = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default
mm_6 = torch.ops.aten.mm.default
gelu_backward = torch.ops.aten.gelu_backward.default
free_root = torch.ops.graph_fsdp.free.default
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default
gelu_1 = torch.ops.aten.gelu.default
mm_7 = torch.ops.aten.mm.default
full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default
mm_8 = torch.ops.aten.mm.default
gelu_backward_1 = torch.ops.aten.gelu_backward.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
add_2 = torch.ops.aten.add.Tensor
free_blocks_1 = torch.ops.graph_fsdp.free.default
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default
gelu = torch.ops.aten.gelu.default
mm_11 = torch.ops.aten.mm.default
full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default
mm_12 = torch.ops.aten.mm.default
gelu_backward_2 = torch.ops.aten.gelu_backward.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor
free_blocks_0 = torch.ops.graph_fsdp.free.default
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default""",
    )


def test_a_collection_of_operators_saves_their_results() -> None:
    found = traced([torch.ops.aten.gelu])
    assert_expected_inline(str(saved(found)), """['gelu', 'add', 'gelu_1', 'add_1', 'gelu_2', 'mm_4']""")
    assert_expected_inline(
        calls(found, "aten.mm.", "aten.gelu.", "aten.add"),
        """\
mm_5 = torch.ops.aten.mm.default
mm_6 = torch.ops.aten.mm.default
mm_7 = torch.ops.aten.mm.default
mm_8 = torch.ops.aten.mm.default
mm_2 = torch.ops.aten.mm.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
add_2 = torch.ops.aten.add.Tensor
mm_11 = torch.ops.aten.mm.default
mm_12 = torch.ops.aten.mm.default
mm = torch.ops.aten.mm.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor""",
    )
    assert saved(traced({torch.ops.aten.gelu.default})) == saved(found)


def test_a_memory_budget_is_the_partitioners() -> None:
    assert_expected_inline(
        "\n".join(f"{budget:g} {saved(traced(budget))}" for budget in (0, 0.5, 1.0)),
        """\
0 ['add', 'add_1']
0.5 ['mm', 'add', 'mm_2', 'add_1', 'mm_4']
1 ['mm', 'gelu', 'add', 'mm_2', 'gelu_1', 'add_1', 'gelu_2', 'mm_4']""",
    )


def test_offload_copies_what_is_saved_of_all_units_but_the_last() -> None:
    with pytest.warns(UserWarning, match="the copies save nothing"):
        found = traced("offload")
    assert_expected_inline(
        str(saved(found)), """['offloaded_mm', 'offloaded_gelu', 'add', 'mm_2', 'gelu_1', 'add_1', 'gelu_2', 'mm_4']"""
    )
    forward = found.report.forward.stages["free"].body
    assert_expected_inline(
        "\n".join(line for line in forward.splitlines() if "offload" in line),
        """\
    offload_mm = torch.ops.graph_fsdp.offload_activation.default(mm)
    offload_gelu = torch.ops.graph_fsdp.offload_activation.default(gelu)
    offloaded_mm = torch.ops.graph_fsdp.activation_offloaded.default(offload_mm, mm)
    offloaded_gelu = torch.ops.graph_fsdp.activation_offloaded.default(offload_gelu, gelu)
    return (pow_1, primals_1, primals_2, primals_3, primals_4, primals_5, primals_6, offloaded_mm, offloaded_gelu, add, mm_2, gelu_1, add_1, gelu_2, mm_4)""",
    )
    assert_expected_inline(
        calls(found, "load", *COMPUTE),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default
mm_5 = torch.ops.aten.mm.default
full_root = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default
mm_6 = torch.ops.aten.mm.default
gelu_backward = torch.ops.aten.gelu_backward.default
free_root = torch.ops.graph_fsdp.free.default
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default
mm_7 = torch.ops.aten.mm.default
full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default
reload_gelu = torch.ops.graph_fsdp.reload_activation.default
mm_8 = torch.ops.aten.mm.default
gelu_backward_1 = torch.ops.aten.gelu_backward.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
add_2 = torch.ops.aten.add.Tensor
free_blocks_1 = torch.ops.graph_fsdp.free.default
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default
reload_mm = torch.ops.graph_fsdp.reload_activation.default
reloaded_gelu = torch.ops.graph_fsdp.activation_reloaded.default
mm_11 = torch.ops.aten.mm.default
full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default
reloaded_mm = torch.ops.graph_fsdp.activation_reloaded.default
mm_12 = torch.ops.aten.mm.default
gelu_backward_2 = torch.ops.aten.gelu_backward.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor
free_blocks_0 = torch.ops.graph_fsdp.free.default
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default""",
    )


@pytest.mark.filterwarnings("ignore:activation_checkpointing")
def test_offload_with_unit_copies_what_goes_into_units() -> None:
    found = traced(ActivationCheckpointing("unit", offload=True), lambda: Net(3))
    assert_expected_inline(str(saved(found)), """['offloaded_add', 'add_1', 'add_2', 'gelu_3', 'mm_6']""")
    assert_expected_inline(
        calls(found, "load", *COMPUTE),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default
mm_7 = torch.ops.aten.mm.default
full_root = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_2 = torch.ops.graph_fsdp.all_gather_start.default
mm_8 = torch.ops.aten.mm.default
gelu_backward = torch.ops.aten.gelu_backward.default
free_root = torch.ops.graph_fsdp.free.default
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default
full_blocks_2 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default
mm_4 = torch.ops.aten.mm.default
gelu_2 = torch.ops.aten.gelu.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
gelu_backward_1 = torch.ops.aten.gelu_backward.default
mm_11 = torch.ops.aten.mm.default
mm_12 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor
free_blocks_2 = torch.ops.graph_fsdp.free.default
reload_add = torch.ops.graph_fsdp.reload_activation.default
reduce_blocks_2 = torch.ops.graph_fsdp.reduce_scatter_start.default
full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default
reloaded_add = torch.ops.graph_fsdp.activation_reloaded.default
mm_2 = torch.ops.aten.mm.default
gelu_1 = torch.ops.aten.gelu.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
gelu_backward_2 = torch.ops.aten.gelu_backward.default
mm_15 = torch.ops.aten.mm.default
mm_16 = torch.ops.aten.mm.default
add_4 = torch.ops.aten.add.Tensor
free_blocks_1 = torch.ops.graph_fsdp.free.default
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default
full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default
mm = torch.ops.aten.mm.default
gelu = torch.ops.aten.gelu.default
mm_17 = torch.ops.aten.mm.default
mm_18 = torch.ops.aten.mm.default
gelu_backward_3 = torch.ops.aten.gelu_backward.default
mm_19 = torch.ops.aten.mm.default
mm_20 = torch.ops.aten.mm.default
add_5 = torch.ops.aten.add.Tensor
free_blocks_0 = torch.ops.graph_fsdp.free.default
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default""",
    )


@pytest.mark.filterwarnings("ignore:activation_checkpointing")
def test_copies_that_come_back_are_started_one_region_ahead() -> None:
    found = traced("offload", lambda: Net(4))
    positions = found.backward.positions()
    seen = 0
    for start in found.backward.with_role(Role.RELOAD):
        if start.target is not dialect.reload_activation:
            continue
        (wait,) = start.users
        between = found.backward.nodes[positions[start] + 1 : positions[wait]]
        communicates = [node.target in dialect.STARTS | dialect.WAITS for node in between]
        groups = sum(now and not before for before, now in zip([False, *communicates], communicates, strict=False))
        assert groups == 1, "a region lies between, and what is communicated behind it"
        seen += 1
    assert seen == 8  # two of each unit but the last, and what goes from one to the next
