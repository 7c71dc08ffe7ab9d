"""What ``benchmarks/virtual_cluster.py`` says of a step on a cluster's links, on the virtual device."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import warnings

import pytest
import torch
import virtual_cluster
from both_devices import LINK, RANKS
from facts import Facts
from models import MLP
from simple_fsdp import shard_parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from virtual import library
from virtual.compiled import backend
from virtual.floor import johnson
from virtual.group import virtual_group
from virtual.machine import Machine
from virtual.replay import seconds_under
from virtual_cluster import GPT, GPTConfig

from graph_fsdp.passes import HARDWARE
from graph_fsdp.passes.analysis.simulate import Conditions

pytestmark = pytest.mark.skipif(library.COMPILER is None, reason="needs a C++ compiler")
FACTS = Facts(__name__)


@FACTS
def a_step_is_played_again_under_conditions() -> None:
    """A GPT of Llama-3-8B's width on 8 H100s: what ``benchmarks/virtual_cluster.py`` says of it."""
    hardware, workload = HARDWARE["h100"], virtual_cluster.Workload("gpt", layers=2, length=2048)
    rows = {}
    for name in ("ours", "fsdp2_compiled", "fsdp2"):
        rows[name], machine = virtual_cluster.measure(name, workload, 8, hardware)
        operations = machine.operations
        assert rows[name].disturbed_s == pytest.approx(rows[name].step_s, rel=1e-3), name
        slower, shared = (Conditions(straggler=1.5), Conditions(contention=True))
        assert 1.02 < seconds_under(slower, operations, hardware) / rows[name].step_s < 1.5
        assert 1.02 < seconds_under(shared, operations, hardware) / rows[name].step_s < 1.2
    ours, compiled, eager = rows.values()
    assert ours.step_s < 0.95 * compiled.step_s < 0.95 * eager.step_s
    assert ours.predicted_s == pytest.approx(ours.graphs_s, rel=0.03)
    assert all(row.step_s >= 0.999 * row.bound_s for row in rows.values())
    assert ours.bound_s < ours.floor_s < ours.step_s < 1.1 * ours.floor_s
    longer = dataclasses.replace(workload, length=8192)
    computing, _ = virtual_cluster.measure("ours", longer, 8, hardware)
    assert computing.bound_s == computing.compute_s and computing.step_s < 1.05 * computing.bound_s
    counted, _ = virtual_cluster.measure("ours", workload, 8, hardware, host="counted")
    assert counted.step_s > ours.step_s
    assert counted.compute_s == pytest.approx(ours.compute_s), (counted, ours)


@FACTS
def a_line_of_json_says_what_a_case_takes() -> None:
    case = ["--sizes", "gpt", "--layers", "1", "--lengths", "256", "--ranks", "8"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        virtual_cluster.main(["--json", *case, "--implementations", "ours", "fsdp2"])
    lines = [json.loads(line) for line in printed.getvalue().splitlines()]  # nothing else is printed
    assert [line["implementation"] for line in lines] == ["ours", "fsdp2"]
    for line in lines:
        assert (line["model"], line["ranks"], line["host"]) == ("gpt", 8, "zero")
        assert line["bound_ms"] == max(line["compute_ms"], line["link_ms"]) > 0
        assert line["exposed_ms"] == pytest.approx(line["step_ms"] - line["compute_ms"], abs=1e-3)
        assert line["step_ms"] >= line["bound_ms"]


@FACTS
def simple_fsdp_waits_for_each_collective_where_it_starts_it() -> None:
    """What it computes between two collectives is compiled; each parameter is gathered twice and reduced once."""
    workload = virtual_cluster.Workload("gpt", layers=1, length=2048)
    row, machine = virtual_cluster.measure("simple_fsdp", workload, 8, HARDWARE["h100"])
    names = [operation.operator for operation in machine.operations or ()]
    with torch.device("meta"):
        count = len(list(GPT(GPTConfig(50304, 1, 4096, 32, 2048)).parameters()))
    assert names.count("reduce_scatter") == count <= names.count("all_gather") <= 2 * count
    assert "compiled forward" in names and not any(name.startswith("aten.mm") for name in names)
    assert row.step_s == pytest.approx(row.compute_s + row.link_s, rel=1e-3)
    ours, _ = virtual_cluster.measure("ours", workload, 8, HARDWARE["h100"])
    assert ours.step_s < row.step_s and row.floor_s is None


@FACTS
def graphs_with_collectives_compute_what_they_compute_eagerly() -> None:
    def train(compiled: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with Machine("h100"), virtual_group(RANKS, LINK), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = MLP(depth=2).to("virtual")
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            shard_parameters(model, init_device_mesh("virtual", (RANKS,)), policy, reshard=True)
            run = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
            run(torch.ones(4, 16, device="virtual")).square().mean().backward()
            return [p.grad.to_local().cpu() for p in model.parameters()]

    found, expected = train(True), train(False)
    torch.testing.assert_close(found, expected)
    assert any(grad.any() for grad in expected)


def test_johnsons_order_is_the_best_of_all() -> None:
    jobs = [(2.0, 3.0), (0.0, 1.0), (4.0, 1.0), (3.0, 3.0), (1.0, 5.0), (2.0, 0.0)]

    def seconds(order: tuple[tuple[float, float], ...]) -> float:
        computed = end = 0.0
        for compute, link in order:
            computed += compute
            end = max(end, computed) + link
        return end

    assert johnson(jobs) == min(map(seconds, itertools.permutations(jobs))) < seconds(tuple(jobs))


test_on_a_virtual_cluster = FACTS.in_a_fresh_process()
