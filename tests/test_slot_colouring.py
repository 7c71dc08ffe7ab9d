"""Which buffers share a slot, as a colouring of the intervals in which they live."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from graph_fsdp.passes.transforms.slots import Interval, assign, colour, most_at_once

# Colouring. Intervals are (begin, end, bytes).


@pytest.mark.parametrize(
    ("intervals", "slots", "sizes"),
    [
        ([], [], []),
        ([(0, 3, 64), (4, 6, 64)], [0, 0], [64]),
        ([(0, 3, 64), (3, 6, 64)], [0, 1], [64, 64]),  # both are live at 3
        ([(0, 9, 64), (2, 5, 64), (4, 8, 64), (6, 9, 64)], [0, 1, 2, 1], [64, 64, 64]),
        ([(0, 5, 64), (3, 8, 64), (6, 11, 64), (9, 14, 64)], [0, 1, 0, 1], [64, 64]),  # layers, one gathered ahead
        ([(0, 4, 192), (1, 4, 128), (5, 9, 128)], [0, 1, 1], [192, 128]),  # the smallest that is large enough
        ([(0, 4, 128), (5, 9, 192)], [0, 0], [192]),  # grown
        ([(0, 2, 1024), (3, 9, 64)], [0, 1], [1024, 64]),  # 64 bytes do not hold 1,024
        ([(0, 2, 1024), (4, 6, 64), (7, 9, 1024)], [0, 0, 0], [1024]),  # what is idle anyway costs nothing
    ],
)
def test_slots_of_intervals(intervals: list[Interval], slots: list[int], sizes: list[int]) -> None:
    assert assign(intervals) == (slots, sizes)


def test_a_large_buffer_at_each_end_takes_one_large_slot() -> None:
    """An embedding, an even number of layers, a head, each gathered while the one before it is used. In order of
    ``begin`` the head would find the layers' slot free and double what is allocated."""
    ends = [(0, 10, 4096), *((10 * k + 5, 10 * k + 20, 128) for k in range(4)), (45, 60, 4096)]
    assert sum(colour(ends, [0] * len(ends))[1]) == 2 * 4096
    slots, sizes = assign(ends)
    assert (sizes, slots) == ([4096, 128, 128], [0, 1, 2, 1, 2, 0])


def intervals_at_random(generator: random.Random, sizes: list[int]) -> list[Interval]:
    begins = sorted(generator.randrange(30) for _ in range(generator.randrange(1, 25)))
    return [(begin, begin + generator.randrange(12), generator.choice(sizes)) for begin in begins]


def overlaps(intervals: list[Interval]) -> nx.Graph:
    graph = nx.Graph()
    graph.add_nodes_from(range(len(intervals)))
    pairs = ((i, k) for k in graph for i in range(k))
    graph.add_edges_from(
        (i, k) for i, k in pairs if max(intervals[i][0], intervals[k][0]) <= min(intervals[i][1], intervals[k][1])
    )
    return graph


@pytest.mark.parametrize("seed", range(50))
def test_equal_buffers_need_as_many_slots_as_are_live_at_once(seed: int) -> None:
    intervals = intervals_at_random(random.Random(seed), [128])
    graph = overlaps(intervals)
    slots, sizes = assign(intervals)
    assert all(slots[i] != slots[k] for i, k in graph.edges)
    assert sizes == [128] * max(len(clique) for clique in nx.find_cliques(graph))


@pytest.mark.parametrize("seed", range(50))
def test_bytes_allocated_at_once_are_bounded(seed: int) -> None:
    """By the bytes of the k largest buffers where k are live at once, and by twice the live bytes per power of two."""
    intervals = intervals_at_random(random.Random(seed), [64, 128, 192, 1024, 4096])
    graph = overlaps(intervals)
    slots, sizes = assign(intervals)
    assert all(slots[i] != slots[k] for i, k in graph.edges)
    assert all(nbytes <= sizes[slot] for (_, _, nbytes), slot in zip(intervals, slots, strict=True))
    held = [[i for i, s in zip(intervals, slots, strict=True) if s == slot] for slot in range(len(sizes))]
    allocated = [(min(i[0] for i in own), max(i[1] for i in own), max(i[2] for i in own)) for own in held]
    assert [size for _, _, size in allocated] == sizes, "no slot is larger than its largest buffer"
    at_once = most_at_once(allocated)
    count = max(len(clique) for clique in nx.find_cliques(graph))
    largest = sorted((nbytes for _, _, nbytes in intervals), reverse=True)[:count]
    alike = [[i for i in intervals if i[2].bit_length() == power] for power in range(14)]
    assert most_at_once(intervals) <= at_once <= min(sum(largest), 2 * sum(map(most_at_once, alike)))
