"""A short run of ``benchmarks/soak.py``: many models in one process, one after the other, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soak


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_nothing_grows_from_model_to_model(tmp_path: Path) -> None:
    run = "--steps 18 --processes 1 --restart-every 6 --evaluate-every 3 --save-every 3 --sample-every 3 --layers 1"
    assert soak.main([*run.split(), "--results", str(tmp_path), "--images", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "soak.json").read_text())["rows"]
    assert len(rows) == 2
    assert all(row["graphs_of_first_model"] == row["graphs_of_any_model"] == 3 for row in rows)
