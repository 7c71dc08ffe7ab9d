"""benchmarks/restart_time.py: what it makes of a restart's marks, and that it fails where a restart is not the training
that was killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import restart_time
from harness import Disagreement

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--vocab", "32", "--batch", "2", "--length", "8"]


def steps(at: float, *numbers: int) -> list[dict[str, Any]]:
    return [{"mark": "step", "at": at + n, "step": n, "loss": 1 / n, "cpu": 2.0} for n in numbers]


def restarted(loaded: int, step: int, at: float = 100.0) -> list[dict[str, Any]]:
    marks = [{"mark": name, "at": at + n} for n, name in enumerate(restart_time.MARKS[:4], 1)]
    return [*marks, {"mark": "loaded", "at": at + 5, "step": loaded}, *steps(at + 6 - step, step)]


def test_parts_of_a_restart() -> None:
    before = steps(0.0, *range(1, 9))
    late = steps(92.0, 9)  # the end of a step of the old process, after the kill of another
    found = restart_time.parts_of(100.0, before, [*before, *late, *restarted(5, 6)])
    assert found == {**dict.fromkeys(restart_time.PARTS, 1.0), "seconds": 6.0, "cpu_seconds": 2.0, "resumed_after": 5}


@pytest.mark.parametrize(("loaded", "step"), [(0, 6), (5, 7), (5, 9)])
def test_another_step_or_loss_is_an_error(loaded: int, step: int) -> None:
    before = steps(0.0, *range(1, 9))
    after = restarted(loaded, step)
    after[-1]["loss"] = 1 / 6
    with pytest.raises(Disagreement, match=f"went on after step {loaded}, not 5"):
        restart_time.parts_of(100.0, before, [*before, *after])


@pytest.mark.long
def test_a_host_is_killed_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Kernels without vectors and precompiled headers, which an empty folder is long without.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    assert restart_time.main([*TINY, "--rounds", "1", "--results", str(tmp_path), "--images", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "restart_time.json").read_text())["rows"]
    (found,) = row["rounds"]
    assert found["resumed_after"] in range(5, 100, 5), "a checkpoint that it had saved"
