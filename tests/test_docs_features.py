"""What docs/features.md says: each feature has a test in `make test`, which leaves out what is marked ``long``.

Marks are read from the source: importing all tests would take longer than this file may. A parametrised test has cases
that are not long unless all of it is marked.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "features.md"
# What proves a row outside of `make test`: another target, or another environment.
ELSEWHERE = ("make test-package", "make types", "make docs", ".ci/run", "tests/xla")


def rows() -> list[tuple[str, str, str]]:
    """(feature, state, the cell that names tests) of each row of each table."""
    found = []
    state = test = 0
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if "state" in cells:
            state, test = cells.index("state"), cells.index("test")
        elif cells and not line.startswith("|---"):
            found.append((cells[0], cells[state], cells[test]))
    return found


def is_long(expression: ast.expr) -> bool:
    """Whether a decorator, or what ``pytestmark`` is set to, marks all that it is of."""
    marks = expression.elts if isinstance(expression, (ast.List, ast.Tuple)) else [expression]
    return any(ast.unparse(mark) == "pytest.mark.long" for mark in marks)


def short_tests(source: str) -> list[str]:
    """Names of the tests of a file that are not marked, at least not in all their cases. ``test_a = …`` is one, too."""
    body = ast.parse(source).body
    assigned = {ast.unparse(node.targets[0]): node.value for node in body if isinstance(node, ast.Assign)}
    if "pytestmark" in assigned and is_long(assigned["pytestmark"]):
        return []
    marks = {node.name: node.decorator_list for node in body if isinstance(node, ast.FunctionDef)}
    marks |= {name: [value.func] for name, value in assigned.items() if isinstance(value, ast.Call)}
    return [name for name, of in marks.items() if name.startswith("test_") and not any(map(is_long, of))]


def named(cell: str) -> list[Path]:
    """The files of tests that a cell names; of a folder, all of its."""
    paths = re.findall(r"`((?:tests/)?(?:\w+/)*test_\w+\.py|tests/\w+)`", cell)
    places = [ROOT / "tests" / path.removeprefix("tests/") for path in paths]
    return [file for place in places for file in (sorted(place.glob("test_*.py")) if place.is_dir() else [place])]


@pytest.mark.parametrize(("feature", "state", "cell"), rows(), ids=[feature for feature, *_ in rows()])
def test_a_feature_has_a_test_that_is_not_long(feature: str, state: str, cell: str) -> None:
    here = [file for file in named(cell) if "xla" not in file.relative_to(ROOT / "tests").parts]
    missing = [file.name for file in here if not file.is_file()]
    assert not missing
    if not here:
        assert any(f"`{elsewhere}" in cell for elsewhere in ELSEWHERE) or "done" not in state, "nothing proves it"
    else:
        assert any(short_tests(file.read_text()) for file in here), f"make test runs none of {[f.name for f in here]}"


def test_there_are_rows() -> None:
    assert len(rows()) > 70 and sum(state.startswith("done") for _, state, _ in rows()) > 50


def test_a_long_test_is_seen() -> None:
    source = "@pytest.mark.long\n@pytest.mark.timeout(9)\ndef test_a(): ...\ndef test_b(): ...\ndef no_test(): ...\n"
    assert short_tests(source) == ["test_b"]
    assert short_tests("test_a = pytest.mark.long(FACTS.on(2))\ntest_b = FACTS.on(2)\n") == ["test_b"]
    assert short_tests(source + "pytestmark = pytest.mark.long") == []
    assert short_tests(source + "pytestmark = [pytest.mark.timeout(1), pytest.mark.long]") == []
