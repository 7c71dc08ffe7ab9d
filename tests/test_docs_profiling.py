"""What docs/profiling.md says: its code runs and prints what stands there, but for the times.

``EXPECTTEST_ACCEPT=1`` writes into the page what is printed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from test_docs import examples, printed

PAGE = Path(__file__).parents[1] / "docs" / "profiling.md"


def without_times(text: str) -> str:
    return re.sub(r" +", " ", re.sub(r"\d+\.\d\d+", "t", text))


@pytest.mark.long
def test_code_of_the_page_prints_what_stands_there() -> None:
    page = PAGE.read_text()
    found = examples(page)
    outputs = printed(found)
    if os.environ.get("EXPECTTEST_ACCEPT"):
        for example, output in reversed(list(zip(found, outputs, strict=True))):
            page = page[: example.span[0]] + output + page[example.span[1] :]
        PAGE.write_text(page)
    assert len(found) == 3
    for example, output in zip(examples(page), outputs, strict=True):
        assert output and without_times(output) == without_times(example.expected)
