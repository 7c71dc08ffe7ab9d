"""What a pass changed in a printed graph, line by line, in time that is nearly linear.

Bram Cohen's patience diff: lines that stand once in both texts anchor the comparison, in their longest common order.
A printed graph is nearly all such lines, since each node has a name of its own; ``difflib`` takes minutes where this
takes a second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Literal

Kind = Literal["same", "removed", "added"]
Change = tuple[Kind, int]
"""So many lines that are the same in both, that only the old text has, or that only the new text has."""


def line_diff(old: Sequence[str], new: Sequence[str]) -> list[Change]:
    """The changes that make ``new`` of ``old``, in order; what was removed comes before what was added there."""
    changes: list[Change] = []
    i = j = 0
    for a, b in [*_anchors(old, new), (len(old), len(new))]:
        while i < a and j < b and old[i] == new[j]:  # equal lines that stand more than once
            _add(changes, "same", 1)
            i, j = i + 1, j + 1
        tail = 0
        while a - tail > i and b - tail > j and old[a - tail - 1] == new[b - tail - 1]:
            tail += 1
        _add(changes, "removed", a - tail - i)
        _add(changes, "added", b - tail - j)
        _add(changes, "same", tail + (a < len(old)))
        i, j = a + 1, b + 1
    return changes


def _anchors(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """(old, new) indices of lines that stand once in each: the longest sequence that rises in both."""
    counts = Counter(new)
    where = {line: index for index, line in enumerate(new) if counts[line] == 1}
    counts = Counter(old)
    pairs = [(i, where[line]) for i, line in enumerate(old) if counts[line] == 1 and line in where]
    ends: list[int] = []  # of rising sequences, by length: the smallest new index
    last: list[int] = []  # the pair that each of them ends with
    before: list[int] = []  # of each pair: the pair before it in its sequence, or -1
    for number, (_, j) in enumerate(pairs):
        length = bisect_left(ends, j)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [j]
        last[length : length + 1] = [number]
    found = []
    number = last[-1] if last else -1
    while number >= 0:
        found.append(pairs[number])
        number = before[number]
    return found[::-1]


def _add(changes: list[Change], kind: Kind, count: int) -> None:
    if count and changes and changes[-1][0] == kind:
        changes[-1] = (kind, changes[-1][1] + count)
    elif count:
        changes.append((kind, count))
