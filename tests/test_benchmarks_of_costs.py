"""Benchmarks of kernels, of the host's time and of low precision measure what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from models import MLP
from test_benchmarks import benchmark


@pytest.mark.long
def test_kernel_count_finds_the_same_products_in_every_form_and_the_executors_copies_in_one() -> None:
    kernel_count = benchmark("kernel_count")
    counts, _ = kernel_count.measure("mlp", MLP, (torch.ones(4, 16),))
    rows = {(row.phase, row.form): row for row in counts}
    assert set(rows) == {(phase, form) for phase in ("forward", "backward") for form in kernel_count.FORMS}
    for phase, products in (("forward", 5), ("backward", 9)):  # five layers, and the input needs no gradient
        cut, whole, local = (rows[phase, form] for form in kernel_count.FORMS)
        assert cut.products == whole.products == local.products == products
        assert cut.regions > whole.regions == local.regions == 1
        assert cut.packing_bytes > 0 and local.packing_bytes < cut.packing_bytes
        assert all(row.kernels > 0 and row.kernel_bytes > 0 and row.functions > 0 for row in (cut, whole, local))
    # Three buckets of one message each, cast nowhere: what their gathers receive is read once and written once.
    assert rows["forward", "cut"].packing_bytes == 2 * 4 * kernel_count.WORLD_SIZE * (160 + 160 + 32)


@pytest.mark.long
def test_host_time_measures_each_piece_of_work_of_each_implementation(tmp_path: Path) -> None:
    arguments = ["--parameters", "8", "--implementations", "fsdp2", "ours_eager", "--rounds", "2", "--warm-up", "1"]
    result = benchmark("host_time").main([*arguments, "--save", str(tmp_path / "host_time.json")])
    assert json.loads((tmp_path / "host_time.json").read_text()) == result
    for name, more in (("fsdp2", set[str]()), ("ours_eager", {"distributed"})):
        kinds = result["seconds"]["8"][name]
        assert {*kinds} == {"step", "accumulation", "evaluation", "optimizer"} | more
        assert all(len(quartiles) == 3 and min(quartiles) >= 0 for quartiles in kinds.values())


@pytest.mark.long
def test_host_places_are_all_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    # A second of steps, in which some kernels look at the stack every 4 ms: calls of the group take a fifteenth of it.
    found = benchmark("host_places").main(["--parameters", "8", "--implementation", "ours_eager", "--times", "1000"])
    assert sum(found.values()) == pytest.approx(1)
    assert "calls of the process group" in found
    assert "µs per layer" in capsys.readouterr().out


def test_the_cost_of_a_monitor_is_a_part_of_the_step() -> None:
    ((mine),) = benchmark("monitor_overhead").main(["--layers=1", "--width=16", "--steps=4", "--every=2"])
    assert 0 < mine["microseconds"] < mine["step milliseconds"] * 1e3
    assert mine["share"] == pytest.approx(mine["microseconds"] / mine["step milliseconds"] / 1e3)


def run_low_precision(folder: str) -> int:
    small = ["--steps=2", "--layers=1", "--width=16", "--heads=2", "--length=8", "--batch=2", "--device=cpu"]
    code: int = benchmark("low_precision").main([*small, "--results", folder])
    return code


@pytest.mark.long
def test_low_precision_trains_every_case_from_the_same_weights(tmp_path: Path) -> None:
    assert run_ranks(run_low_precision, 2, str(tmp_path)) == [0, 0]
    cases = json.loads((tmp_path / "low_precision.json").read_text())["cases"]
    assert len({case["losses"][0] for case in cases.values()}) == 1
    assert cases["float32"]["errors"] == [0, 0] < cases["int8"]["errors"]
    assert cases["int8"]["sent"] < cases["bfloat16"]["sent"]
