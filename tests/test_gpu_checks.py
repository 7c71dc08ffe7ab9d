"""The checks of an accelerator, rehearsed on the virtual device."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_results
import pytest
from gpu_checks import CANNOT_RUN, FAILED, PASSED
from virtual import library

needs_compiler = pytest.mark.skipif(library.COMPILER is None, reason="needs a C++ compiler")


def results(folder: Path) -> dict[str, gpu_checks.Result]:
    checks = [json.loads(path.read_text())["checks"] for path in sorted(folder.glob("gpu_checks_*.json"))]
    return {name: result for part in checks for name, result in part.items()}


def in_one_process(limit: float) -> list[tuple[str, str, str]]:
    """What comes of two checks: name, state, and what it says."""
    with gpu_checks.importable():
        found = list(gpu_checks.in_a_process(["versions", "versions"], "cpu", lambda name: limit))
    return [(name, row["state"], row["says"]) for name, row in found]


def test_a_check_that_needs_an_accelerator_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ["versions", "torchs_sanitizer_finds_no_race"]
    assert gpu_checks.main(["A", "--only", *names, "--device", "cpu", "--out", str(tmp_path)]) == 0
    found = results(tmp_path)
    assert {name: row["state"] for name, row in found.items()} == {names[0]: PASSED, names[1]: CANNOT_RUN}
    assert f"{names[1]} (needs cuda, and this is cpu: it follows CUDA's streams" in capfd.readouterr().out


def test_a_check_that_takes_too_long_or_dies_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_one_process(0.01) == [("versions", FAILED, "was ended after 0 s")]
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert in_one_process(600.0) == [("versions", FAILED, "the process ended with 1 and said nothing")]


def test_checks_after_one_that_dies_run_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from device_checks import CHECKS, Check

    names, started = ["first", "dies", "last"], []

    def in_a_process(group: list[str], *_: Any) -> Iterator[tuple[str, gpu_checks.Result]]:
        started.append(group)
        for name in group:
            state = FAILED if name == "dies" else PASSED
            yield name, {"state": state, "figures": {}, "says": "", "seconds": 0.0, "output": []}
            if state is FAILED:
                return

    for name in names:
        monkeypatch.setitem(CHECKS, name, Check(name, "A", 60, lambda device: {}))
    monkeypatch.setattr(gpu_checks, "in_a_process", in_a_process)
    found = gpu_checks.Checks("cpu", names, tmp_path).run()
    assert [row["state"] for row in found.values()] == [PASSED, FAILED, PASSED]
    assert started == [names, names[2:]]
    gpu_checks.Checks("cpu", names, tmp_path, seconds=0).run()
    assert {row["says"] for row in results(tmp_path).values()} == {gpu_checks.TIME_UP}


def test_what_runs_came_to_is_merged(tmp_path: Path) -> None:
    def ran(folder: str, part: str, side_by_side: bool, **states: str) -> Path:
        checks = {
            name: {"state": state, "figures": {"of": folder}, "says": f"{state}\nmore", "output": []}
            for name, state in states.items()
        }
        (tmp_path / folder).mkdir(exist_ok=True)
        text = json.dumps({"device": "cuda", "side_by_side": side_by_side, "checks": checks})
        (tmp_path / folder / f"gpu_checks_{part}.json").write_text(text)
        return tmp_path / folder

    first = ran("first", "A", True, mended=FAILED, late=PASSED, never=CANNOT_RUN)
    ran("first", "C", True, timed=PASSED)
    second = ran("second", "A", False, mended=PASSED, late=CANNOT_RUN)
    found = gpu_results.merged([first, second])
    assert {name: (row["state"], row["figures"]["of"], row["says"]) for name, row in found.items()} == {
        "mended": (PASSED, "second", PASSED),
        "late": (PASSED, "first", PASSED),
        "never": (CANNOT_RUN, "first", CANNOT_RUN),
    }
    ran("second", "C", False, timed=PASSED)
    assert gpu_results.merged([first, second])["timed"]["figures"] == {"of": "second"}
    rows = {row[0]: row[1:4] for row in gpu_results.table({"checks": found}).rows}
    assert rows["`mended`"] == ["1", "", ""] and rows["`never`"] == ["", "", "1"]


def test_checks_that_run_side_by_side_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from device_checks import CHECKS, Check

    for name in ("one", "two"):
        monkeypatch.setitem(CHECKS, name, Check(name, "C", 60, lambda device: {}, needs=["cuda"], reason="a GPU"))
    gpu_checks.Checks("cpu", ["one", "two"], tmp_path, at_a_time=2).run()
    assert json.loads((tmp_path / "gpu_checks_C.json").read_text())["side_by_side"]


def test_names_that_there_are_not() -> None:
    with pytest.raises(SystemExit):
        gpu_checks.main(["D"])
    with pytest.raises(SystemExit):
        gpu_checks.main(["A", "--only", "speed"])


@pytest.mark.long
@needs_compiler
def test_all_parts_run_to_their_end_on_the_virtual_device(tmp_path: Path) -> None:
    assert gpu_checks.main(["--device", "virtual", "--out", str(tmp_path)]) == 0
    found = results(tmp_path)
    assert not {name: row["says"] for name, row in found.items() if row["state"] == FAILED}
    equal = [row["figures"]["difference"] for name, row in found.items() if name.startswith("eager_beside_fsdp2")]
    assert equal == [0.0] * 7
    assert {name for name, row in found.items() if row["state"] == CANNOT_RUN} >= {
        "ranks_of_the_devices_own_group",
        "cuda_graphs_beside_fsdp2",
    }
    seconds = found["steps_of_a_simulated_cluster"]["figures"]
    assert seconds["ours"]["step_s"] < 2 * seconds["FSDP2"]["step_s"]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_builds_the_kernels_of_regions(tmp_path: Path) -> None:
    arguments = ["A", "--only", "triton_kernels_of_regions: bfloat16, unit", "--device", "cpu", "--out", str(tmp_path)]
    assert gpu_checks.main(arguments) == 0
    for name, row in results(tmp_path).items():
        assert row["state"] == PASSED and row["figures"]["binaries"] >= row["figures"]["kernels"] > 0, (name, row)
