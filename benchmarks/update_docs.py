"""Write the tables of ``docs/compatibility.md``, ``gpu.md``, ``low_precision.md``, ``performance.md``, ``planning.md``,
``reliability.md`` and ``xla.md`` anew from ``benchmarks/results``.

    python benchmarks/update_docs.py

A table stands between ``<!-- results/NAME.json -->`` and ``<!-- end -->``, headed by its plot, command and machine.
``tests/test_benchmarks.py`` fails where a page and the results differ.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

from harness import IMAGES, RESULTS, ROOT
from tables import machine_line

NOT_MEASURED = "Not measured yet.\n"
_NAMES = ("compatibility", "gpu", "low_precision", "performance", "planning", "reliability", "xla")
PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in _NAMES)
_MARKED = re.compile(r"(<!-- results/(?P<name>\w+)\.json -->\n).*?(<!-- end -->)", re.DOTALL)


def section(path: Path) -> str:
    """What the page says of one result, or that there is none."""
    if not path.exists():
        return NOT_MEASURED
    result = json.loads(path.read_text())
    table = getattr(importlib.import_module(result["benchmark"]), result.get("table", "table"))(result)
    plot = f"![{path.stem}](images/{path.stem}.svg)\n\n" if (IMAGES / f"{path.stem}.svg").exists() else ""
    return f"{plot}```\n{result['command']}\n```\n{_made_with(result)}.\n\n{table.markdown()}\n"


def _made_with(result: dict[str, Any]) -> str:
    if "about" in result:
        return str(result["about"])
    return machine_line(result) if "machine" in result else f"Predicted with torch {result['torch']}"


def updated(page: str) -> str:
    return _MARKED.sub(lambda m: f"{m[1]}{section(RESULTS / (m['name'] + '.json'))}{m[3]}", page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text()))
