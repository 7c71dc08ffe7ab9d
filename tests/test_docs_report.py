"""What docs/reading_a_report.md says: its code runs and prints what stands there, and its pictures are there.

``EXPECTTEST_ACCEPT=1`` writes into the page what is printed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from test_docs import accept, examples, printed

PAGE = Path(__file__).parents[1] / "docs" / "reading_a_report.md"
EXAMPLES = examples(PAGE.read_text())


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("page"))  # where the page's code writes its files
    try:
        found = printed(EXAMPLES, PAGE)
    finally:
        os.chdir(before)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        accept(EXAMPLES, found, PAGE)
    return found


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(EXAMPLES)), ids=[f"line {example.line}" for example in EXAMPLES])
def test_code_of_the_page_prints_what_stands_there(outputs: list[str], index: int) -> None:
    assert outputs[index] == EXAMPLES[index].expected


def test_pictures_are_there() -> None:
    names = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGE.read_text())
    assert names
    for name in names:
        picture = PAGE.parent / name
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 300_000
