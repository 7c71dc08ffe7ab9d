"""``graph-fsdp`` without arguments: what can be done, with an example of each."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

import graph_fsdp
from graph_fsdp.cli import plan, saved
from graph_fsdp.cli.main import EXAMPLES, IN_PYTHON, main
from graph_fsdp.report import file

COMMANDS = [example for examples in EXAMPLES.values() for example in examples.values()]


def test_it_lists_an_example_of_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(example in printed for example in [*COMMANDS, *IN_PYTHON.values()])
    assert max(map(len, printed.splitlines())) <= 120
    with pytest.raises(SystemExit):
        main(["--help"])
    named = set(re.findall(r"^    ([a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert named == {shlex.split(command)[1] for command in COMMANDS}


def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"graph-fsdp {graph_fsdp.__version__}\n"


def test_nobody_reads_its_output() -> None:
    command = [sys.executable, "-m", "graph_fsdp"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_its_output_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "graph_fsdp"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("graph-fsdp: the output cannot be written: ") and done.stderr.count("\n") == 1


def test_it_is_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(file, "load_report", interrupted)
    assert main(["report", "report.json"]) == 130 and capsys.readouterr().err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_is_one_that_the_program_takes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, name, *arguments = shlex.split(command)
    ran = []
    for module, run in ((plan, "_run"), (saved, "_report"), (saved, "_inspect_checkpoint"), (saved, "_consolidate")):
        monkeypatch.setattr(module, run, ran.append)
    assert program == "graph-fsdp" and main([name, *arguments]) == 0 and len(ran) == 1


def test_examples_in_python_call_what_there_is() -> None:
    for example in IN_PYTHON.values():
        compile(example, "<example>", "exec")
        assert all(hasattr(graph_fsdp, name) for name in re.findall(r"graph_fsdp\.(\w+)", example))
