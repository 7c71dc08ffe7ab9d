"""The predicted schedule as a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fake_process_group
from models import MLP

import graph_fsdp
from graph_fsdp.report.report import GraphReport


def step(**options: Any) -> GraphReport:
    model = graph_fsdp.compile(MLP(), backend="eager", **options)
    model(torch.ones(4, 16)).sum().backward()
    return graph_fsdp.inspect(model)


@pytest.fixture(scope="module")
def report() -> GraphReport:
    with fake_process_group():
        return step()


def trace_of(report: GraphReport, folder: Path) -> dict[str, Any]:
    path = folder / "trace.json"
    report.save_trace(path)
    return json.loads(path.read_text())


def slices(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


def test_lanes_and_slices_are_those_of_the_timelines(report: GraphReport, tmp_path: Path) -> None:
    trace = trace_of(report, tmp_path)
    timelines = [view.timeline for view in (report.forward, report.backward)]
    assert all(timeline is not None for timeline in timelines)
    graphs = slices(trace, "graph")
    assert [graph["name"] for graph in graphs] == ["forward", "backward"]
    assert graphs[1]["ts"] == pytest.approx(graphs[0]["dur"])  # one after the other
    for timeline, graph in zip(timelines, graphs, strict=True):
        inside = [e for c in ("compute", "communication", "exposed") for e in slices(trace, c)]
        inside = [e for e in inside if graph["ts"] <= e["ts"] < graph["ts"] + graph["dur"]]
        total = {c: sum(e["dur"] for e in inside if e["cat"] == c) for c in ("compute", "communication", "exposed")}
        assert total["compute"] == pytest.approx(timeline.compute * 1e6)
        assert total["communication"] == pytest.approx(sum(e.end - e.begin for e in timeline.events) * 1e6)
        assert total["exposed"] == pytest.approx(sum(e.exposed for e in timeline.events) * 1e6)
    assert [event["name"] for event in slices(trace, "communication")] == [
        event.node.name for timeline in timelines for event in timeline.events
    ]


def test_slices_say_what_they_are(report: GraphReport, tmp_path: Path) -> None:
    trace = trace_of(report, tmp_path)
    gather = next(e for e in slices(trace, "communication") if e["name"] == "gather_blocks_0")
    assert gather["args"]["bucket"] == gather["args"]["unit"] == "blocks.0" and gather["args"]["bytes"] == 5120
    assert gather["args"]["parameters"].split(", ")[0] == "blocks.0.up.weight"
    product = next(e for e in slices(trace, "compute") if e["name"] == "addmm")
    assert product["args"]["module"] == "blocks.0.up" and product["args"]["operator"] == "aten.addmm.default"
    assert "self.up(x)" in product["args"]["code"]
    threads = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert threads == ["compute", "communication"]


def test_counters_are_the_memory_model(report: GraphReport, tmp_path: Path) -> None:
    counters = [e["args"] for e in trace_of(report, tmp_path)["traceEvents"] if e["ph"] == "C"]
    peaks = [view.memory.peak for view in (report.forward, report.backward) if view.memory is not None]
    assert max(sum(values.values()) for values in counters) == max(peaks)


def test_replicas_have_lanes_of_their_own(fake_group: None, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    trace = trace_of(step(mesh=mesh), tmp_path)
    assert len({e["tid"] for e in slices(trace, "communication")}) == 2


def test_a_model_that_only_ran_without_gradients(fake_group: None, tmp_path: Path) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    with torch.no_grad():
        model(torch.ones(4, 16))
    trace = trace_of(graph_fsdp.inspect(model), tmp_path)
    assert [graph["name"] for graph in slices(trace, "graph")] == ["inference"]


def test_bad_input(fake_group: None, report: GraphReport, tmp_path: Path) -> None:
    model = graph_fsdp.compile(MLP(depth=1), backend="eager")
    with pytest.raises(LookupError, match="no graph was captured yet; run the model once"):
        graph_fsdp.inspect(model).save_trace(tmp_path / "trace.json")
    with pytest.raises(FileNotFoundError, match=r"path: cannot be written .*name a file in a folder that exists"):
        report.save_trace(tmp_path / "no" / "trace.json")
