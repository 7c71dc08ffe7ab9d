"""The code of docs/xla.md prints what stands there. ``EXPECTTEST_ACCEPT=1`` writes into the page what is printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import test_docs
from xla_launch import run_xla

PAGE = Path(__file__).parents[2] / "docs" / "xla.md"


def page() -> str:
    """Without what is for a shell."""
    return re.sub(r"^```bash\n.*?^```$", "", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


EXAMPLES = test_docs.examples(page())


def printed() -> list[str]:
    return test_docs.printed(EXAMPLES)


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    found = run_xla(printed, timeout=280)
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
