"""Pinned memory is asked for in pieces that waste little of it.

torch's allocator of pinned memory (CUDA's and XPU's) rounds each request up to a power of two, so a buffer can take
nearly twice its bytes. Pieces of other sizes, cut between parameters, add up to little more than the shards.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

# What a piece costs beside its memory, of all bytes: pinning takes time, and a bucket that is cut is copied in parts.
_PER_PIECE = 1 / 512


def pinned_nbytes(nbytes: int) -> int:
    """Return what torch takes for a request of pinned memory, in bytes."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def pieces_of(sizes: Sequence[int]) -> list[int]:
    """Return how many of ``sizes`` (bytes, which stay in their order) lie in each piece, so that the pieces, rounded by
    ``pinned_nbytes``, take the least. Linear in their number, but for logarithms: a piece of each power of two takes as
    many as fit, since what is left for the others only shrinks."""
    begins = [0, *itertools.accumulate(sizes)]
    count, total = len(sizes), begins[-1]
    least, ends = [0.0] * (count + 1), [count] * (count + 1)
    for first in reversed(range(count)):
        least[first] = float("inf")
        power = pinned_nbytes(sizes[first]) or 1
        while True:
            end = bisect.bisect_right(begins, begins[first] + power) - 1
            cost = power + total * _PER_PIECE + least[end]
            if cost < least[first]:
                least[first], ends[first] = cost, end
            if end == count:
                break
            power *= 2
    found, first = [], 0
    while first < count:
        found.append(ends[first] - first)
        first = ends[first]
    return found
