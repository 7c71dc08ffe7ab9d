"""The code of docs/xla.md prints what stands there. ``EXPECTTEST_ACCEPT=1`` writes into the page what is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from xla_launch import ENVIRONMENT, run_xla

PAGE = Path(__file__).parents[2] / "docs" / "xla.md"


PROGRAM = re.compile(
    r"^```python\n((?:(?!```).)*?torch_xla\.launch\(.*?)^```\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def page() -> str:
    """Without what is for a shell, or a program of its own."""
    text = PROGRAM.sub("", PAGE.read_text())
    return re.sub(r"^```bash\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


EXAMPLES = pages.examples(page())


def printed() -> list[str]:
    return pages.printed(EXAMPLES, PAGE)


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    found = run_xla(printed, timeout=600)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        text = PAGE.read_text()
        for example, output in zip(EXAMPLES, found, strict=True):
            if example.expected:
                text = text.replace(
                    f"{example.code}```\n```text\n{example.expected}", f"{example.code}```\n```text\n{output}"
                )
        PAGE.write_text(text)
    return found


@pytest.mark.parametrize("index", range(len(EXAMPLES)), ids=[f"block {index}" for index in range(len(EXAMPLES))])
def test_code_of_the_page_prints_what_stands_there(outputs: list[str], index: int) -> None:
    assert outputs[index] == EXAMPLES[index].expected


def test_program_with_a_process_or_thread_per_device(tmp_path: Path) -> None:
    (found,) = PROGRAM.finditer(PAGE.read_text())
    program = tmp_path / "train.py"
    program.write_text(found[1])
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout) == (0, found[2]), done.stderr[-4000:]
