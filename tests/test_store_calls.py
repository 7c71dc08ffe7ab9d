"""What ranks ask of the store grows with none of them: 512 ranks wait, compare and agree with as many calls each as 8.

The ranks are objects of one process, or its threads, over one store that counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.runtime.ranks import agreement, failure, lockstep
from graph_fsdp.runtime.ranks.agreement import RunnableProgram
from graph_fsdp.runtime.ranks.lockstep import Lockstep

SIZES, ON_THREADS = (8, 512), (8, 64)
LOOKS = 10
_rank = threading.local()


class CountingStore:
    """A store that counts the calls of each rank, and the characters that it sends."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.calls: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.store, name)

        def call(*args: Any) -> Any:
            self.calls[_rank.number] += 1
            self.sent[_rank.number] += sum(len(arg) for arg in args if isinstance(arg, str))
            return method(*args)

        return call


@pytest.fixture
def store(fake_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    """Of ranks that each know their number."""
    _rank.number = 0
    made = CountingStore()
    monkeypatch.setattr(dist, "get_rank", lambda: _rank.number)
    monkeypatch.setattr(compat, "default_store", lambda: made)
    monkeypatch.setattr(agreement, "is_shared", lambda ranks: True)
    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 1000.0)  # no look while threads are slow
    return made


class EndsAfterLooks:
    """A collective that takes ``LOOKS`` times as long as a rank waits before it looks."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, patience: Any) -> None:
        self.waits += 1
        if self.waits <= LOOKS:
            raise RuntimeError("Wait timeout")

    def is_completed(self) -> bool:
        return False


def locksteps(size: int, store: CountingStore) -> list[Lockstep]:
    made = []
    for _rank.number in range(size):
        made.append(Lockstep(range(size), store))  # type: ignore[arg-type]
    _rank.number = 0
    return made


def on_threads(size: int, function: Callable[[int], object]) -> None:
    def run(rank: int) -> None:
        _rank.number = rank
        function(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert not any(thread.is_alive() for thread in threads)


def calls_of_a_wait(size: int, store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> int:
    """In a collective, of rank 0."""
    first, *_ = locksteps(size, store)
    monkeypatch.setattr(lockstep, "current", first)
    before = store.calls[0]
    lockstep.finish(EndsAfterLooks(), torch.device("cpu"))
    return store.calls[0] - before


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_waits_in_a_collective(size: int, store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of_a_wait(size, store, monkeypatch) <= LOOKS + 8


@pytest.mark.parametrize("size", ON_THREADS)
def test_ranks_that_compare_their_next_program(size: int, store: CountingStore) -> None:
    ranks, program = locksteps(size, store), RunnableProgram("model 0", "forward", ("gather blocks.0",))
    before = store.calls.copy()
    on_threads(size, lambda rank: ranks[rank].begin(ranks[rank].know(program)))
    assert max((store.calls - before).values()) <= 10
    assert [one.comparisons for one in ranks] == [1] * size


@pytest.mark.parametrize("size", ON_THREADS)
def test_equal_entries_are_not_sent(size: int, store: CountingStore) -> None:
    entries = [f"gather blocks.{i} of a large model" for i in range(10_000)]
    on_threads(size, lambda rank: agreement.agree("large", entries, range(size)))
    names = 40 * size  # the last one asks for each rank's, and names it
    assert max(store.calls.values()) <= 8
    assert sum(store.sent.values()) < 500 * size + 2 * names < sum(map(len, entries)) * size


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_fails_while_others_wait(size: int, store: CountingStore) -> None:
    """The others read that one rank's error."""
    ranks, program = locksteps(size, store), RunnableProgram("model 0", "forward", ("gather blocks.0",))
    base = agreement.prefix_of(range(size), "program")
    store.set(f"{base}0/verdict", '[true, ""]')  # all have come
    ranks[0].begin(ranks[0].know(program))
    _rank.number = size - 1
    ranks[-1].failures.announce(failure.Failure(size - 1, 0, True, False, "region 3", "Broken: no such sample"))
    _rank.number = 0
    before = store.calls[0]
    with pytest.raises(failure.RankFailure, match=f"because rank {size - 1} raised Broken: no such sample in region 3"):
        ranks[0].look_for_others()
    assert store.calls[0] - before <= 12
