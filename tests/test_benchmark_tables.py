"""How benchmarks show what they found: tables in two forms, and plots; and what one of them is told by a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import plots
import pytest
import suite_time
from tables import Table


def test_a_table_in_two_forms() -> None:
    table = Table(["name", "ms"], [["a", "1.0"], ["longer", "12.0"]], "A note.")
    assert table.text() == "name      ms\na        1.0\nlonger  12.0\nA note."
    assert table.markdown() == "| name | ms |\n| --- | ---: |\n| a | 1.0 |\n| longer | 12.0 |\n\nA note."


def test_plots_are_small_files_that_stay_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "first" / "a.svg", tmp_path / "second" / "a.svg"]
    for path in paths:
        plots.bars_with_quartiles({"ours": [0.7, 0.8, 0.9], "ddp": [1.0, 1.0, 1.1]}, "ratio", path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert "ours" in paths[0].read_text() and paths[0].stat().st_size < 30_000
    plots.lines({"ours": {4: 1.0, 6: 1.5}}, ("layers", "seconds"), tmp_path / "b.svg")
    plots.grouped_bars({"ZeRO-3": {"ours": 1.0, "fsdp2": 2.0}}, "MB", tmp_path / "c.svg")
    assert {path.name for path in tmp_path.glob("*.svg")} == {"b.svg", "c.svg"}


def test_without_matplotlib_there_is_a_line_and_no_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "AVAILABLE", False)
    plots.bars_with_quartiles({"ours": [1, 1, 1]}, "", tmp_path / "a.svg")
    plots.lines({}, ("", ""), tmp_path / "b.svg")
    plots.grouped_bars({}, "", tmp_path / "c.svg")
    assert capsys.readouterr().out.count("no plot: matplotlib is not installed") == 3 and not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_the_compiler_took_is_written_beside_the_test_that_called_it(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("#include <string>\nint main() { return 0; }\n")
    for name, code in (("a.cpp", 0), ("missing.cpp", 1)):
        command = [str(suite_time.SAMPLER / "c++"), str(tmp_path / name), "-o", str(tmp_path / "a.out")]
        environment = {"GRAPH_FSDP_SUITE_TIME": str(tmp_path), "PYTEST_CURRENT_TEST": "tests/test_a.py::test_b (call)"}
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        assert done.returncode == code and ("missing.cpp" in done.stderr) == bool(code)
    lines = (tmp_path / "compiler.times").read_text().splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["tests/test_a.py"] * 2
    assert re.fullmatch(r"tests/test_a\.py 0m\d+\.\d+s 0m\d+\.\d+s", lines[0]) and re.search("[1-9]", lines[0][18:])
    assert set(suite_time.read(tmp_path)) == {"tests/test_a.py"}
