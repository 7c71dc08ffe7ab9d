"""The cost model's clock on real graphs, and that the schedule pass computes with the same one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from models import GPT, MLP

from graph_fsdp.passes import Hardware, Link, Role, default_pipeline, find_hardware, memory_profile, simulate
from graph_fsdp.passes.transforms.schedule import Segments, at_distance
from graph_fsdp.planning import Traced, trace

SLOW = Hardware(
    **{**vars(find_hardware("h100")), "name": "slow link", "intra": Link(1e8, 1e-6), "inter": Link(1e8, 1e-6)}
)


@functools.cache
def traced(**options: Any) -> Traced:
    """One for all tests that only look at it."""
    passes = default_pipeline(hardware=SLOW, **options)
    return trace(
        lambda: MLP(depth=4), (torch.empty(4, 16),), world_size=8, loss=torch.sum, passes=passes,
        reshard_after_forward=True,
    )  # fmt: skip


def seconds(trace: Traced) -> list[float]:
    assert trace.context.cost is not None
    return [simulate(graph, trace.context.cost).seconds for graph in (trace.forward, trace.backward)]


@pytest.mark.parametrize("distance", [1, 3])
def test_the_schedule_pass_computes_with_the_clock_of_simulate(distance: int) -> None:
    serial, ahead = traced(prefetch=0), traced(prefetch=distance)
    assert serial.context.cost is not None
    starts = serial.forward.with_role(Role.GATHER_START)
    taken = serial.context.cost.graph_seconds(serial.forward)
    segments = Segments.of(serial.forward.nodes, starts, serial.context.cost, taken)
    predicted = segments.seconds(at_distance(len(starts), distance))
    assert predicted == pytest.approx(seconds(ahead)[0], rel=1e-9)
    assert segments.seconds(list(range(len(starts)))) == pytest.approx(seconds(serial)[0], rel=1e-9)
    assert seconds(ahead)[0] < seconds(serial)[0]


def test_a_timeline_adds_up() -> None:
    for options in ({}, {"prefetch": 0, "reductions_in_flight": 1}, {"prefetch": 3}):
        plan = traced(**options)
        assert plan.context.cost is not None
        for graph in (plan.forward, plan.backward):
            timeline = simulate(graph, plan.context.cost)
            assert timeline.seconds >= timeline.bound > 0
            assert timeline.seconds == pytest.approx(timeline.compute + timeline.exposed)
            waited = sum(event.exposed for event in timeline.events)
            tail = max(event.end for event in timeline.events) - max(timeline.starts.values())
            assert timeline.exposed == pytest.approx(waited + max(0.0, tail), abs=1e-12)
            lanes: dict[str, float] = {}
            for event in timeline.events:
                assert event.begin >= max(lanes.get(event.group, 0.0), timeline.starts[event.node])
                lanes[event.group] = event.end


def most_gathered(plan: Traced) -> int:
    return max(memory_profile(graph, plan.context).peak_gathered for graph in (plan.forward, plan.backward))


@pytest.mark.parametrize(
    "hardware",
    [pytest.param("h100", marks=pytest.mark.long), pytest.param("cpu", marks=pytest.mark.long), SLOW],
    ids=["h100", "cpu", "slow link"],
)
def test_automatic_prefetch_is_never_slower_than_one_ahead_nor_holds_more(hardware: str | Hardware) -> None:
    """Where there is no memory that is not missed."""
    hardware = dataclasses.replace(find_hardware(hardware), memory=1)
    tokens = torch.empty(2, 8, dtype=torch.int64)
    for model, inputs in ((lambda: MLP(depth=4), torch.empty(4, 16)), (lambda: GPT(depth=4), tokens)):
        plans = [
            trace(
                model, (inputs,), world_size=8, loss=torch.sum, passes=default_pipeline(prefetch=p, hardware=hardware)
            )
            for p in (1, "auto")
        ]
        one_ahead, automatic = (sum(seconds(plan)) for plan in plans)
        assert automatic <= one_ahead * 1.002
        assert most_gathered(plans[1]) <= most_gathered(plans[0])
