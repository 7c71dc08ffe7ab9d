"""Ranges in torch.profiler's timeline, named by what ran, unit and phase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fake_process_group
from expecttest import assert_expected_inline
from marks import fake_reductions
from models import MLP
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

import graph_fsdp
from graph_fsdp.runtime import executor, observe

BATCH = torch.ones(4, 16)


def compiled(**options: Any) -> nn.Module:
    model = graph_fsdp.compile(MLP(), **{"backend": "eager", **options})
    step(model)
    return model


def step(model: nn.Module) -> None:
    model(BATCH).sum().backward()


def recorded(model: nn.Module) -> torch_profile:
    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model)
    return profiler


def names(profiler: torch_profile) -> list[str]:
    events = [event for event in profiler.events() if event.name.startswith("FSDP::")]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


@pytest.fixture(scope="module")
def profiler() -> torch_profile:
    """Of a step."""
    with fake_process_group():
        return recorded(compiled())


def test_a_step_is_a_range_per_region_start_and_wait_in_the_order_of_the_program(profiler: torch_profile) -> None:
    assert_expected_inline(
        "\n".join(names(profiler)),
        """\
FSDP::forward
FSDP::gather blocks.0 (forward)
FSDP::wait gather blocks.0 (forward)
FSDP::gather blocks.1 (forward)
FSDP::compute blocks.0 (forward)
FSDP::wait gather blocks.1 (forward)
FSDP::gather root (forward)
FSDP::compute blocks.1 (forward)
FSDP::wait gather root (forward)
FSDP::compute root (forward)
FSDP::backward
FSDP::gather blocks.1 (backward)
FSDP::compute root (backward)
FSDP::reduce root (backward)
FSDP::wait gather blocks.1 (backward)
FSDP::gather blocks.0 (backward)
FSDP::compute blocks.1 (backward)
FSDP::reduce blocks.1 (backward)
FSDP::wait gather blocks.0 (backward)
FSDP::compute blocks.0 (backward)
FSDP::wait reduce root (backward)
FSDP::reduce blocks.0 (backward)
FSDP::wait reduce blocks.1 (backward)
FSDP::wait reduce blocks.0 (backward)""",
    )


def test_a_run_that_nobody_records_runs_the_programs_own_function(
    fake_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compiled()
    made: list[object] = []
    monkeypatch.setattr(executor, "observed", lambda *given: made.append(given))
    step(model)
    assert observe.recording() is None and not made
    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert observe.recording() is not None
    assert observe.recording() is None and not names(profiler)


def test_operators_lie_in_the_ranges_of_their_units(profiler: torch_profile) -> None:
    found = [
        (event.name, child.name)
        for event in profiler.events()
        if event.name.startswith("FSDP::compute")
        for child in event.cpu_children
        if child.name in ("aten::addmm", "aten::mm")
    ]
    assert found.count(("FSDP::compute blocks.0 (forward)", "aten::addmm")) == 2
    assert {name for name, _ in found} == {
        f"FSDP::compute {unit} ({phase})"
        for unit in ("blocks.0", "blocks.1", "root")
        for phase in ("forward", "backward")
    }


def test_a_trace_that_torch_exports_has_them(profiler: torch_profile, tmp_path: Path) -> None:
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    exported = [event for event in events if event.get("ph") == "X" and event["name"].startswith("FSDP::")]
    assert sorted(event["name"] for event in exported) == sorted(names(profiler))
    assert {event["cat"] for event in exported} == {"user_annotation"}


@fake_reductions
def test_gradients_are_the_same_bits_when_recorded(fake_group: None) -> None:
    def gradients(record: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = compiled()
        model.zero_grad()
        if record:
            recorded(model)
        else:
            step(model)
        return [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]

    plain, ranged = gradients(False), gradients(True)
    assert plain and all(torch.equal(a, b) for a, b in zip(plain, ranged, strict=True))


def test_reductions_over_replicas_and_copies_from_the_cpu_have_ranges(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    assert "FSDP::reduce over replicas blocks.0 (backward)" in names(recorded(compiled(mesh=mesh)))
    offloaded = names(recorded(compiled(offload_policy=CPUOffloadPolicy(pin_memory=False))))
    assert "FSDP::fetch blocks.0 (forward)" in offloaded and "FSDP::wait offload blocks.0 (backward)" in offloaded


def test_an_inference_graph_says_so(fake_group: None) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager").eval()
    with torch.no_grad():
        model(BATCH)
        with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(BATCH)
    assert names(profiler)[0] == "FSDP::inference" and "FSDP::compute blocks.0 (inference)" in names(profiler)


@pytest.mark.long
def test_a_graph_that_is_compiled_whole_is_one_range(fake_group: None) -> None:
    assert names(recorded(compiled(backend="inductor", regions="whole"))) == ["FSDP::forward", "FSDP::backward"]


def test_under_nsys_each_range_is_pushed_and_popped(fake_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NVTX, which this torch may be built without, what is called."""
    model, calls = compiled(), []
    expected = names(recorded(model))
    monkeypatch.setattr(observe, "_UNDER_NSYS", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    step(model)
    assert [name for name in calls if name != "pop"] == expected
    assert calls.count("pop") == len(expected) and calls[:3] == [*expected[:2], "pop"]
    profiled = recorded(model)  # a profiler of torch makes the ranges then, once
    assert names(profiled) == expected and len(calls) == 2 * len(expected)
