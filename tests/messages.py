"""The texts in the package's source, as a reader sees them: adjacent pieces joined, what is filled in as ``…``."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def texts() -> list[str]:
    found = []
    for folder in ("graph_fsdp", "passes", "runtime"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            found += [text for node in ast.walk(ast.parse(file.read_text())) for text in _text(node)]
    return found


def _text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
