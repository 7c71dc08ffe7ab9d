"""What each option of ``default_pipeline`` changes in the printed program of a three-block MLP on 8 ranks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP
from printed import calls, events
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp.passes import Hardware, Link, Role, default_pipeline, find_hardware
from graph_fsdp.report.report import GraphReport

pytestmark = pytest.mark.usefixtures("fake_group_of_module")


def report_of(
    reshard: bool | str | None = True, model: MLP | None = None, depth: int = 3, **options: Any
) -> GraphReport:
    """After a step. Tests with the same options share one, but for models and hardware of their own."""
    if model is not None or "hardware" in options:
        return _step(model or MLP(depth=depth), reshard, **options)
    return _report(reshard, depth, tuple(sorted(options.items())))


@functools.cache
def _report(reshard: bool | str | None, depth: int, options: tuple[tuple[str, Any], ...]) -> GraphReport:
    return _step(MLP(depth=depth), reshard, **dict(options))


def _step(model: MLP, reshard: bool | str | None, **options: Any) -> GraphReport:
    passes = default_pipeline(**options)
    graph_fsdp.compile(model, backend="eager", passes=passes, reshard_after_forward=reshard)  # type: ignore[arg-type]
    model(torch.randn(4, 16)).sum().backward()
    return graph_fsdp.inspect(model)


def test_bucket_none_gathers_each_parameter() -> None:
    assert_expected_inline(
        events(report_of(bucket="none", depth=2)),
        """\
forward: >blocks.0.up.weight .blocks.0.up.weight >blocks.0.up.bias .blocks.0.up.bias >blocks.0.down.weight
    xblocks.0.up.weight xblocks.0.up.bias .blocks.0.down.weight >blocks.0.down.bias .blocks.0.down.bias
    >blocks.1.up.weight xblocks.0.down.weight xblocks.0.down.bias .blocks.1.up.weight >blocks.1.up.bias
    .blocks.1.up.bias >blocks.1.down.weight xblocks.1.up.weight xblocks.1.up.bias .blocks.1.down.weight
    >blocks.1.down.bias .blocks.1.down.bias >head.weight xblocks.1.down.weight xblocks.1.down.bias .head.weight
    >head.bias .head.bias xhead.weight xhead.bias
backward: >head.weight .head.weight >blocks.1.down.weight xhead.weight -head.bias -head.weight
    .blocks.1.down.weight >blocks.1.up.weight xblocks.1.down.weight -blocks.1.down.bias -blocks.1.down.weight
    .blocks.1.up.weight >blocks.0.down.weight xblocks.1.up.weight -blocks.1.up.bias -blocks.1.up.weight
    .blocks.0.down.weight xblocks.0.down.weight -blocks.0.down.bias -blocks.0.down.weight -blocks.0.up.bias
    -blocks.0.up.weight""",
    )


def test_bucket_of_a_size_divides_and_joins_units() -> None:
    assert_expected_inline(
        events(report_of(bucket=3000, depth=2)),
        """\
forward: >blocks.0 .blocks.0 >blocks.0#1 xblocks.0 .blocks.0#1 >blocks.1 xblocks.0#1 .blocks.1 >blocks.1#1
    xblocks.1 .blocks.1#1 >root xblocks.1#1 .root xroot
backward: >root .root >blocks.1#1 xroot -root .blocks.1#1 >blocks.1 xblocks.1#1 -blocks.1#1 .blocks.1 >blocks.0#1
    xblocks.1 -blocks.1 .blocks.0#1 xblocks.0#1 -blocks.0#1 -blocks.0""",
    )
    assert_expected_inline(
        events(report_of(bucket=11_000)),
        """\
forward: >blocks.0..blocks.1 .blocks.0..blocks.1 >blocks.2..root xblocks.0..blocks.1 .blocks.2..root
    xblocks.2..root
backward: >blocks.2..root .blocks.2..root >blocks.0..blocks.1 xblocks.2..root -blocks.2..root .blocks.0..blocks.1
    xblocks.0..blocks.1 -blocks.0..blocks.1""",
    )


def link(latency: float, bandwidth: float = 1e9) -> Hardware:
    """A processor with ``bandwidth`` bytes/s to its neighbours and ``latency`` seconds per step of a collective."""
    base = {**vars(find_hardware("cpu")), "island": 8, "collective_launch": 0.0}
    return Hardware(**{**base, "name": "a link", "intra": Link(bandwidth, latency)})


def overlapping(memory: int) -> Hardware:
    return dataclasses.replace(link(1e-7, 1e8), name="beside", overlaps=True, memory=memory)


class LongTail(MLP):
    """Computes long after its last parameter, while the link has nothing to do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for _ in range(40):
            x = (x @ x.t() @ x).tanh()
        return x


def test_gathers_start_further_ahead_where_that_is_faster_and_takes_memory_that_is_not_missed() -> None:
    little, plenty = (report_of(model=LongTail(depth=4), hardware=overlapping(m)) for m in (1 << 16, 1 << 24))
    # Of the head and four blocks, those that start before the head has arrived.
    first, more = (events(report, "backward").split(" .root ")[0] for report in (little, plenty))
    assert first == "backward: >root >blocks.3"
    assert more.startswith(f"{first} >blocks.2"), more
    one_ahead, further = (report.latest("backward").timeline for report in (little, plenty))
    assert one_ahead is not None and further is not None and further.seconds < 0.99 * one_ahead.seconds


class Full(LongTail):
    """Saves 16 MiB for backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + x.mean().expand(1 << 22).exp().mean()


def test_gathers_start_no_further_ahead_on_a_device_that_the_step_fills() -> None:
    """A twentieth of 16 MiB was enough for :class:`LongTail`."""
    filled, roomy = (report_of(model=Full(depth=4), hardware=overlapping(m)) for m in (1 << 24, 1 << 26))
    assert "backward: >root >blocks.3 .root " in events(filled, "backward")
    assert "backward: >root >blocks.3 >blocks.2" in events(roomy, "backward")
    first, more = (report.latest("backward").memory for report in (filled, roomy))
    assert first is not None and more is not None and first.peak_gathered < more.peak_gathered


def test_two_reductions_in_a_wider_type_are_under_way_in_memory_that_is_not_missed() -> None:
    def order(memory: int) -> str:
        model = MLP(depth=2)
        passes = default_pipeline(hardware=overlapping(memory))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        graph_fsdp.compile(model, backend="eager", passes=passes, mp_policy=policy)
        model(torch.randn(4, 16)).sum().backward()
        roles = {Role.REDUCE_START: "start", Role.REDUCE_WAIT: "wait"}
        graph = graph_fsdp.inspect(model).latest("backward").graph
        assert graph is not None
        return " ".join(roles[node.meta["fsdp"].role] for node in graph.with_role(*roles))

    assert_expected_inline(
        order(1 << 16),
        """start wait start wait start wait start wait start wait start wait""",
    )
    assert_expected_inline(
        order(1 << 24),
        """start start wait start wait start wait start wait start wait wait""",
    )


def test_bucket_auto_is_as_large_as_the_hardware_needs() -> None:
    assert_expected_inline(
        events(report_of(bucket="auto", hardware=link(3e-8)), "forward"),
        """\
forward: >blocks.0 >blocks.0#1 .blocks.0 .blocks.0#1 >blocks.0#2 >blocks.0#3 xblocks.0 xblocks.0#1 .blocks.0#2
    .blocks.0#3 >blocks.1 >blocks.1#1 xblocks.0#2 xblocks.0#3 .blocks.1 .blocks.1#1 >blocks.1#2 >blocks.1#3
    xblocks.1 xblocks.1#1 .blocks.1#2 .blocks.1#3 >blocks.2 >blocks.2#1 xblocks.1#2 xblocks.1#3 .blocks.2
    .blocks.2#1 >blocks.2#2 >blocks.2#3 xblocks.2 xblocks.2#1 .blocks.2#2 .blocks.2#3 >root xblocks.2#2 xblocks.2#3
    .root xroot""",
    )
    assert_expected_inline(
        events(report_of(bucket="auto", hardware=link(1e-3)), "forward"),
        """\
forward: >blocks.0 .blocks.0 >blocks.1 xblocks.0 .blocks.1 >blocks.2 xblocks.1 .blocks.2 >root xblocks.2 .root
    xroot""",
    )


def wide() -> MLP:
    model = MLP()
    model.blocks[0].up = torch.nn.Linear(16, 8192)
    model.blocks[0].down = torch.nn.Linear(8192, 16)
    return model


def test_messages_show_which_parameters_land_in_place() -> None:
    assert_expected_inline(
        calls(report_of(model=wide(), hardware=link(1e-6)).forward, "all_gather_start"),
        """\
gather_blocks_0 = all_gather_start([blocks.0.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8,
    messages=[0, 16384, 16384, 1024, 17408, 16384, 33792, 2])
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8,
    messages=[0, 64, 64, 4, 80, 64, 144, 2])
gather_root = all_gather_start([head.{weight, bias}], float32, world_size=8, messages=[0, 16, 16, 1])""",
    )


def test_messages_one_sends_each_bucket_whole() -> None:
    report = report_of(model=wide(), hardware=link(1e-6), messages="one")
    assert_expected_inline(
        calls(report.forward, "all_gather_start"),
        """\
gather_blocks_0 = all_gather_start([blocks.0.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
gather_root = all_gather_start([head.{weight, bias}], float32, world_size=8)""",
    )
    assert "messages" not in calls(report.backward, "reduce_scatter_start")
    whole = 4 * 8 * (2 * 16384 + 1024 + 16)  # padded
    assert report.graphs[0].views["forward"].memory.peak_landing == whole, "it is unpacked from where it lands"


def heavy_first_block() -> MLP:
    """Its first block computes for longer than all gathers take at 0.1 GB/s, the others for less than one of them."""
    model = MLP(depth=4)
    there, back = torch.ones(32, 16384), torch.ones(16384, 32)
    model.blocks[0].up.register_forward_hook(lambda _, args, y: y @ there @ back)
    return model


def test_prefetch_auto_starts_gathers_as_late_as_hides_them() -> None:
    # Gathers that take next to nothing: one unit ahead hides them, and holds least.
    assert_expected_inline(
        events(report_of(hardware=link(0.0, 1e15))),
        """\
forward: >blocks.0 .blocks.0 >blocks.1 xblocks.0 .blocks.1 >blocks.2 xblocks.1 .blocks.2 >root xblocks.2 .root
    xroot
backward: >root .root >blocks.2 xroot -root .blocks.2 >blocks.1 xblocks.2 -blocks.2 .blocks.1 >blocks.0 xblocks.1
    -blocks.1 .blocks.0 xblocks.0 -blocks.0""",
    )
    # With room for it the gathers run beside the first block, which computes for long; without, one unit ahead.
    slow = link(1e-7, 1e8)
    assert_expected_inline(
        events(report_of(model=heavy_first_block(), hardware=slow, budget=100_000)),
        """\
forward: >blocks.0 .blocks.0 >blocks.1 >blocks.2 >blocks.3 xblocks.0 .blocks.1 xblocks.1 .blocks.2 xblocks.2
    .blocks.3 >root xblocks.3 .root xroot
backward: >root >blocks.3 >blocks.2 >blocks.1 >blocks.0 .root xroot -root .blocks.3 xblocks.3 -blocks.3 .blocks.2
    xblocks.2 -blocks.2 .blocks.1 xblocks.1 -blocks.1 .blocks.0 xblocks.0 -blocks.0""",
    )
    within = report_of(model=heavy_first_block(), hardware=slow)
    assert within.peak_gathered_bytes == 2 * 5120
    assert_expected_inline(
        events(within),
        """\
forward: >blocks.0 .blocks.0 >blocks.1 xblocks.0 .blocks.1 >blocks.2 xblocks.1 .blocks.2 >blocks.3 xblocks.2
    .blocks.3 >root xblocks.3 .root xroot
backward: >root .root >blocks.3 xroot -root .blocks.3 >blocks.2 xblocks.3 -blocks.3 .blocks.2 >blocks.1 xblocks.2
    -blocks.2 .blocks.1 >blocks.0 xblocks.1 -blocks.1 .blocks.0 xblocks.0 -blocks.0""",
    )


def test_prefetch_takes_the_settings_of_fsdp1() -> None:
    assert_expected_inline(
        events(report_of(prefetch=BackwardPrefetch.BACKWARD_PRE), "backward"),
        """\
backward: >root .root >blocks.2 xroot -root .blocks.2 >blocks.1 xblocks.2 -blocks.2 .blocks.1 >blocks.0 xblocks.1
    -blocks.1 .blocks.0 xblocks.0 -blocks.0""",
    )
    assert_expected_inline(
        events(report_of(prefetch=BackwardPrefetch.BACKWARD_POST), "backward"),
        """\
backward: >root .root xroot >blocks.2 -root .blocks.2 xblocks.2 >blocks.1 -blocks.2 .blocks.1 xblocks.1 >blocks.0
    -blocks.1 .blocks.0 xblocks.0 -blocks.0""",
    )
    assert events(report_of(prefetch=None), "backward") == events(report_of(prefetch=0), "backward")


def test_backward_post_never_holds_two_buckets() -> None:
    post = report_of(prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=0)
    pre = report_of(prefetch=BackwardPrefetch.BACKWARD_PRE)
    assert post.peak_gathered_bytes == 5120
    assert pre.peak_gathered_bytes == 2 * 5120


def test_forward_prefetch_is_for_forward_alone() -> None:
    serial, ahead = report_of(prefetch=1, forward_prefetch=0), report_of(prefetch=1, forward_prefetch=2)
    assert events(serial, "forward") == events(report_of(prefetch=0), "forward")
    assert events(ahead, "forward") == events(report_of(prefetch=2), "forward")
    assert events(serial, "backward") == events(ahead, "backward") == events(report_of(prefetch=1), "backward")
    defaults = events(report_of(prefetch=BackwardPrefetch.BACKWARD_POST), "forward")
    assert defaults == events(report_of(prefetch=1), "forward")


def test_reshard_auto_keeps_what_the_budget_has_room_for() -> None:
    unit, head = 5120, 1024
    for budget, kept in (
        (unit, ["root"]),
        (2 * unit, ["blocks.2", "root"]),
        (3 * unit, ["blocks.1", "blocks.2", "root"]),
        (3 * unit + head, ["blocks.0", "blocks.1", "blocks.2", "root"]),
    ):
        report = report_of("auto", budget=budget)
        assert [row.name for row in report.forward.buckets if row.escapes] == kept
        assert report.peak_gathered_bytes <= budget
    assert_expected_inline(
        events(report_of("auto", budget=3 * unit + head)),
        """\
forward: >blocks.0 .blocks.0 >blocks.1 .blocks.1 >blocks.2 .blocks.2 >root .root
backward: xroot -root xblocks.2 -blocks.2 xblocks.1 -blocks.1 xblocks.0 -blocks.0""",
    )


def test_reshard_auto_without_a_budget_is_refused_before_anything_changes() -> None:
    model = MLP()
    with pytest.raises(ValueError, match=r"reshard_after_forward='auto'.*default_pipeline\(budget=…\)"):
        graph_fsdp.compile(model, reshard_after_forward="auto")
    with pytest.raises(ValueError, match=r"reshard_after_forward='auto'"):
        graph_fsdp.compile(model, reshard_after_forward="auto", passes=default_pipeline(prefetch=2))
    assert type(model) is MLP


@pytest.mark.parametrize("reshard", [False, 2, "auto"])
def test_an_option_that_no_pass_carries_out_is_refused_before_anything_changes(reshard: Any) -> None:
    model, passes = MLP(), default_pipeline(budget=10**6).remove("reshard")
    with pytest.raises(ValueError, match=f"reshard_after_forward={reshard!r} needs a pass that provides 'resharded'"):
        graph_fsdp.compile(model, reshard_after_forward=reshard, passes=passes)
    assert type(model) is MLP
    graph_fsdp.compile(model, reshard_after_forward=True, passes=passes)
    with pytest.raises(graph_fsdp.UnsupportedError, match="for a pass that provides 'resharded'"):
        model.set_reshard_after_forward(False)
    with pytest.raises(
        graph_fsdp.UnsupportedError, match=r"set_unshard_in_backward\(False\) is for a pass that provid"
    ):
        model.set_unshard_in_backward(False)
    model.set_reshard_after_forward(True)
    model.set_unshard_in_backward(True)


def test_prefetch_lists_that_no_pass_carries_out_are_refused() -> None:
    model = graph_fsdp.compile(MLP(), passes=default_pipeline().remove("prefetch"))
    with pytest.raises(graph_fsdp.UnsupportedError, match=r"set_modules_to_forward_prefetch\(\) is for the pass Pref"):
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    model.blocks[0].set_modules_to_forward_prefetch([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefetch": "soon"}, "prefetch must be 0 or more buckets or 'auto', got 'soon'"),
        ({"prefetch": True}, "prefetch must be 0 or more buckets or 'auto', got True"),
        ({"forward_prefetch": -2}, "forward_prefetch must be 0 or more buckets or 'auto', got -2"),
        ({"forward_prefetch": BackwardPrefetch.BACKWARD_PRE}, "forward_prefetch must be a number of buckets"),
        ({"delay_wgrad": -1}, "delay_wgrad must be 0 or more buckets or 'auto', got -1"),
        ({"budget": 0}, "budget must be a positive number of bytes or None, got 0"),
        ({"hardware": "h900"}, "h900"),
    ],
)
def test_settings_that_mean_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graph_fsdp.compile(MLP(), backend="eager", passes=default_pipeline(**arguments))


@pytest.mark.parametrize(
    ("name", "bandwidth", "options", "kept"),
    [
        ("h100", 1e7, {}, "blocks.2, root"),
        ("h100", 1e15, {}, "root"),
        ("cpu", 1e7, {}, "root"),
        ("h100", 1e7, {"budget": 100_000}, "root"),
    ],
)
def test_a_block_more_is_kept_where_backward_would_wait_for_it(
    name: str, bandwidth: float, options: dict[str, Any], kept: str
) -> None:
    given = {**vars(find_hardware(name)), "name": "given", "intra": Link(bandwidth, 0.0), "collective_launch": 0.0}
    found = report_of(reshard=None, hardware=Hardware(**given), **options)
    assert found.forward.stages["reshard"].summary.startswith(f"kept for backward: {kept};")
    gathered = [bucket for role, bucket in found.backward.graph.collectives if role == Role.GATHER_START.value]
    assert not set(kept.split(", ")) & set(gathered) and "blocks.1" in gathered
    again = report_of(reshard=True, hardware=Hardware(**given), **options)
    assert again.forward.stages["reshard"].summary.startswith("kept for backward: none")
