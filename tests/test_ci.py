"""``.ci/run`` with a pretended ``make``: what fails ends it, also behind other parts, and nothing outlives it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a script for bash 4, which looks at processes")

MAKE = """#!/usr/bin/env bash
echo "making $*"
if [ "$*" = "train STEPS=20" ]; then
    for step in {1..20}; do echo "step $step loss $((30 - step)).5"; done
    echo "final validation loss 9.5"
fi
if [ "$*" = "$HANGS" ]; then
    sleep 3600 &
    echo $! > "$STARTED.partial" && mv "$STARTED.partial" "$STARTED"
    wait
fi
[ "$*" != "$FAILS" ]
"""
PARTS = (
    *("make train", "the loss fell", "make lint", "make types", "make docs", "make test-package"),
    *("the environment of test-xla", "make test-xla", "the environment of make test", "make test", "make test-long"),
)
ENVIRONMENT_OF_XLA = ".venv-xla/.installed"


def start(folder: Path, fails: str = "", hangs: str = "") -> subprocess.Popen[str]:
    make = folder / "bin" / "make"
    for path in (make, folder / ".ci" / "run"):
        path.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    shutil.copy(Path(__file__).parents[1] / ".ci" / "run", folder / ".ci" / "run")
    pretended = {"FAILS": fails, "HANGS": hangs, "STARTED": str(folder / "started"), "TMPDIR": str(folder)}
    path = os.pathsep.join([str(make.parent), os.environ["PATH"]])
    return subprocess.Popen(
        [str(folder / ".ci" / "run")],
        env={**os.environ, **pretended, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=take_signals,
    )


def take_signals() -> None:
    """``nohup`` and ``&`` have what they start ignore signals, which a shell then cannot trap."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def runs(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def parts(output: str) -> list[str]:
    """Those whose time is printed at the end, with what became of them."""
    return re.findall(r"^ *\d+:\d\d  (.*)$", output, re.MULTILINE)


def test_all_parts_run_and_have_a_time(tmp_path: Path) -> None:
    run = start(tmp_path)
    output = run.communicate()[0]
    assert run.returncode == 0, output
    assert parts(output) == [*PARTS, "all"]
    assert "trained: loss 29.5 to 10.5" in output
    assert f"=== the environment of test-xla\nmaking {ENVIRONMENT_OF_XLA}\n" in output


@pytest.mark.parametrize(
    ("fails", "part"),
    [
        ("train STEPS=20", "make train"),
        ("test-package", "make test-package"),
        (ENVIRONMENT_OF_XLA, "the environment of test-xla"),
        (".venv/.installed", "the environment of make test"),
        ("test", "make test"),
    ],
)
def test_a_part_that_fails_ends_it_and_shows_its_output(tmp_path: Path, fails: str, part: str) -> None:
    run = start(tmp_path, fails)
    output = run.communicate()[0]
    assert run.returncode == 1
    assert parts(output) == [*PARTS[: PARTS.index(part)], f"{part}: FAILED", "all"]
    assert f"=== {part}\nmaking {fails}\n" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("hangs", [ENVIRONMENT_OF_XLA, "lint"])
def test_nothing_outlives_an_interrupted_run(tmp_path: Path, hangs: str, number: signal.Signals) -> None:
    run = start(tmp_path, hangs=hangs)
    while not (started := tmp_path / "started").exists():
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(number)
    output = run.communicate()[0]
    assert run.returncode == 128 + number, output
    while runs(int(started.read_text())):
        time.sleep(0.01)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("bin", ".ci", "started")], "no files either"
