"""What each option of ``compile`` changes in the printed graphs of a two-block MLP on 8 ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP, MLPBlock
from printed import bucket_tables, calls, sequence
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import GraphReport

pytestmark = pytest.mark.usefixtures("fake_group_of_module")


def report_of(model: MLP | None = None, **options: Any) -> GraphReport:
    model = graph_fsdp.compile(model or MLP(), backend="eager", **options)
    model(torch.randn(4, 16)).float().sum().backward()
    return graph_fsdp.inspect(model)


@functools.cache
def default_report() -> GraphReport:
    return report_of()


def test_reshard_after_forward_true_gathers_every_unit_again() -> None:
    assert_expected_inline(
        bucket_tables(report_of(reshard_after_forward=True)),
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


def test_a_unit_of_several_modules_is_gathered_and_reduced_as_one() -> None:
    model = MLP()
    assert_expected_inline(
        bucket_tables(report_of(model, auto_wrap_policy=[(model.blocks[0].up, model.head), model.blocks[1]])),
        """\
forward
blocks.0.up gather 4 3,584
root gather 2 2,560
blocks.1 gather 4 5,120 kept
backward
blocks.1 kept 4 5,120
blocks.0.up gather 4 3,584
root gather 2 2,560
blocks.1 reduce 4 536
root reduce 2 264
blocks.0.up reduce 4 340""",
    )


def test_reshard_after_forward_false_keeps_every_unit() -> None:
    assert_expected_inline(
        bucket_tables(report_of(reshard_after_forward=False)),
        """\
forward
blocks.0 gather 4 5,120 kept
blocks.1 gather 4 5,120 kept
root gather 2 1,024 kept
backward
blocks.0 kept 4 5,120
blocks.1 kept 4 5,120
root kept 2 1,024
root reduce 2 68
blocks.1 reduce 4 536
blocks.0 reduce 4 536""",
    )


def test_reshard_after_forward_none_keeps_the_unit_used_last() -> None:
    assert_expected_inline(
        bucket_tables(default_report()),
        """\
forward
blocks.0 gather 4 5,120
blocks.1 gather 4 5,120
root gather 2 1,024 kept
backward
root kept 2 1,024
blocks.1 gather 4 5,120
root reduce 2 68
blocks.0 gather 4 5,120
blocks.1 reduce 4 536
blocks.0 reduce 4 536""",
    )


def test_param_dtype_is_what_gathers_move_and_reduce_dtype_what_reductions_run_in() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    report = report_of(mp_policy=policy)
    assert_expected_inline(
        calls(report.forward, "all_gather_start"),
        """\
gather_blocks_0 = all_gather_start([blocks.0.{up.weight, up.bias, down.weight, down.bias}], bfloat16, world_size=8)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], bfloat16, world_size=8)
gather_root = all_gather_start([head.{weight, bias}], bfloat16, world_size=8)""",
    )
    assert_expected_inline(
        calls(report.backward, "reduce_scatter_start"),
        """\
reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8)
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)""",
    )


def test_without_reduce_dtype_reductions_run_in_param_dtype_and_are_cast_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "REDUCES_IN_OWN_DTYPE", False)  # as before torch 2.15
    report = report_of(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert_expected_inline(
        calls(report.backward, "reduce_scatter_start"),
        """\
reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], bfloat16, world_size=8)
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    bfloat16, world_size=8)
reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    bfloat16, world_size=8)""",
    )
    assert_expected_inline(
        calls(report.backward, "convert_element_type"),
        """\
convert_element_type(reduced_root, float32)
convert_element_type(reduced_blocks_1, float32)
convert_element_type(reduced_blocks_0, float32)""",
    )


def test_output_dtype_and_cast_forward_inputs_cast_what_goes_in_and_comes_out() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = graph_fsdp.compile(MLP(depth=1), backend="eager", mp_policy=policy)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.no_grad():
        assert model(torch.randn(4, 16)).dtype is torch.float64
    assert seen == [torch.bfloat16]
    uncast = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model = graph_fsdp.compile(MLP(depth=1), backend="eager", mp_policy=uncast)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(4, 16))


def test_auto_wrap_policy_makes_the_buckets() -> None:
    by_class = report_of(auto_wrap_policy={torch.nn.Linear})
    assert_expected_inline(
        bucket_tables(by_class),
        """\
forward
blocks.0.up gather 2 2,560
blocks.0.down gather 2 2,560
blocks.1.up gather 2 2,560
blocks.1.down gather 2 2,560
head gather 2 1,024 kept
backward
head kept 2 1,024
blocks.1.down gather 2 2,560
head reduce 2 68
blocks.1.up gather 2 2,560
blocks.1.down reduce 2 264
blocks.0.down gather 2 2,560
blocks.1.up reduce 2 272
blocks.0.down reduce 2 264
blocks.0.up reduce 2 272""",
    )
    by_policy = graph_fsdp.compile(MLP(), backend="eager", auto_wrap_policy=ModuleWrapPolicy({MLPBlock}))
    assert graph_fsdp.inspect(by_policy).spec == default_report().spec, "what None finds by itself"
    one = functools.partial(size_based_auto_wrap_policy, min_num_params=10**9)
    with pytest.raises(ValueError, match="auto_wrap_policy"):
        report_of(auto_wrap_policy=one)


def test_ignored_params_are_neither_gathered_nor_reduced() -> None:
    model = MLP()
    ignored = model.blocks[0].up.weight
    report = report_of(model, ignored_params=[ignored])
    assert model.blocks[0].up.weight is ignored and ignored.grad is not None and ignored.shape == (32, 16)
    assert_expected_inline(
        calls(report.forward, "all_gather_start"),
        """\
gather_blocks_0 = all_gather_start([blocks.0.{up.bias, down.weight, down.bias}], float32, world_size=8)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
gather_root = all_gather_start([head.{weight, bias}], float32, world_size=8)""",
    )
    assert_expected_inline(
        calls(report.backward, "reduce_scatter_start"),
        """\
reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8)
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)
reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.bias: sum, down.weight: mm, down.bias: sum}], float32,
    world_size=8)""",
    )


def test_ignored_modules_are_ignored_with_all_their_parameters() -> None:
    model = MLP()
    before = dict(model.named_parameters())
    report = report_of(model, ignored_params=[model.blocks[0], model.head.bias])
    same = [name for name, p in model.named_parameters() if p is before[name]]
    assert same == [*(f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters()), "head.bias"]
    assert_expected_inline(
        calls(report.forward, "all_gather_start"),
        """\
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
gather_root = all_gather_start([head.weight], float32, world_size=8)""",
    )
    assert_expected_inline(
        calls(report.backward, "reduce_scatter_start"),
        """\
reduce_root = reduce_scatter_start([head.weight: mm], float32, world_size=8)
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8)""",
    )


def order(**options: Any) -> str:
    report = report_of(**options)
    return f"forward\n{sequence(report.forward)}\nbackward\n{sequence(report.backward)}"


def test_passes_prefetch_distance_and_reductions_in_flight() -> None:
    serial = default_pipeline(prefetch=0, reductions_in_flight=1)
    assert_expected_inline(
        order(passes=serial),
        """\
forward
gather_blocks_0 full_blocks_0 free_blocks_0 gather_blocks_1 full_blocks_1 free_blocks_1 gather_root full_root
backward
free_root reduce_root gather_blocks_1 full_blocks_1 free_blocks_1 reduced_root reduce_blocks_1 gather_blocks_0
full_blocks_0 free_blocks_0 reduced_blocks_1 reduce_blocks_0 reduced_blocks_0""",
    )
    eager = default_pipeline(prefetch=2, reductions_in_flight=3)
    assert_expected_inline(
        order(passes=eager),
        """\
forward
gather_blocks_0 gather_blocks_1 full_blocks_0 gather_root free_blocks_0 full_blocks_1 free_blocks_1 full_root
backward
gather_blocks_1 gather_blocks_0 free_root reduce_root full_blocks_1 free_blocks_1 reduce_blocks_1 full_blocks_0
free_blocks_0 reduce_blocks_0 reduced_root reduced_blocks_1 reduced_blocks_0""",
    )


def test_dynamic_captures_one_graph_for_all_batch_sizes() -> None:
    for dynamic, graphs in ((True, 1), (False, 2)):
        model = graph_fsdp.compile(MLP(depth=1), backend="eager", dynamic=dynamic)
        with torch.no_grad():
            for rows in (3, 5):
                model(torch.randn(rows, 16))
        assert len(graph_fsdp.inspect(model).graphs) == graphs


def test_gradients_that_are_reduced_in_a_wider_type_are_reduced_one_bucket_at_a_time() -> None:
    def under_way(reduce_dtype: torch.dtype | None) -> list[str]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        words = sequence(report_of(mp_policy=policy).backward).split()
        return [word for word in words if word.startswith("reduce")]

    assert under_way(torch.bfloat16)[:3] == ["reduce_root", "reduce_blocks_1", "reduced_root"]
    assert_expected_inline(
        " ".join(under_way(torch.float32)),
        """reduce_root reduced_root reduce_blocks_1 reduced_blocks_1 reduce_blocks_0 reduced_blocks_0""",
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
        bucket_tables(report),
        """\
forward
root gather 1 512
blocks.0 gather 4 5,120
blocks.1 gather 4 5,120
root#1 gather 2 1,024 kept
backward
root#1 kept 2 1,024
blocks.1 gather 4 5,120
root#1 reduce 2 68
blocks.0 gather 4 5,120
blocks.1 reduce 4 536
blocks.0 reduce 4 536
root reduce 1 4""",
    )
