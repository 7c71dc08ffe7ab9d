"""The examples do what they say, on one process and on two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launch import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import custom_schedule  # noqa: E402


def test_a_custom_schedule_moves_the_collectives_and_changes_no_number() -> None:
    of_ranks = run_ranks(custom_schedule.compare, 2, 3)
    for default, ours in of_ranks:
        assert len(ours.losses) == 3
        assert ours.losses == default.losses, "bit for bit"
        for phase in ("forward", "backward"):
            before, after = default.starts[phase], ours.starts[phase]
            assert {entry[:2] for entry in before} == {entry[:2] for entry in after}, "the same collectives"
            moved = [name for kind, name, at in after if kind == "gather" and (kind, name, at) not in before]
            assert {"blocks.0", "blocks.2"} <= set(moved)
    (default, ours), (default_there, ours_there) = of_ranks
    assert (default.starts, ours.starts) == (default_there.starts, ours_there.starts), "ranks agree"
    assert default.losses != default_there.losses, "each rank has its own batches"
    assert "prefetch" in default.report and "halfway_through" in ours.report
    assert "ms of it only communication" in ours.report and "most bytes gathered at once: " in ours.report


def test_a_custom_schedule_runs_alone() -> None:
    command = [sys.executable, str(EXAMPLES / "custom_schedule.py"), "--steps", "1"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("nothing to gather or reduce on one rank") == 4
    assert finished.stdout.count("predicted: ") == 4
