"""What docs/checkpoints.md says: its code runs and prints what stands there, its tests exist.

``EXPECTTEST_ACCEPT=1`` writes into the page what is printed.
"""

from __future__ import annotations

import os

import pytest
from test_docs import ROOT, accept, examples, missing_tests, printed

PAGE = ROOT / "docs" / "checkpoints.md"


@pytest.mark.long
def test_code_of_the_page_prints_what_stands_there() -> None:
    found = examples(PAGE.read_text())
    outputs = printed(found, PAGE)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        accept(found, outputs, PAGE)
    assert len(found) == 4
    assert outputs == [example.expected for example in examples(PAGE.read_text())]


def test_tests_that_the_page_names_exist() -> None:
    missing, count = missing_tests(PAGE.read_text())
    assert missing == [] and count > 4
