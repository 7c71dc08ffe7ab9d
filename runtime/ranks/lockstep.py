"""Ranks run the same programs in the same order, or say so before one of them starts a collective.

[Note: predicted programs]
A model may have several graphs whose collectives differ: for training and evaluation, other branches of its Python
code, other frozen parameters. Ranks have agreed to each, but each rank decides which one runs next; where two differ,
a collective would hang, or exchange data of different parameters. To compare before every program would cost every
step. So every rank predicts the next program from those that ran before, as a processor predicts branches. It runs the
predicted program without asking, or compares another one with those of all ranks through the store. Predictions follow
from the ranks' common past alone, so all predict alike, and nobody runs an unpredicted program alone.

A rank that runs the predicted program while another one compares waits in its first collective. On the CPU it looks
into the store every few seconds (``agreement.PATIENCE_SECONDS``), finds the other rank there, and both raise. On other
devices the host does not wait for collectives, and may have begun later programs: a thread looks (``Watch``). Who
compares, or waits for others to compile, gives up ``MARGIN_SECONDS`` before collectives end by the timeout of their
process group.

[Note: programs that raise]
A rank that raises in a program says so in the store, and those that wait in later collectives raise a ``RankFailure``
(``failure.py``). Ranks that all raised in the same place are still in step: before its next program, a rank that raised
compares that place with the others.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.runtime.ranks import agreement, failure
from graph_fsdp.runtime.ranks.agreement import RankDisagreement
from graph_fsdp.runtime.ranks.failure import CollectiveFailed, Failure, RankFailure
from graph_fsdp.runtime.ranks.lookout import ADVICE, COMPILES, Lookout, watch

Runnable: TypeAlias = Callable[[list[Any]], Any]

MARGIN_SECONDS = 30.0  # before the timeout of a process group; a tenth of a short one
# A process group ends by itself what a rank that is gone takes part in; seldom one of gloo's has waited for ever.
_ROUNDS_WITHOUT_A_RANK = 3
_DEPTH = 4  # programs of the past that a prediction looks at
_MOST_PREDICTIONS = 4096


class Lockstep(Lookout):
    """Runs programs in the same order on some ranks. ``comparisons`` counts those with other ranks."""

    def __init__(self, ranks: Sequence[int], store: dist.Store) -> None:
        super().__init__(ranks, store)
        self.default_store = store
        self.comparisons = 0
        self._predictions: dict[tuple[str, ...], str] = {}
        self._stopped = ""  # where the program raised that began last
        self._timeout = 1800.0  # of a process group of which nothing is known
        self._groups: set[str] = set()
        self.is_watched = False
        self._compiling_since = 0.0

    def runs_on(self, groups: Iterable[str], device: torch.device) -> None:
        """Take the timeout of the process groups of these names, which run a model's collectives on ``device``, and
        watch the other ranks where this host does not wait for them."""
        for group in map(compat.resolve_group, set(groups) - self._groups):
            seconds = compat.timeout_of(group, device)
            self._timeout = min(seconds, self._timeout) if self._groups else seconds
            self._groups.add(group.group_name)
            if not self.is_watched and not compat.host_waits(group, device):
                self.is_watched = True
                # A wait of another thread at the same store would keep the watch waiting, too.
                self.store = self.failures.store = compat.clone_store(self.store)
                watch(self, self.default_store, device)

    @property
    def timeout(self) -> float:
        """Return after how many seconds this rank stops to wait for others to come, which may wait in a collective."""
        return self._timeout - min(MARGIN_SECONDS, self._timeout / 10)

    def begin(self, key: str, program: Any = None) -> None:
        """Begin a program; called before it starts its first collective.

        Raises:
            RankDisagreement: other ranks are about to run another program.
            RankFailure: other ranks have failed and cannot run this one.
        """
        global current
        if self.failure is not None or self.failures.mine is not None:  # this rank has failed, and runs again
            self.raise_again()
            if not self._stopped:
                self.failures.withdraw()
        # By the longest past that was met before.
        predicted = next((self._predictions[past] for past in _ends(self._past) if past in self._predictions), None)
        try:
            if self._stopped or predicted != key:
                self._compare(key)
        finally:
            self.position += 1
            self._stopped = ""
        if self._predictions.get(self._past) != key:
            if len(self._predictions) > _MOST_PREDICTIONS:
                self._predictions.clear()
            self._predictions.update(dict.fromkeys(_ends(self._past), key))
        self._past = (*self._past[1 - _DEPTH :], key)
        self._running = key
        self._program = weakref.ref(program) if program is not None else lambda: None
        current = self

    def around(self, run: Runnable, program: Any, key: str) -> Runnable:
        """Wrap ``run``, which runs ``program``, so that it begins when all ranks are about to run it, and tells them if
        it raises."""

        def run_in_step(args: list[Any]) -> Any:
            self.begin(key, program)
            with self.telling(program):
                return run(args)

        return run_in_step

    def telling(self, program: Any = None) -> contextlib.AbstractContextManager[None]:
        """Tell the other ranks if the body raises: ``program``, which began last, or a part of it. Raises RankFailure
        instead if other ranks are the reason."""
        return failure.raised_instead(lambda error: self._failed(error, program))

    def compiling(self, *, again: bool = False) -> None:
        """Announce that this rank is about to wait for others to compile what they have not run before. Another rank
        may be in the program that is predicted here, and learns of it. ``again``: it has been announced, and another
        wait begins."""
        self.raise_again()
        if self.failures.mine is not None and not self.failures.mine.inside:
            self.failures.withdraw()  # it takes part again
        if not again:
            self.store.set(f"{self._base}compiling{self.compilations}", f"{self.position} {self.me}")
            self.failures.add_news()
            self.compilations += 1
            self._settled = -1  # others may have gone on to the next
        self._compiling_since = time.monotonic()

    def compiled(self) -> None:
        """Withdraw what ``compiling`` announced, if it did: a later process group may have the same store."""
        if self._compiling_since:
            self._compiling_since = 0.0
            agreement.delete(self.store, f"{self._base}compiling{self.compilations - 1}")

    def check_refused(self, *, is_late: bool = True) -> None:
        """Raise RankDisagreement if another rank runs a program here, while this one waits to compile, RankFailure if
        it failed. ``is_late``: others should have come."""
        self._raise_announced(self.position)
        self._raise_failures(self.position, "compile with this rank")
        if not is_late:
            return
        seconds = time.monotonic() - self._compiling_since
        self.failures.tell(self.position, seconds, lambda: "the wait for others to compile with it")

    def _failed(self, error: BaseException, program: Any) -> RankFailure | RankDisagreement | None:
        """Tell the other ranks of an error; return what to raise in its place where they are the reason, else None."""
        if isinstance(error, (RankDisagreement, RankFailure)) or self.failure is not None:  # others know
            # Where the watch has aborted collectives, what this rank raises may follow from that.
            follows = self.is_watched and isinstance(error, Exception)
            return self.failure if follows and not isinstance(error, (RankDisagreement, RankFailure)) else None
        where = self._running_program(failure.place(program, error))
        failure.interrupted(error, where)
        of_others = failure.is_of_process_group(error)
        mine = Failure(self.me, self.position - 1, True, of_others, where, failure.described(error))
        self.failures.announce(mine)
        if of_others:
            self.failure = RankFailure(self.failures.call_the_roll(mine))
            return self.failure
        # Whether a collective was started that raised in its start, only this rank knows.
        self._stopped = f"{where} on rank {mine.rank}" if " start of " in where else where
        self._past = (f"failed at {self.position}",)  # which nothing was predicted from
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised on rank {mine.rank} in {where}")
        return None

    def failed_outside(self, error: BaseException, where: str) -> RankFailure | None:
        """Tell the other ranks, which may run a program, that a forward raised outside of one. Return what to raise in
        place of an error of the store, where ranks wait for each other; else None."""
        if isinstance(error, dist.DistNetworkError) and self.failure is None:
            lost = failure.store_lost(error)
            self.failure = RankFailure(f"rank {self.me} cannot end {where}, because {lost}; {failure.ADVICE}")
            return self.failure
        own = self.failures.mine
        if own is not None and own.position == self.position - 1:  # the program has told
            return None
        if not isinstance(error, (RankDisagreement, RankFailure)):
            said = failure.described(error)
            self.failures.announce(Failure(self.me, self.position, False, False, where, said))
        return None

    def _compare(self, key: str) -> None:
        self.comparisons += 1
        position, begin, me, program = self.position, time.monotonic(), self.me, self._programs[key]
        what, timeout = f"the wait for others to run {program}", self.timeout
        has_come = False

        def refused() -> None:
            nonlocal has_come
            if not has_come:  # a rank that runs another program here learns of it; the others are coming
                self.failures.add_news()
                has_come = True
                return
            # Another one that compiles here waits for this one in vain, and one that has failed does not come.
            self._raise_failures(position, f"run {program}")
            self._none_ahead()
            compiling, rank = self._compiling()
            if compiling == position:
                text = f"rank {me} is about to run {program}, and rank {rank} {COMPILES}; {ADVICE}"
                self._announce(position, text)
            self.failures.tell(position, time.monotonic() - begin, lambda: what)

        def missing(late: list[int]) -> str:
            text = (
                f"rank {me} waited {timeout:.0f} s for ranks {agreement.listed(late)} to run {program}, and "
                f"they did not; they run another one, have failed, or hang: look at their output; {ADVICE}"
            )
            return json.dumps([False, text])

        value = f"{key}\n{self._stopped}" if self._stopped else key
        try:
            # Where another rank compares at a position that this one has passed without, that stays: it is wrong there.
            known = "" if self._compared < 0 else str(self._compared)
            self.store.compare_set(f"{self._base}comparing", known, str(position))
            where = (self.store, self._prefix(position), self.ranks)
            verdict = agreement.compare(*where, value, self._verdict, missing, timeout, refused)
        except KeyboardInterrupt as error:
            failure.interrupted(error, what)
            raise
        finally:
            self._compared = position
        agreement.delete(self.store, f"{self._prefix(position)}/{me}")
        self._raise_verdict(verdict)
        if self._stopped:
            self.failures.withdraw()

    def _verdict(self, published: dict[int, str]) -> str:
        """Return whether all ranks may go on, and what is wrong: ranks raised in different places, or are about to run
        different programs. Called on the last one to come."""
        if self._compared >= 0:  # everyone has read that one
            for name in ("arrived", "verdict"):
                agreement.delete(self.store, f"{self._prefix(self._compared)}/{name}")
        values = {rank: value.partition("\n") for rank, value in published.items()}
        first = self.ranks[0]
        key, _, stopped = values[first]
        elsewhere = [rank for rank in self.ranks if values[rank][2] != stopped]
        different = [rank for rank in self.ranks if values[rank][0] != key]
        text = ""
        if elsewhere:
            raised = [(rank, values[rank][2]) for rank in (first, elsewhere[0])]
            told = [f"rank {rank} {f'raised in {place}' if place else 'did not raise'}" for rank, place in raised]
            text = f"{' and '.join(told)}, so that their collectives do not match any more; start all ranks again"
        elif different:
            text = f"{self._difference(different, values[different[0]][0], different[0], key, first)}; {ADVICE}"
        return json.dumps([not elsewhere, text])


def _ends(past: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the ends of the past, from all of it to nothing."""
    return (past[begin:] for begin in range(len(past) + 1))


_lockstep_of: dict[tuple[int, ...], Lockstep] = {}
current: Lockstep | None = None  # that of the program that began last


def lockstep_of(ranks: Sequence[int]) -> Lockstep:
    """Return the ``Lockstep`` that all models on these ranks share."""
    store, key = compat.default_store(), tuple(ranks)
    found = _lockstep_of.get(key)
    if found is None or found.default_store is not store:  # another process group since
        found = _lockstep_of[key] = Lockstep(ranks, store)
    return found


def finish(work: Any, device: torch.device) -> None:
    """Wait for a collective; see [Note: predicted programs]."""
    lockstep = current
    if lockstep is not None and lockstep.is_watched:
        lockstep.last_work = work
        work.wait()
        lockstep.raise_again()
        return
    if lockstep is None or device.type != "cpu":
        work.wait()
        return
    patience = datetime.timedelta(seconds=agreement.PATIENCE_SECONDS)
    begin, rounds_without = time.monotonic(), 0  # a rank that has ended
    while True:
        try:
            work.wait(patience)
            return
        except RuntimeError as error:
            if work.is_completed() or rounds_without > _ROUNDS_WITHOUT_A_RANK:
                raise CollectiveFailed(str(error)) from error
        lockstep.look_for_others()
        lockstep.waits(time.monotonic() - begin)
        rounds_without = rounds_without + 1 if lockstep.failures.ended() else 0
