"""Write the tables of ``docs/performance.md`` anew from ``benchmarks/results``.

    python benchmarks/update_docs.py

A table stands between ``<!-- results/NAME.json -->`` and ``<!-- end -->``, headed by its command and machine.
``tests/test_benchmarks.py`` fails where the page and the results differ.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

from harness import RESULTS, ROOT
from tables import machine_line

PAGE = ROOT / "docs" / "performance.md"
_MARKED = re.compile(r"(<!-- results/(?P<name>\w+)\.json -->\n).*?(<!-- end -->)", re.DOTALL)


def section(path: Path) -> str:
    """What the page says of one result."""
    if not path.exists():
        return "Not measured yet.\n"
    result = json.loads(path.read_text())
    table = importlib.import_module(result["benchmark"]).table(result)
    return f"```\n{result['command']}\n```\n{machine_line(result)}.\n\n{table.markdown()}\n"


def updated(page: str) -> str:
    return _MARKED.sub(lambda m: f"{m[1]}{section(RESULTS / (m['name'] + '.json'))}{m[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
