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
    rows = json.loads((ROOT / "benchmarks" / "results" / "step_time.json").read_text())["rows"]
    by_name = {row["name"]: row for row in rows}
    peers = ("fsdp2_compiled", "ddp")
    times = [f"{by_name['ours']['ratio'][peer][1]:.2f}" for peer in peers]
    peaks = [f"{by_name['ours']['peak_bytes'] / by_name[peer]['peak_bytes']:.2f}" for peer in peers]
    found = re.findall(r"^\| (time of a step|peak memory), relative to \| (\S+) \| (\S+) \|$", README, re.MULTILINE)
    assert found == [("time of a step", *times), ("peak memory", *peaks)]
