"""Pinned memory is asked for in pieces that waste little of it.

torch's allocator of pinned memory (CUDA's and XPU's) rounds each request up to a power of two, so a buffer can take
nearly twice its bytes. Pieces of other sizes, cut between parameters, add up to little more than the shards.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import networkx as nx

# What a piece costs beside its memory, of all bytes: pinning takes time, and a bucket that is cut is copied in parts.
_PER_PIECE = 1 / 512


def pinned_nbytes(nbytes: int) -> int:
    """Return what torch takes for a request of pinned memory, in bytes."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def pieces_of(sizes: Sequence[int]) -> list[int]:
    """Return how many of ``sizes`` (bytes, which stay in their order) lie in each piece, so that the pieces, rounded by
    ``pinned_nbytes``, take the least: a shortest path. A piece of each power of two takes as many as fit, since what is
    left for the others only shrinks."""
    begins = [0, *itertools.accumulate(sizes)]
    count, per_piece = len(sizes), begins[-1] * _PER_PIECE
    pieces = nx.DiGraph()
    pieces.add_node(0)
    for first in range(count):
        power, end = pinned_nbytes(sizes[first]) or 1, first
        while end < count:
            end = bisect.bisect_right(begins, begins[first] + power) - 1
            pieces.add_edge(first, end, nbytes=pinned_nbytes(begins[end] - begins[first]) + per_piece)
            power *= 2
    return [end - first for first, end in itertools.pairwise(nx.shortest_path(pieces, 0, count, weight="nbytes"))]
