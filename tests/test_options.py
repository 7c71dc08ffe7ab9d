"""What each option of ``compile`` changes in the printed graphs of a two-block MLP on 8 ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP, MLPBlock
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

import graph_fsdp
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report import GraphReport

pytestmark = pytest.mark.usefixtures("fake_group")


def report_of(model: MLP | None = None, **options: Any) -> GraphReport:
    model = graph_fsdp.compile(model or MLP(), backend="eager", **options)
    model(torch.randn(4, 16)).float().sum().backward()
    return graph_fsdp.inspect(model)


def tables(report: GraphReport) -> str:
    return f"{report.forward.table()}\n\n{report.backward.table()}"


def collectives(report: GraphReport) -> str:
    """The program's communication, in order."""
    lines = []
    for view in (report.forward, report.backward):
        calls = [line.strip().split(", [")[0] for line in str(view.program).splitlines() if "frame." in line]
        lines += [f"{view.phase}:", *(f"  {call}" for call in calls)]
    return "\n".join(lines)


def lines_with(report: GraphReport, phase: str, text: str) -> str:
    body = getattr(report, phase).stages["free"].body
    return "\n".join(line.strip() for line in body.splitlines() if text in line)


def test_reshard_after_forward_true_gathers_every_unit_again() -> None:
    assert_expected_inline(
        tables(report_of(reshard_after_forward=True)),
        """\
  bucket    kind    params  bytes  start  wait  first use  free
  blocks.0  gather       4  5,120     11    12         14    26
  blocks.1  gather       4  5,120     13    27         29    41
  root      gather       2  1,024     28    42         43    50

  bucket    kind    params  bytes  start  wait  first use  free
  root      gather       2  1,024     12    13         15    27
  blocks.1  gather       4  5,120     14    29         31    55
  root      reduce       2     68     28    77         78     -
  blocks.0  gather       4  5,120     30    57         58    76
  blocks.1  reduce       4    536     56    82         83     -
  blocks.0  reduce       4    536     81    89         90     -""",
    )


def test_reshard_after_forward_false_keeps_every_unit() -> None:
    assert_expected_inline(
        tables(report_of(reshard_after_forward=False)),
        """\
  bucket    kind    params  bytes  start  wait  first use  free
  blocks.0  gather       4  5,120     11    12         14  kept
  blocks.1  gather       4  5,120     13    26         28  kept
  root      gather       2  1,024     27    40         41  kept

  bucket    kind    params  bytes  start  wait  first use  free
  blocks.0  kept         4  5,120      -     -         55    73
  blocks.1  kept         4  5,120      -     -         29    53
  root      kept         2  1,024      -     -         15    27
  root      reduce       2     68     28    74         75     -
  blocks.1  reduce       4    536     54    79         80     -
  blocks.0  reduce       4    536     78    86         87     -""",
    )


def test_reshard_after_forward_none_keeps_the_unit_used_last() -> None:
    assert_expected_inline(
        tables(report_of()),
        """\
  bucket    kind    params  bytes  start  wait  first use  free
  blocks.0  gather       4  5,120     11    12         14    26
  blocks.1  gather       4  5,120     13    27         29    41
  root      gather       2  1,024     28    42         43  kept

  bucket    kind    params  bytes  start  wait  first use  free
  root      kept         2  1,024      -     -         14    26
  blocks.1  gather       4  5,120     13    28         30    54
  root      reduce       2     68     27    76         77     -
  blocks.0  gather       4  5,120     29    56         57    75
  blocks.1  reduce       4    536     55    81         82     -
  blocks.0  reduce       4    536     80    88         89     -""",
    )


def test_param_dtype_is_what_gathers_move_and_reduce_dtype_what_reductions_run_in() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    report = report_of(mp_policy=policy)
    assert_expected_inline(
        lines_with(report, "forward", "all_gather_start"),
        """\
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default([primals_2, primals_3, primals_4, primals_5], [0, 64, 80, 144], 160, torch.bfloat16, 8, '0')
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_7, primals_8, primals_9], [0, 64, 80, 144], 160, torch.bfloat16, 8, '0')
gather_root = torch.ops.graph_fsdp.all_gather_start.default([primals_10, primals_11], [0, 16], 32, torch.bfloat16, 8, '0')""",
    )
    assert_expected_inline(
        lines_with(report, "backward", "reduce_scatter_start"),
        """\
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default([t_8, view], torch.float32, 8, '0')
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_16, view_2, t_12, view_1], torch.float32, 8, '0')
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_23, view_4, t_20, view_3], torch.float32, 8, '0')""",
    )


def test_without_reduce_dtype_reductions_run_in_param_dtype_and_are_cast_after() -> None:
    report = report_of(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert_expected_inline(
        lines_with(report, "backward", "reduce_scatter_start"),
        """\
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default([t_8, view], torch.bfloat16, 8, '0')
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_16, view_2, t_12, view_1], torch.bfloat16, 8, '0')
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_23, view_4, t_20, view_3], torch.bfloat16, 8, '0')""",
    )
    assert_expected_inline(
        lines_with(report, "backward", "convert_element_type"),
        """\
convert_element_type_default = torch.ops.prims.convert_element_type.default(reduced_root, torch.float32)
head_weight_grad = torch.ops.aten.slice.Tensor(convert_element_type_default, 0, 0, 16)
head_bias_grad = torch.ops.aten.slice.Tensor(convert_element_type_default, 0, 16, 17)
convert_element_type_default_1 = torch.ops.prims.convert_element_type.default(reduced_blocks_1, torch.float32)
blocks_1_up_weight_grad = torch.ops.aten.slice.Tensor(convert_element_type_default_1, 0, 0, 64)
blocks_1_up_bias_grad = torch.ops.aten.slice.Tensor(convert_element_type_default_1, 0, 64, 68)
blocks_1_down_weight_grad = torch.ops.aten.slice.Tensor(convert_element_type_default_1, 0, 68, 132)
blocks_1_down_bias_grad = torch.ops.aten.slice.Tensor(convert_element_type_default_1, 0, 132, 134)
convert_element_type_default_2 = torch.ops.prims.convert_element_type.default(reduced_blocks_0, torch.float32)
blocks_0_up_weight_grad = torch.ops.aten.slice.Tensor(convert_element_type_default_2, 0, 0, 64)
blocks_0_up_bias_grad = torch.ops.aten.slice.Tensor(convert_element_type_default_2, 0, 64, 68)
blocks_0_down_weight_grad = torch.ops.aten.slice.Tensor(convert_element_type_default_2, 0, 68, 132)
blocks_0_down_bias_grad = torch.ops.aten.slice.Tensor(convert_element_type_default_2, 0, 132, 134)""",
    )


def test_output_dtype_and_cast_forward_inputs_cast_what_goes_in_and_comes_out() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = graph_fsdp.compile(MLP(), backend="eager", mp_policy=policy)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    assert model(torch.randn(4, 16)).dtype is torch.float64
    assert seen == [torch.bfloat16]
    uncast = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model = graph_fsdp.compile(MLP(), backend="eager", mp_policy=uncast)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(4, 16))


def test_auto_wrap_policy_makes_the_buckets() -> None:
    by_class = report_of(auto_wrap_policy={torch.nn.Linear})
    assert_expected_inline(
        tables(by_class),
        """\
  bucket         kind    params  bytes  start  wait  first use  free
  blocks.0.up    gather       2  2,560     11    12         14    20
  blocks.0.down  gather       2  2,560     13    21         23    29
  blocks.1.up    gather       2  2,560     22    30         32    38
  blocks.1.down  gather       2  2,560     31    39         41    47
  head           gather       2  1,024     40    48         49  kept

  bucket         kind    params  bytes  start  wait  first use  free
  head           kept         2  1,024      -     -         14    26
  blocks.1.down  gather       2  2,560     13    28         30    42
  head           reduce       2     68     27    59         60     -
  blocks.1.up    gather       2  2,560     29    44         46    58
  blocks.1.down  reduce       2    264     43    78         79     -
  blocks.0.down  gather       2  2,560     45    64         65    77
  blocks.1.up    reduce       2    272     63    89         90     -
  blocks.0.down  reduce       2    264     82    94         95     -
  blocks.0.up    reduce       2    272     93    98         99     -""",
    )
    policy = ModuleWrapPolicy({MLPBlock})
    assert tables(report_of(auto_wrap_policy=policy)) == tables(report_of()), "what None finds by itself"
    one = functools.partial(size_based_auto_wrap_policy, min_num_params=10**9)
    with pytest.raises(ValueError, match="auto_wrap_policy"):
        report_of(auto_wrap_policy=one)


def test_ignored_params_are_neither_gathered_nor_reduced() -> None:
    model = MLP()
    ignored = model.blocks[0].up.weight
    report = report_of(model, ignored_params=[ignored])
    assert model.blocks[0].up.weight is ignored and ignored.grad is not None and ignored.shape == (32, 16)
    assert_expected_inline(
        lines_with(report, "forward", "all_gather_start"),
        """\
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default([primals_2, primals_4, primals_5], [0, 16, 80], 96, torch.float32, 8, '0')
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_7, primals_8, primals_9], [0, 64, 80, 144], 160, torch.float32, 8, '0')
gather_root = torch.ops.graph_fsdp.all_gather_start.default([primals_10, primals_11], [0, 16], 32, torch.float32, 8, '0')""",
    )
    assert_expected_inline(
        lines_with(report, "backward", "reduce_scatter_start"),
        """\
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default([t_8, view], torch.float32, 8, '0')
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_16, view_2, t_12, view_1], torch.float32, 8, '0')
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default([view_4, t_20, view_3], torch.float32, 8, '0')""",
    )


def test_ignored_modules_are_ignored_with_all_their_parameters() -> None:
    model = MLP()
    before = dict(model.named_parameters())
    report = report_of(model, ignored_params=[model.blocks[0], model.head.bias])
    same = [name for name, p in model.named_parameters() if p is before[name]]
    assert same == [*(f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters()), "head.bias"]
    assert_expected_inline(
        lines_with(report, "forward", "all_gather_start"),
        """\
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_6, primals_7, primals_8, primals_9], [0, 64, 80, 144], 160, torch.float32, 8, '0')
gather_root = torch.ops.graph_fsdp.all_gather_start.default([primals_10], [0], 16, torch.float32, 8, '0')""",
    )
    assert_expected_inline(
        lines_with(report, "backward", "reduce_scatter_start"),
        """\
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default([t_8], torch.float32, 8, '0')
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default([t_16, view_2, t_12, view_1], torch.float32, 8, '0')""",
    )


def test_passes_prefetch_distance_and_reductions_in_flight() -> None:
    serial = default_pipeline(prefetch=0, reductions_in_flight=1)
    assert_expected_inline(
        collectives(report_of(MLP(depth=3), passes=serial)),
        """\
forward:
  gather_blocks_0 = frame.gather_start(plan_0
  full_blocks_0 = frame.wait(gather_blocks_0)
  frame.free(full_blocks_0)
  gather_blocks_1 = frame.gather_start(plan_4
  full_blocks_1 = frame.wait(gather_blocks_1)
  frame.free(full_blocks_1)
  gather_blocks_2 = frame.gather_start(plan_8
  full_blocks_2 = frame.wait(gather_blocks_2)
  frame.free(full_blocks_2)
  gather_root = frame.gather_start(plan_12
  full_root = frame.wait(gather_root)
backward:
  reduce_root = frame.reduce_start(plan_2
  gather_blocks_2 = frame.gather_start(plan_3
  full_blocks_2 = frame.wait(gather_blocks_2)
  frame.free(full_blocks_2)
  reduced_root = frame.wait(reduce_root)
  reduce_blocks_2 = frame.reduce_start(plan_9
  gather_blocks_1 = frame.gather_start(plan_10
  full_blocks_1 = frame.wait(gather_blocks_1)
  frame.free(full_blocks_1)
  reduced_blocks_2 = frame.wait(reduce_blocks_2)
  reduce_blocks_1 = frame.reduce_start(plan_16
  gather_blocks_0 = frame.gather_start(plan_17
  full_blocks_0 = frame.wait(gather_blocks_0)
  frame.free(full_blocks_0)
  reduced_blocks_1 = frame.wait(reduce_blocks_1)
  reduce_blocks_0 = frame.reduce_start(plan_23
  reduced_blocks_0 = frame.wait(reduce_blocks_0)""",
    )
    eager = default_pipeline(prefetch=2, reductions_in_flight=3)
    assert_expected_inline(
        collectives(report_of(MLP(depth=3), passes=eager)),
        """\
forward:
  gather_blocks_0 = frame.gather_start(plan_0
  gather_blocks_1 = frame.gather_start(plan_1
  full_blocks_0 = frame.wait(gather_blocks_0)
  gather_blocks_2 = frame.gather_start(plan_3
  frame.free(full_blocks_0)
  full_blocks_1 = frame.wait(gather_blocks_1)
  gather_root = frame.gather_start(plan_7
  frame.free(full_blocks_1)
  full_blocks_2 = frame.wait(gather_blocks_2)
  frame.free(full_blocks_2)
  full_root = frame.wait(gather_root)
backward:
  gather_blocks_2 = frame.gather_start(plan_0
  gather_blocks_1 = frame.gather_start(plan_1
  reduce_root = frame.reduce_start(plan_4
  full_blocks_2 = frame.wait(gather_blocks_2)
  gather_blocks_0 = frame.gather_start(plan_6
  frame.free(full_blocks_2)
  reduce_blocks_2 = frame.reduce_start(plan_9
  full_blocks_1 = frame.wait(gather_blocks_1)
  frame.free(full_blocks_1)
  reduce_blocks_1 = frame.reduce_start(plan_13
  full_blocks_0 = frame.wait(gather_blocks_0)
  frame.free(full_blocks_0)
  reduced_root = frame.wait(reduce_root)
  reduce_blocks_0 = frame.reduce_start(plan_19
  reduced_blocks_2 = frame.wait(reduce_blocks_2)
  reduced_blocks_1 = frame.wait(reduce_blocks_1)
  reduced_blocks_0 = frame.wait(reduce_blocks_0)""",
    )


def test_dynamic_captures_one_graph_for_all_batch_sizes() -> None:
    for dynamic, graphs in ((True, 1), (False, 3)):
        model = graph_fsdp.compile(MLP(), backend="eager", dynamic=dynamic)
        for rows in (3, 4, 5):
            model(torch.randn(rows, 16)).sum().backward()
        assert len(graph_fsdp.inspect(model).graphs) == graphs


def test_gradients_that_are_reduced_in_a_wider_type_are_reduced_one_bucket_at_a_time() -> None:
    def under_way(reduce_dtype: torch.dtype | None) -> list[str]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        lines = collectives(report_of(MLP(depth=3), mp_policy=policy)).partition("backward:")[2].splitlines()
        return [line.split(" = ")[0].strip() for line in lines if "reduce" in line]

    assert under_way(torch.bfloat16)[:3] == ["reduce_root", "reduce_blocks_2", "reduced_root"]
    assert_expected_inline(
        " ".join(under_way(torch.float32)),
        """reduce_root reduced_root reduce_blocks_2 reduced_blocks_2 reduce_blocks_1 reduced_blocks_1 reduce_blocks_0 reduced_blocks_0""",
    )


@pytest.mark.parametrize("arguments", [{"prefetch": -1}, {"reductions_in_flight": 0}])
def test_settings_of_the_schedule_are_checked(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        default_pipeline(**arguments)


def test_parameters_of_two_dtypes_are_two_buckets_of_their_unit() -> None:
    model = MLP()
    model.head.to(torch.bfloat16)
    model.head.register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
    model.register_parameter("scale", torch.nn.Parameter(torch.ones(3)))
    model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0] * model.scale.sum(),))
    report = report_of(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    assert_expected_inline(
        tables(report),
        """\
  bucket    kind    params  bytes  start  wait  first use  free
  root      gather       1    512     12    13         15    19
  blocks.0  gather       4  5,120     14    20         22    34
  blocks.1  gather       4  5,120     21    35         37    50
  root#1    gather       2  1,024     36    51         52  kept

  bucket    kind    params  bytes  start  wait  first use  free
  root#1    kept         2  1,024      -     -         16    29
  blocks.1  gather       4  5,120     15    31         33    57
  root#1    reduce       2     68     30    58         59     -
  blocks.0  gather       4  5,120     32    64         65    91
  blocks.1  reduce       4    536     63    92         93     -
  blocks.0  reduce       4    536     99   101        102     -
  root      reduce       1      4    108   109        110     -""",
    )
