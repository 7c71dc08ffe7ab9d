"""The README is short, and the figures in it are those of the benchmarks' results."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MOST_LINES = 90


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_its_figures_are_the_results() -> None:
    results = ROOT / "benchmarks" / "results"
    rows = {row["name"]: row for row in json.loads((results / "step_time.json").read_text())["rows"]}
    peers = ("fsdp2_compiled", "ddp")
    times = [rows["ours"]["ratio"][peer][1] for peer in peers]
    peaks = [rows["ours"]["peak_bytes"] / rows[peer]["peak_bytes"] for peer in peers]
    on_a_gpu = json.loads((results / "gpu_speed.json").read_text())["checks"]["steps_of_a_simulated_cluster"]["figures"]
    clusters = [on_a_gpu[link]["ratios"] for link in ("nvlink", "infiniband")]
    times += [ratios["step_s"] for ratios in clusters]
    peaks += [ratios["peak_bytes"] for ratios in clusters]
    found = re.findall(r"^\| (time of a step|peak memory), relative to \| (.+) \|$", README, re.MULTILINE)
    expected = {"time of a step": times, "peak memory": peaks}
    assert found == [(name, " | ".join(f"{x:.2f}" for x in values)) for name, values in expected.items()]
