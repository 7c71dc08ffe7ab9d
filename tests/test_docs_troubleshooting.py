"""The messages of docs/troubleshooting.md are those of the source. (Its code is run by test_docs_pages.py.)"""

from __future__ import annotations

import re

import pytest
from messages import ROOT, texts

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_source(message: str) -> None:
    words = message.removesuffix(" …")
    assert any(words in " ".join(text.split()) for text in texts())
    assert len(words.replace("…", "").split()) > 3, "enough words to be found by"


def test_there_are_messages() -> None:
    assert len(MESSAGES) == PAGE.count("\n### ") > 12
