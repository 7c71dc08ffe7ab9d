"""The arithmetic of when gathers start, on numbers written by hand."""

from __future__ import annotations

import pytest

from graph_fsdp.passes import BudgetError
from graph_fsdp.passes.analysis.room import Room
from graph_fsdp.passes.analysis.simulate import Task
from graph_fsdp.passes.transforms.schedule import (
    Gathers,
    Segments,
    at_distance,
    choose,
    fit,
    latest_starts,
    units_ahead,
)


def gathers(*nbytes: int, last: list[int] | None = None) -> Gathers:
    """Bucket ``k`` is used from its own wait to the next one unless ``last`` says otherwise."""
    count = len(nbytes)
    return Gathers("forward", [f"u{k}" for k in range(count)], list(nbytes), last or list(range(1, count + 1)), [])


def segments(compute: list[float], durations: list[float], reductions: dict[int, float] | None = None) -> Segments:
    """``compute[k]`` seconds after wait ``k``; ``reductions``: seconds of one that starts after that."""
    gathers = [Task(seconds, "lane") for seconds in durations]
    tasks, arrivals, now = [], [], 0.0
    for k, seconds in enumerate(compute):
        arrivals.append(now)
        tasks += [Task(waits_for=gathers[k]), Task(seconds)]
        if reductions and k in reductions:
            tasks.append(Task(reductions[k], "lane"))
        now += seconds
    return Segments(tasks, gathers, arrivals)


def test_a_gather_starts_as_late_as_still_hides_it() -> None:
    # Waits at 0, 10, 20, 30, 40 s of compute. A gather of 9 s fits into the 10 s before it is needed …
    arrivals = [0.0, 10.0, 20.0, 30.0, 40.0]
    assert latest_starts(arrivals, [9.0] * 5) == [-1, 0, 1, 2, 3]
    # … one of 15 s needs to start two buckets ahead, and holds the lane for the one before it …
    assert latest_starts(arrivals, [9.0, 9.0, 9.0, 9.0, 15.0]) == [-1, -1, 0, 1, 2]
    # … and where nothing can hide them they start at the top, in a row.
    assert latest_starts(arrivals, [30.0] * 5) == [-1, -1, -1, -1, 1]


def test_the_clock_counts_what_is_exposed() -> None:
    # Compute four times 10 s; gathers of 5 s. Serial: each is exposed. One ahead: only the first.
    clock = segments([10.0] * 4, [5.0] * 4)
    assert clock.seconds([0, 1, 2, 3]) == 60
    assert clock.seconds(at_distance(4, 1)) == 45


def test_a_reduction_that_holds_the_lane_makes_gathers_start_earlier() -> None:
    # A reduction of 8 s comes at the end of bucket 0's compute, when the gather of bucket 2 would start.
    reductions = {0: 8.0}
    clock = segments([10.0, 10.0, 10.0], [1.0, 1.0, 9.0], reductions)
    late, early = [-1, 0, 1], [-1, 0, 0]
    assert clock.seconds(late) > clock.seconds(early)
    assert choose(gathers(4, 4, 4), clock, budget=100) == early
    assert choose(gathers(4, 4, 4), clock, budget=8) == late, "what is faster does not fit"


def test_of_equally_fast_schedules_the_one_that_holds_least_is_chosen() -> None:
    clock = segments([10.0] * 4, [1.0] * 4)
    assert clock.seconds(at_distance(4, 3)) == clock.seconds(at_distance(4, 1))
    assert choose(gathers(4, 4, 4, 4), clock, budget=100) == at_distance(4, 1)


def test_without_a_budget_the_peak_of_one_unit_ahead_is_the_limit() -> None:
    # Long computations first, then long gathers: those could run three ahead, beside the computations.
    clock = segments([10.0, 10.0, 1.0, 1.0], [1.0, 1.0, 10.0, 10.0])
    buckets = gathers(4, 4, 4, 4)
    assert clock.seconds(choose(buckets, clock, budget=16)) == 23
    within = choose(buckets, clock, None)
    assert clock.seconds(within) == clock.seconds(at_distance(4, 1)) == 32
    assert max(buckets.live(within)) == max(buckets.live(at_distance(4, 1))) == 8


def test_more_than_one_unit_ahead_takes_room_and_has_to_save_a_hundredth() -> None:
    buckets = gathers(4, 4, 4, 4)
    clock = segments([10.0, 10.0, 1.0, 1.0], [1.0, 1.0, 10.0, 10.0])
    assert clock.seconds(choose(buckets, clock, None, Room(16))) == 23 < clock.seconds(choose(buckets, clock, None))
    assert max(buckets.live(choose(buckets, clock, None, Room(100)))) == 12, "three units ahead save nothing more"
    far = segments([10.0, 10.0, 10.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 10.0, 10.0, 10.0])
    times = [far.seconds(choose(gathers(*[4] * 6), far, None, Room(most))) for most in (0, 12, 16, 24)]
    assert times == sorted(times, reverse=True) and times[2] < times[1] < times[0]
    assert choose(buckets, clock, None, Room(11)) == choose(buckets, clock, None), "no room for a bucket more"
    full = Room(16, lambda: 23)
    assert choose(buckets, clock, None, full) == choose(buckets, clock, None), "none is left beside the step"
    for gained, is_taken in ((0.05, False), (0.5, True)):  # of 40 s
        clock = segments([10.0] * 4, [0.0, 0.0, 0.0, 10.0 + gained])
        assert (clock.seconds(choose(buckets, clock, None, Room(16))) == 40.0) is is_taken
        assert clock.seconds(choose(buckets, clock, None)) == 40.0 + gained


def test_where_the_link_is_late_no_gather_starts_further_than_one_unit_ahead() -> None:
    # As in backward of a large mesh: the link has time while the head computes, and is late from then on.
    clock = segments([30.0] + [4.0] * 9, [1.0] + [10.0] * 9, reductions=dict.fromkeys(range(10), 20.0))
    buckets = gathers(*[4] * 10)
    found, one = choose(buckets, clock, None, Room(16)), units_ahead(buckets)
    assert clock.seconds(found) == clock.seconds(at_distance(10, 3)) < clock.seconds(one), "three are worth it first"
    assert found == [-1, -1, -1, 0, *one[4:]], "and nothing behind them"
    assert buckets.live(found)[5:] == buckets.live(one)[5:]


def test_one_unit_ahead_starts_all_buckets_of_a_unit_when_the_one_before_begins() -> None:
    units = ["embed", "a", "a", "a", "b", "b", "head"]
    buckets = Gathers("forward", units, [1] * 7, list(range(1, 8)), [])
    assert units_ahead(buckets) == [-1, 0, 0, 0, 1, 1, 4]
    assert units_ahead(buckets, 2) == [-1, -1, -1, -1, 0, 0, 1]
    assert all(units_ahead(gathers(1, 1, 1), n) == at_distance(3, n) for n in (1, 2))


def test_live_bytes_count_from_the_start_of_the_gather_to_the_last_use() -> None:
    buckets = gathers(1, 10, 100)
    # Interval t ends with wait t. Serial: a buffer is there from the interval after its own wait.
    assert buckets.live([0, 1, 2]) == [0, 1, 10, 100]
    assert buckets.live([-1, 0, 1]) == [1, 11, 110, 100]
    kept = Gathers("backward", ["u"], [5], [1], [(100, 1), (1000, 0)])
    assert kept.live([0]) == [1100, 105]


def test_a_gather_that_does_not_fit_starts_later() -> None:
    buckets = gathers(4, 4, 4, 4)
    assert fit(buckets, [-1, -1, -1, -1], budget=100) == [-1, -1, -1, -1]
    assert fit(buckets, [-1, -1, -1, -1], budget=8) == [-1, -1, 1, 2]
    assert fit(buckets, [-1, -1, -1, -1], budget=4) == [-1, 1, 2, 3]


def test_a_budget_that_a_bucket_does_not_fit_into_names_unit_and_bytes() -> None:
    with pytest.raises(
        BudgetError, match=r"budget of 7 bytes is too small for unit 'u1' in the forward graph.* 8 bytes"
    ):
        fit(gathers(4, 8, 4), [-1, 0, 1], budget=7)
    # The first is used until the end: both are needed at the same time.
    with pytest.raises(BudgetError, match=r"unit 'u1'.* 12 bytes"):
        fit(gathers(4, 8, last=[2, 2]), [-1, 0], budget=11)
