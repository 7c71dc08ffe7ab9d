"""The checks of an accelerator, rehearsed on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_checks
import pytest
from gpu_checks import CANNOT_RUN, FAILED, PASSED


def states(folder: Path) -> dict[str, str]:
    checks = [json.loads(path.read_text())["checks"] for path in sorted(folder.glob("gpu_checks_*.json"))]
    return {name: result["state"] for part in checks for name, result in part.items()}


def test_a_check_that_needs_an_accelerator_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ["versions", "a_warm_step_does_not_wait_for_the_device"]
    assert gpu_checks.main(["A", "--only", *names, "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert states(tmp_path) == {names[0]: PASSED, names[1]: CANNOT_RUN}
    assert f"{names[1]} (needs a device of type 'cuda', and this is 'cpu')" in capfd.readouterr().out


def test_a_check_that_takes_too_long_or_dies_has_failed() -> None:
    with gpu_checks.importable():
        slow, dead = (gpu_checks.in_a_process(*case) for case in (("versions", "cpu", 0.01), ("unknown", "cpu", 600.0)))
    assert (slow["state"], slow["says"]) == (FAILED, "was ended after 0 s")
    assert (dead["state"], dead["says"]) == (FAILED, "KeyError: 'unknown'")


def test_names_that_there_are_not() -> None:
    with pytest.raises(SystemExit):
        gpu_checks.main(["D"])
    with pytest.raises(SystemExit):
        gpu_checks.main(["A", "--only", "speed"])


@pytest.mark.long
def test_all_parts_run_to_their_end_on_the_cpu(tmp_path: Path) -> None:
    assert gpu_checks.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    found = states(tmp_path)
    assert FAILED not in found.values() and list(found.values()).count(PASSED) >= 9, found
