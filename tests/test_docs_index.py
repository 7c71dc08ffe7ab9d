"""docs/index.md: its programs are saved under the names that they begin with, and its commands run them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from launch import run_ranks

pytestmark = pytest.mark.long
PAGE = (Path(__file__).parents[1] / "docs" / "index.md").read_text()
PROGRAMS = {
    code.split("\n", 1)[0].removeprefix("# "): code
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
}
COMMANDS = re.findall(r"^\$ OMP_NUM_THREADS=1 torchrun (.*)$", PAGE, re.MULTILINE)


def program(folder: str, name: str) -> str:
    """On a rank: what it prints."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(name, run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("index")
    for name, code in PROGRAMS.items():
        (folder / name).write_text(code)
    first, second = (command.split() for command in COMMANDS)
    run = [sys.executable, "-m", "torch.distributed.run", *first]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    # Its command is the same but for the program: without torchrun's imports.
    assert second[:-1] == first[:-1]
    ranks = run_ranks(program, 2, str(folder), second[-1], backend=None)
    return folder, [done.stdout, "".join(ranks)]


def losses(output: str) -> list[str]:
    return re.findall(r"^step \d+ loss (\S+)$", output, re.MULTILINE)


def starts(output: str) -> list[int]:
    """Where the gathers of the table start."""
    return [int(row) for row in re.findall(r"^ +\S+ +gather +\d+ +[\d,]+ +(\d+)", output, re.MULTILINE)]


def test_a_model_is_trained_and_its_report_is_there(said: tuple[Path, list[str]]) -> None:
    folder, (trained, _) = said
    assert float(losses(trained)[-1]) < float(losses(trained)[0]) - 0.1
    assert len(starts(trained)) == 5 and "<html" in (folder / "report.html").read_text()


def test_the_pass_moves_the_gathers_and_changes_no_loss(said: tuple[Path, list[str]]) -> None:
    folder, (trained, early) = said
    assert losses(trained) == losses(early) and len(losses(early)) == 4
    assert "5 gathers start together" in early and (folder / "early.html").exists()
    first, *others = starts(early)
    assert others == list(range(first + 1, first + 5)) and starts(trained) != starts(early)
