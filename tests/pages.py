"""Pages of the documentation: their blocks of Python, what these print, and the tests that a page names."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"(?P<mark><!-- not run: .+ -->\n)?^```python\n(?P<code>.*?)^```$(?:\n```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass
class Example:
    """A block of Python and the block of what it prints. ``line``: of the page, where the code begins."""

    line: int
    code: str
    expected: str
    span: tuple[int, int]  # of the expected output in the page; (0, 0): the page does not say


def examples(page: str) -> list[Example]:
    """The blocks of a page's text, but for those that a comment says are not run."""
    found = []
    for block in _BLOCK.finditer(page):
        if not block["mark"]:
            span = block.span("printed") if block["printed"] is not None else (0, 0)
            found.append(Example(page.count("\n", 0, block.start("code")), block["code"], block["printed"] or "", span))
    return found


def marked(page: str) -> int:
    """How many blocks are not run."""
    return sum(block["mark"] is not None for block in _BLOCK.finditer(page))


def printed(found: Sequence[Example], page: Path) -> list[str]:
    """What each prints, run one after the other in one namespace."""
    module = types.ModuleType(f"{page.stem}_md")  # Dynamo imports a model's module by name
    sys.modules[module.__name__] = module
    outputs = []
    for example in found:
        torch._dynamo.reset()
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            # As many lines above the code as on the page: tracebacks then point into it.
            exec(compile("\n" * example.line + example.code, str(page), "exec"), vars(module))
        outputs.append(output.getvalue())
    del sys.modules[module.__name__]
    return outputs


def accept(found: Sequence[Example], outputs: Sequence[str], path: Path) -> None:
    """Write into a page what its blocks print."""
    page = path.read_text()
    for example, output in reversed(list(zip(found, outputs, strict=True))):
        if example.span != (0, 0):
            page = page[: example.span[0]] + output + page[example.span[1] :]
    path.write_text(page)


def missing_tests(page: str) -> tuple[list[str], int]:
    """Tests that a page names and that are not there, and how many it names."""
    named = re.findall(r"`(test_\w+\.py)`((?:,\s+`\w+`)*)", page)
    missing = []
    for file, functions in named:
        path = next((ROOT / "tests").rglob(file), None)
        if path is None:
            missing.append(file)
            continue
        tree = ast.parse(path.read_text())
        known = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing += [f"{file}: {name}" for name in re.findall(r"`(\w+)`", functions) if name not in known]
    return missing, len(named)
