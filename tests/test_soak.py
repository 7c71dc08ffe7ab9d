"""Short runs of ``benchmarks/soak.py``, many models in one process one after the other, and ``soak_with_faults.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soak
import soak_with_faults


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_nothing_grows_from_model_to_model(tmp_path: Path) -> None:
    run = "--steps 18 --processes 1 --restart-every 6 --evaluate-every 3 --save-every 3 --sample-every 3 --layers 1"
    assert soak.main([*run.split(), "--results", str(tmp_path), "--images", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "soak.json").read_text())["rows"]
    assert len(rows) == 2
    assert all(row["graphs_of_first_model"] == row["graphs_of_any_model"] == 3 for row in rows)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_with_faults_has_the_losses_of_one_without(tmp_path: Path) -> None:
    run = [
        "--kinds",
        "killed",
        "full disk",
        "NaN",
        "--steps",
        "80",
        "--every",
        "20",
        "--save-every",
        "8",
        "--layers",
        "1",
    ]
    folders = ["--results", str(tmp_path), "--images", str(tmp_path)]
    assert soak_with_faults.main([*run, "--sample-every", "8", "--warm-up", "1000", *folders]) == 0
    result = json.loads((tmp_path / "soak_with_faults.json").read_text())
    assert [(row["fault"], row["times"], row["struck"], row["named"]) for row in result["rows"]] == [
        ("killed", 1, 1, 1),
        ("full disk", 1, 1, 1),
        ("NaN", 1, 1, 1),
    ]
    assert result["steps_run_again"] > 0 and result["losses_differ"] == result["losses_missing"] == 0


def test_what_went_wrong_in_a_run_with_faults_is_said() -> None:
    growth = {f"{what}_{when}": 0.0 for what in ("resident", "files", "threads") for when in ("within", "between")}
    good = {
        "rows": [{"fault": "killed", "times": 2, "struck": 2, "named": 2}],
        **{"losses_differ": 0, "losses_missing": 0, "changed_again": 0, "left_behind": []},
        **{"growth": growth, "growth_without_faults": growth},
    }
    assert soak_with_faults.complaints_of(good) == []
    for name, wrong, said in (
        ("rows", [{"fault": "killed", "times": 2, "struck": 2, "named": 1}], "named 1 of 2 times"),
        ("losses_differ", 1, "1 losses differ"),
        ("losses_missing", 1, "1 steps have no loss"),
        ("changed_again", 1, "1 steps had another loss"),
        ("left_behind", ["step_3.part"], "files are left behind"),
        ("growth", {**growth, "resident_within": 0.04}, "resident memory, within"),
        ("growth_without_faults", {**growth, "files_between": 1}, "growth_without_faults: files"),
    ):
        (complaint,) = soak_with_faults.complaints_of({**good, name: wrong})
        assert said in complaint
