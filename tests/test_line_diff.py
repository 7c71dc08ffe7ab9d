"""The diff of printed graphs: it rebuilds the new text, and finds what was inserted, removed and moved."""

from __future__ import annotations

import random

import pytest

from graph_fsdp.report.line_diff import line_diff


def rebuilt(old: list[str], new: list[str]) -> list[str]:
    made: list[str] = []
    i = j = 0
    for kind, count in line_diff(old, new):
        assert count > 0
        if kind == "same":
            assert old[i : i + count] == new[j : j + count]
        made += old[i : i + count] if kind == "same" else new[j : j + count] if kind == "added" else []
        i += count if kind != "added" else 0
        j += count if kind != "removed" else 0
    assert (i, j) == (len(old), len(new))
    return made


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("", "", []),
        ("", "ab", [("added", 2)]),
        ("ab", "", [("removed", 2)]),
        ("abc", "abc", [("same", 3)]),
        ("abc", "axc", [("same", 1), ("removed", 1), ("added", 1), ("same", 1)]),
        ("abcd", "bcda", [("removed", 1), ("same", 3), ("added", 1)]),  # a line that moved
        ("aab", "aaab", [("same", 2), ("added", 1), ("same", 1)]),  # lines that stand more than once
    ],
)
def test_changes(old: str, new: str, changes: list[tuple[str, int]]) -> None:
    assert line_diff(list(old), list(new)) == changes


@pytest.mark.parametrize("seed", range(20))
def test_any_two_texts(seed: int) -> None:
    source = random.Random(seed)
    old = [str(source.randrange(12)) for _ in range(source.randrange(30))]
    new = [str(source.randrange(12)) for _ in range(source.randrange(30))]
    assert rebuilt(old, new) == new


def test_lines_that_stand_once_keep_their_longest_common_order() -> None:
    old = [f"line {n}" for n in range(2000)]
    new = old[:500] + old[510:1000] + old[500:510] + ["between"] + old[1000:]
    assert rebuilt(old, new) == new
    assert sum(count for kind, count in line_diff(old, new) if kind == "same") == 1990
