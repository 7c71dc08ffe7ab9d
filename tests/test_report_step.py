"""A report predicts the whole step where ``distribute_optimizer`` has told which optimizers step the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from models import MLP
from torch import nn, optim

import graph_fsdp
from graph_fsdp.passes import default_pipeline, find_hardware
from graph_fsdp.passes.analysis.optimizers import optimizer_seconds

pytestmark = pytest.mark.usefixtures("fake_group")
H100 = find_hardware("h100")
RANKS, WIDTH = 8, 1024
UNITS = {nn.Linear}


def model_fn() -> nn.Module:
    return MLP(2, WIDTH)


def compiled(**options: Any) -> Any:
    options = {"backend": "eager", "auto_wrap_policy": UNITS, "passes": default_pipeline(hardware="h100"), **options}
    return graph_fsdp.compile(model_fn(), **options)


def ran(model: Any) -> Any:
    model(torch.ones(4, WIDTH)).sum().backward()
    return graph_fsdp.inspect(model)


def shards_nbytes(model: Any) -> int:
    return sum(p.shard_numel * p.dtype.itemsize for p in graph_fsdp.inspect(model).spec.parameters.values())


def test_the_report_prints_the_whole_step() -> None:
    model = compiled()
    graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters(), foreach=True), gather_ahead=1)
    report = ran(model)
    assert_expected_inline(
        "\n".join(str(report).splitlines()[-3:]),
        """\
step predicted on h100: 0.503 ms: forward 0.159, backward 0.291, optimizer 0.030; exposed communication 0.357
  AdamW (adamw_foreach) of 10 parameters, 4,201,476 bytes: 0.030 ms
  gathers beside it, for the next forward: blocks.0.up; 0.046 ms, of it exposed 0.024""",
    )


def test_its_optimizer_takes_what_the_plan_says() -> None:
    model = compiled()
    graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters(), fused=True))
    step = ran(model).step_predicted()
    inputs = (torch.ones(4, WIDTH, device="meta"),)
    options: Any = {"backend": "eager", "auto_wrap_policy": UNITS, "loss": torch.sum}
    planned = graph_fsdp.plan(model_fn, inputs, mesh_shape=(RANKS,), hardware="h100", **options)
    assert step.first == 0 and step.rest == planned.optimizer_seconds
    assert step.rest == optimizer_seconds("adamw", shards_nbytes(model), H100) > 0
    graphs = [planned.graph_seconds[phase] for phase in ("forward", "backward")]
    assert step.seconds == pytest.approx(sum(graphs) + planned.optimizer_seconds, rel=0.05)


def test_gathers_ahead_run_beside_what_is_left_to_step() -> None:
    model = compiled()
    optimizer = optim.AdamW(model.parameters(), fused=True)
    graph_fsdp.distribute_optimizer(optimizer, gather_ahead=1)
    few = ran(model).step_predicted()
    whole = optimizer_seconds("adamw", shards_nbytes(model), H100)
    assert 0 < few.first < whole and few.first + few.rest == pytest.approx(whole)
    assert list(few.ahead) == ["blocks.0.up"] and few.ahead["blocks.0.up"] > 0
    assert few.exposed_ahead == max(0.0, few.ahead["blocks.0.up"] - few.rest)
    graph_fsdp.distribute_optimizer(optimizer, gather_ahead=100)
    every = ran(model).step_predicted()
    assert len(every.ahead) == 5 and every.rest == pytest.approx(0)
    assert every.exposed_ahead == pytest.approx(sum(every.ahead.values())), "nothing is left to hide them"


def test_each_optimizer_has_a_row_and_none_is_left_out() -> None:
    model = compiled()
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert ran(model).step_predicted() is None and "step predicted" not in str(graph_fsdp.inspect(model))
    graph_fsdp.distribute_optimizer(optim.Muon(weights))
    groups = [{"params": biases[:1], "momentum": 0.0}, {"params": biases[1:]}]
    graph_fsdp.distribute_optimizer(optim.SGD(groups, lr=0.1, momentum=0.9, fused=True))
    rows = graph_fsdp.inspect(model).step_predicted().optimizers
    found = [(row.by.cls, row.by.known_as, len(row.parameters), row.seconds is not None) for row in rows]
    assert found == [("Muon", None, 5, False), ("SGD", "sgd", 1, True), ("SGD", "momentum", 4, True)]
    text = str(graph_fsdp.inspect(model))
    assert "step predicted on h100: at least" in text and "bytes: not predicted" in text


def test_files_and_traces_have_it(tmp_path: Path) -> None:
    model = compiled()
    graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters(), fused=True), gather_ahead=1)
    report = ran(model)
    step = report.step_predicted()
    report.save(tmp_path / "report.json")
    loaded = graph_fsdp.load_report(tmp_path / "report.json")
    assert str(loaded) == str(report) and step.lines()[0] in str(loaded)
    assert step.lines()[0] in loaded.to_html()
    report.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    backward, optimizer, gather = (slices[n] for n in ("backward", "optimizer", "gather_ahead blocks.0.up"))
    assert optimizer["ts"] == pytest.approx(backward["ts"] + backward["dur"])
    assert optimizer["dur"] == pytest.approx((step.first + step.rest) * 1e6)
    assert gather["ts"] == pytest.approx(optimizer["ts"] + step.first * 1e6)
    assert optimizer["tid"] == backward["tid"] != gather["tid"]
