"""The page of private names lists nothing that the package does not use."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_name_of_the_page_is_used() -> None:
    rows = re.findall(r"^\|(.+?)\|", (ROOT / "docs" / "private_names.md").read_text(), re.MULTILINE)
    last_parts = {re.findall(r"\w+", name)[-1] for row in rows for name in re.findall(r"`([^`]+)`", row)}
    folders = [ROOT / folder for folder in ("graph_fsdp", "passes", "runtime")]
    words = {
        word for folder in folders for path in folder.rglob("*.py") for word in re.findall(r"\w+", path.read_text())
    }
    assert len(last_parts) > 100
    assert last_parts <= words
