"""What docs/reliability.md says: its tests exist and are all that there are, its numbers are those of the code.

``EXPECTTEST_ACCEPT=1`` writes the numbers of cases into the page.
"""

from __future__ import annotations

import ast
import functools
import importlib
import math
import os
import re
import types
from pathlib import Path

import pytest

from graph_fsdp.checkpoint import group
from graph_fsdp.engine import sharing
from graph_fsdp.runtime.ranks import agreement, failure, lockstep

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
# Modules of faults; what each has beside tests and facts.
MODULES = (
    *("test_lost_ranks", "test_exceptions", "test_gradients", "test_checkpoint_faults", "test_long_waits"),
    *("test_watch", "test_watch_virtual", "test_replica_groups", "test_memory_faults", "test_raised_in_compile"),
    *("test_stages", "test_interrupted_lines"),
)
_RUNNERS = {
    "test",  # of facts
    "all_ranks_raise",
    "zz_one_rank_raises",
    "test_one_rank_raises_elsewhere",
    "test_a_rank_that_raises_in_compile",
    "test_stages_that_raise",
    "long_waits_are_told",
    "ranks_are_watched",
    "ranks_of_the_virtual_device_are_watched",
}
_ROW = re.compile(r"^\| (?P<fault>[^|]+) \| (?P<what>[^|]+) \| `(?P<file>\w+)\.py`: (?P<names>[^|]+) \|(?P<rest>.*)$")


@functools.cache
def cases() -> dict[str, dict[str, tuple[int, int]]]:
    """Module → test or fact → its cases, and those that are expected to fail."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        functions = [f for n, f in vars(module).items() if n.startswith("test_") and isinstance(f, types.FunctionType)]
        facts = module.FACTS.functions.values() if hasattr(module, "FACTS") else ()
        everything = [*functions, *facts, *getattr(module, "TOGETHER", ()), *getattr(module, "ALONE", ())]
        found[name] = {f.__name__: _cases(f) for f in everything if f.__name__ not in _RUNNERS}
    return found


def _cases(function: types.FunctionType) -> tuple[int, int]:
    marks: list[pytest.Mark] = getattr(function, "pytestmark", [])
    count = math.prod(len(list(mark.args[1])) for mark in marks if mark.name == "parametrize")
    return count, count if any(mark.name == "xfail" for mark in marks) else 0


def rows(page: str) -> list[re.Match[str]]:
    return [found for line in page.splitlines() if (found := _ROW.match(line))]


def names(row: re.Match[str]) -> list[str]:
    return re.findall(r"`(\w+)`", row["names"])


def test_every_fault_is_in_the_table_once() -> None:
    listed = [(row["file"], name) for row in rows(PAGE.read_text()) if row["file"] in MODULES for name in names(row)]
    there = [(module, name) for module, tests in cases().items() for name in tests]
    assert sorted(listed) == sorted(there)


def test_the_numbers_are_those_of_the_tests() -> None:
    lines, tried, lost = [], 0, 0
    for line in PAGE.read_text().splitlines():
        row = _ROW.match(line)
        if row is not None and row["file"] in MODULES:
            counts = [cases()[row["file"]][name] for name in names(row)]
            row_tried, row_lost = sum(t for t, _ in counts), sum(n for _, n in counts)
            line = f"{line[: row.start('rest')]} {row_tried} | {row_lost} |"
            tried, lost = tried + row_tried, lost + row_lost
        elif line.startswith("Tried: "):
            line = f"Tried: {tried}. Survived: {tried - lost}. Lost: {lost}."
        lines.append(line)
    page = "\n".join(lines) + "\n"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page
    assert lost == 0


def test_other_tests_of_the_page_exist() -> None:
    other = [(row["file"], name) for row in rows(PAGE.read_text() + _two_columns()) for name in names(row)]
    checked = 0
    for file, name in other:
        if file not in MODULES:
            tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text())
            assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name
            checked += 1
    assert checked > 10


def _two_columns() -> str:
    """Rows of a promise and its tests, with a column more."""
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"^\| [^|]+ \| `\w+\.py`: [^|]+ \|$", line)]
    return "\n".join(f"| a promise {line}" for line in lines)


def test_seconds_of_the_page_are_those_of_the_code() -> None:
    modules = {
        "agreement": agreement,
        "failure": failure,
        "lockstep": lockstep,
        "group": group,
        "sharing": sharing,
    }
    found = re.findall(r"^\| (\d+) \| [^|]+ \| `(\w+)\.(\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert len(found) == 8
    for seconds, module, name in found:
        assert float(seconds) == getattr(modules[module], name), name


def test_the_number_of_flipped_bits_is_that_of_the_test() -> None:
    flips = importlib.import_module("test_checkpoint_faults").FLIPS
    assert f"each of {flips} in every file" in PAGE.read_text()
