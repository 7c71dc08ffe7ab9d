"""What a report keeps of a stage: how its lines are made of those of the stage before."""

from __future__ import annotations

import itertools
import random

import pytest

from graph_fsdp.report.data import line_changes


def rebuilt(old: list[str], new: list[str]) -> list[str]:
    made: list[str] = []
    before = iter(old)
    for change in line_changes(old, new):
        gone, added = (0, list(itertools.islice(before, change))) if isinstance(change, int) else change
        assert len(list(itertools.islice(before, gone))) == gone and (gone or added)
        made += added
    assert next(before, None) is None
    return made


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("", "", []),
        ("", "ab", [(0, ["a", "b"])]),
        ("ab", "", [(2, [])]),
        ("abc", "abc", [3]),
        ("abc", "axc", [1, (1, ["x"]), 1]),
        ("abcd", "bcda", [(1, []), 3, (0, ["a"])]),  # a line that moved
    ],
)
def test_changes(old: str, new: str, changes: list[int | tuple[int, list[str]]]) -> None:
    assert line_changes(list(old), list(new)) == changes


def test_any_two_texts() -> None:
    for seed in range(20):
        source = random.Random(seed)
        old = [str(source.randrange(12)) for _ in range(source.randrange(30))]
        new = [str(source.randrange(12)) for _ in range(source.randrange(30))]
        assert rebuilt(old, new) == new, seed
