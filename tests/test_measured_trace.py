"""The measured schedule as a trace, beside the predicted one."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MLP
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp.profiling.profiling import typical
from graph_fsdp.report.report import engine_of
from graph_fsdp.report.trace_events import ALONE, COMPUTE, WAITED, slices_as_measured
from graph_fsdp.runtime.observe import Interval, ProgramRun
from graph_fsdp.runtime.regions.regions import Region, cut

pytestmark = pytest.mark.usefixtures("fake_group")

SHARED = ("graph", "region", "communication")  # what always is in both


def profiled(**options: Any) -> tuple[nn.Module, graph_fsdp.Profile]:
    model = graph_fsdp.compile(MLP(), backend="eager", **options)
    return model, graph_fsdp.profile(model, torch.ones(4, 16), steps=2, warmup=1)


@functools.cache
def profiled_once() -> tuple[nn.Module, graph_fsdp.Profile]:
    """For tests that only look at it."""
    return profiled()


def saved(save: Any, folder: Path, **options: Any) -> list[dict[str, Any]]:
    save(folder / "trace.json", **options)
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def slices(events: list[dict[str, Any]], *categories: str, process: int = 0) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and e["cat"] in categories and e["pid"] == process]


def lanes(events: list[dict[str, Any]], process: int = 0) -> dict[int, str]:
    found = [e for e in events if e["name"] == "thread_name" and e["pid"] == process]
    return {e["tid"]: e["args"]["name"] for e in found}


@pytest.mark.parametrize("mesh", [(8,), (2, 4)], ids=["shards", "replicas of shards"])
def test_lanes_and_names_are_those_of_the_predicted_trace(mesh: tuple[int, ...], tmp_path: Path) -> None:
    model, profile = profiled(mesh=init_device_mesh("cpu", mesh))
    measured = saved(profile.save_trace, tmp_path)
    predicted = saved(graph_fsdp.inspect(model).save_trace, tmp_path)
    assert lanes(measured) == lanes(predicted) and len(lanes(measured)) == 1 + len(mesh)
    for category in SHARED:
        # By lane: in each of them in order.
        found = [sorted(slices(events, category), key=lambda e: e["tid"]) for events in (measured, predicted)]
        named = [[(e["tid"], e["name"]) for e in events] for events in found]
        assert named[0] == named[1] and len(named[0]) >= 2
    exposed = [{e["name"] for e in slices(events, "exposed")} for events in (measured, predicted)]
    assert exposed[1] and exposed[1] <= exposed[0], "each wait is measured; that for nothing is not predicted"


def test_slices_lie_in_their_graph_and_lanes_are_in_order(tmp_path: Path) -> None:
    events = saved(profiled_once()[1].save_trace, tmp_path)
    forward, backward = slices(events, "graph")
    assert forward["name"] == "forward" and forward["ts"] == 0
    assert backward["name"] == "backward" and backward["ts"] >= forward["dur"]
    inside = slices(events, "region", "communication", "exposed")
    ends = {id(e): e["ts"] + e["dur"] for e in [forward, backward, *inside]}
    close = 1e-3  # of a microsecond: sums of floats
    for event in inside:
        assert any(
            g["ts"] - close <= event["ts"] and ends[id(event)] <= ends[id(g)] + close for g in (forward, backward)
        )
    for lane in lanes(events):
        row = sorted((e for e in inside if e["tid"] == lane), key=lambda e: e["ts"])
        assert all(ends[id(a)] <= b["ts"] + close for a, b in itertools.pairwise(row))


def test_both_can_be_in_one_file(tmp_path: Path) -> None:
    model, found = profiled_once()
    events = saved(found.save_trace, tmp_path, predicted=True)
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert titles == ["predicted on cpu", "measured, rank 0 of 8"] and lanes(events, 0) == lanes(events, 1)
    report = saved(graph_fsdp.inspect(model).save_trace, tmp_path)
    assert slices(events, *SHARED, "exposed", process=0) == slices(report, *SHARED, "exposed")
    alone = saved(found.save_trace, tmp_path)
    assert [{**e, "pid": 0} for e in slices(events, *SHARED, process=1)] == slices(alone, *SHARED)


def test_a_slice_of_a_collective_says_what_is_known_of_its_end(tmp_path: Path) -> None:
    events = saved(profiled_once()[1].save_trace, tmp_path)
    gather = next(e for e in slices(events, "communication") if e["name"] == "gather_blocks_0")
    assert gather["args"]["bucket"] == "blocks.0" and gather["args"]["bytes"] == 5120
    assert gather["args"]["alone_us"] > 0 and gather["args"]["end"] in (WAITED, ALONE)


def test_a_collective_ends_with_the_wait_for_it_or_when_it_would_by_itself() -> None:
    """A forward whose marks are given: the second gather was done early, the third was waited for."""
    model, _ = profiled_once()
    engine = engine_of(model)
    program = engine.programs[0, "forward"]
    steps = cut(program.graph)
    starts = [i for i, s in enumerate(steps) if not isinstance(s, Region) and f"plan_{i}" in program.constants]
    assert len(starts) == 3
    marks = [
        Interval("start", starts[0], 0.0, 0.1),
        Interval("start", starts[1], 0.1, 0.2),
        Interval("wait", starts[0], 0.2, 2.0),
        Interval("start", starts[2], 2.0, 2.1),
        Interval("wait", starts[1], 6.0, 6.1),
        Interval("wait", starts[2], 6.5, 9.0),
    ]
    alone = dict.fromkeys(((program, i) for i in starts), 1.5)
    found = slices_as_measured([ProgramRun(program, 0.0, 10.0, marks)], alone, engine.spec)
    drawn = [(s.begin, s.begin + s.seconds, s.args["end"]) for s in found if s.category == "communication"]
    assert drawn == [(0.0, 2.0, WAITED), (2.0, 3.5, ALONE), (3.5, 9.0, WAITED)]
    exposed = [value for s in found if s.category == "exposed" for value in (s.begin, s.seconds)]
    assert exposed == pytest.approx([0.2, 1.8, 6.0, 0.1, 6.5, 2.5])
    assert all(s.lane == COMPUTE for s in found if s.category != "communication")


def test_a_collective_ends_before_the_wait_for_one_behind_it_does() -> None:
    model, _ = profiled_once()
    engine = engine_of(model)
    program = engine.programs[0, "forward"]
    steps = cut(program.graph)
    first, second, _ = (
        i for i, s in enumerate(steps) if not isinstance(s, Region) and f"plan_{i}" in program.constants
    )
    marks = [
        Interval("start", first, 0.0, 0.1),
        Interval("start", second, 0.1, 0.2),
        Interval("wait", second, 0.3, 1.0),
        Interval("wait", first, 5.0, 5.1),
    ]
    alone = {(program, first): 4.0, (program, second): 0.5}
    found = slices_as_measured([ProgramRun(program, 0.0, 6.0, marks)], alone, engine.spec)
    ends = [s.begin + s.seconds for s in found if s.category == "communication"]
    assert ends == [1.0, 1.0]


def test_the_step_of_median_duration_is_drawn() -> None:
    model, _ = profiled_once()
    program = engine_of(model).programs[0, "forward"]
    steps = [[ProgramRun(program, 0.0, end, [])] for end in (5.0, 1.0, 3.0, 2.0)]
    assert typical(steps) is steps[3]
    assert typical(steps[:3]) is steps[2]


def test_a_profile_that_was_loaded_has_no_schedule(tmp_path: Path) -> None:
    _, found = profiled_once()
    found.save(tmp_path / "profile.json")
    with pytest.raises(LookupError, match="profile: it was loaded from a file, which has no schedule of a rank; save"):
        graph_fsdp.Profile.load(tmp_path / "profile.json").save_trace(tmp_path / "trace.json")
    with pytest.raises(FileNotFoundError, match=r"path: cannot be written .*name a file in a folder that exists"):
        found.save_trace(tmp_path / "no" / "trace.json")


# Predicted beside measured, as a table


def test_steps_and_waits_are_added_up_beside_what_is_predicted() -> None:
    model, found = profiled_once()
    report = graph_fsdp.inspect(model)
    timelines = [report.forward.timeline, report.backward.timeline]
    assert [(row.graph, row.phase) for row in found.graphs] == [(0, "forward"), (0, "backward")]
    assert [row.predicted_seconds for row in found.graphs] == [t.seconds for t in timelines if t is not None]
    exposed = [event.exposed for t in timelines if t is not None for event in t.events]
    assert [row.predicted_exposed_seconds for row in found.collectives] == exposed
    assert found.step_seconds == sum(row.seconds for row in found.graphs) > 0
    assert found.exposed_seconds == sum(row.exposed_seconds for row in found.collectives) > 0


def test_a_table_of_rich_has_a_row_for_each_graph_region_and_collective() -> None:
    _, found = profiled_once()
    table = found.table()
    assert table.row_count == len(found.graphs) + len(found.regions) + len(found.collectives)
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    row = next(row for row in found.collectives if row.bucket == "blocks.1")
    line = next(line for line in lines if "blocks.1" in line and "gather" in line)
    assert f"{row.seconds * 1e3:.3f}" in line and f"{row.exposed_seconds * 1e3:.3f}" in line and "5,120" in line


def test_the_regions_of_slow_ranks_are_listed_the_worst_first() -> None:
    _, found = profiled_once()
    slow = {0: 1.05, 1: 1.5, 2: 3.0}
    rows = [
        dataclasses.replace(row, seconds=1.0, slowest_rank=7, slowest_seconds=slow.get(i, 1.0))
        for i, row in enumerate(found.regions)
    ]
    ranked = dataclasses.replace(found, regions=rows)
    assert ranked.stragglers() == [rows[2], rows[1]]
    assert ranked.stragglers(above=2) == [rows[2]]
    assert ranked.stragglers(above=1) == [rows[2], rows[1], rows[0]]
    with pytest.raises(ValueError, match=r"above must be a factor, 1 or more, got 0\.5"):
        ranked.stragglers(0.5)
