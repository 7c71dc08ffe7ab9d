"""``benchmarks/xla_step_time.py`` on models that take no time: it runs, compares losses, and makes a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from xla_launch import ENVIRONMENT

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

TINY = ["--layers", "1", "--width", "16", "--heads", "4", "--vocab", "32", "--batch", "1", "--length", "8"]
SHORT = ["--rounds", "1", "--steps", "1"]


def test_a_llama_is_measured_and_its_table_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import update_docs
    import xla_step_time
    from xla_step_time import IMPLEMENTATIONS

    monkeypatch.setenv("XLA_FLAGS", ENVIRONMENT["XLA_FLAGS"])
    arguments = ["--model", "llama", "--name", "tiny", "--repeats", "0", *TINY, *SHORT]
    assert xla_step_time.main([*arguments, "--results", str(tmp_path), "--images", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "tiny.json").read_text())
    assert [row["name"] for row in result["rows"]] == list(IMPLEMENTATIONS)
    assert result["loss"]["steps"] == 6
    assert all(len(row["rounds"]) == 1 and row["rounds"][0] > 0 for row in result["rows"])
    page = update_docs.section(tmp_path / "tiny.json")
    assert "python benchmarks/xla_step_time.py --model llama --name tiny --repeats 0" in page
    assert all(f"| {name} |" in page for name in IMPLEMENTATIONS), page


def test_losses_that_differ_are_a_failure() -> None:
    from harness import Disagreement
    from xla_step_time import check_losses

    assert check_losses({"local": [3.0, 2.0], "ours": [3.0, 2.00001]}) == pytest.approx(5e-6)
    with pytest.raises(Disagreement, match=r"ours does not train .*: loss 2\.1 instead of 2 at step 1"):
        check_losses({"local": [3.0, 2.0], "ours": [3.0, 2.1]})
