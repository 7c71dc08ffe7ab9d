"""What a report keeps of a stage: how its lines are made of those of the stage before."""

from __future__ import annotations

import random

import pytest

from graph_fsdp.report.data import line_changes


def rebuilt(old: list[str], new: list[str]) -> list[str]:
    made: list[str] = []
    position = 0
    changes, lines = line_changes(old, new)
    added = iter(lines)
    for kind, count in changes:
        assert count > 0
        made += old[position : position + count] if kind == "same" else []
        made += [next(added) for _ in range(count)] if kind == "added" else []
        position += count if kind != "added" else 0
    assert position == len(old) and next(added, None) is None
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
    ],
)
def test_changes(old: str, new: str, changes: list[tuple[str, int]]) -> None:
    assert line_changes(list(old), list(new))[0] == changes


def test_any_two_texts() -> None:
    for seed in range(20):
        source = random.Random(seed)
        old = [str(source.randrange(12)) for _ in range(source.randrange(30))]
        new = [str(source.randrange(12)) for _ in range(source.randrange(30))]
        assert rebuilt(old, new) == new, seed
