"""A rank looks for others that do not run what it has begun, or have failed, and raises the error that says so.

It looks where it waits. Positions tell what is wrong: all ranks begin the same programs, so that nobody may compare, or
compile, in the place of a program that this rank has begun without.

Where the host does not wait for collectives, and so cannot look while it waits, a thread looks (``Watch``). Every
``agreement.PATIENCE_SECONDS`` it reads one key of the store ([Note: news] in ``failure.py``). Where another rank has
failed, or does something else, it logs the error that ranks on the CPU raise, and aborts the process groups, so that
this rank's device, and the main thread that waits for it, go on. The main thread raises that error where it comes back
to a program (``Lockstep.raise_again``).

[Note: collectives that do not end]
A rank that raised, or whose process has ended, may have taken part in all that this one has begun. It is the reason for
an error where a collective that was started before the last look has not ended.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.runtime.ranks import agreement, failure
from graph_fsdp.runtime.ranks.agreement import RankDisagreement, RunnableProgram, read, read_all
from graph_fsdp.runtime.ranks.failure import Failure, RankFailure

log = logging.getLogger(__name__)

_END_SECONDS = 2.0  # for a look under way, when the process ends
COMPILES = "compiles a graph that no rank has run before"
ADVICE = (
    "ranks have to take the same branches, freeze the same parameters, and train or evaluate together: decide by what "
    "all of them share. What each decides for itself, as a solver does its steps, leave it to Python: "
    "@torch.compiler.disable around it, and fullgraph=False"
)


class Lookout:
    """Knows which programs this rank has begun, and reads in the store what others do."""

    def __init__(self, ranks: Sequence[int], store: dist.Store) -> None:
        self.ranks, self.store, self.me = tuple(ranks), store, dist.get_rank()
        self.position = 0  # programs begun; the same on all ranks
        self.failure: RankDisagreement | RankFailure | None = None  # after which nothing can be run any more
        self.last_work: Any = None  # the collective that was waited for last, where the host does not wait
        self._base = agreement.prefix_of(ranks, "program")
        self.failures = failure.Failures(ranks, store, self._base)
        self._programs: dict[str, RunnableProgram] = {}
        self._past: tuple[str, ...] = ()
        self._running = ""  # key of the program that began last
        self._program: Callable[[], Any] = lambda: None  # that program
        self._compared = -1  # position of the last comparison
        self.compilations = 0  # how often this rank has waited for others to compile
        self._settled = -1  # the news that say nothing about this rank's programs
        self._judging = -1  # position of a disagreement that another rank is to describe

    def know(self, program: RunnableProgram) -> str:
        """Register a program; return the key with which it is given to ``begin``."""
        self._programs[program.key] = program
        return program.key

    def look_for_others(self, is_stuck: Callable[[], bool] = lambda: True) -> None:
        """Raise RankDisagreement if another rank does not run a program that this one has begun, RankFailure if it
        failed in one. A host that does not wait says with ``is_stuck`` whether one of its collectives does not end."""
        self.raise_again()
        here, news = self.position - 1, self.failures.news()
        if news == self._settled:
            return
        found = self.failures.preventing(here)
        if found is not None:
            if is_stuck():
                self._fail(str(self._programs[self._running]), self._why(found), here)
        elif self._none_ahead() and not self.failures.standing:
            self._settled = news

    def look_for_ended(self, is_stuck: Callable[[], bool]) -> None:
        """Raise RankFailure if the process of another rank has ended and a collective of this one does not end."""
        if (why := self.failures.ended()) and is_stuck():
            self._fail(str(self._programs[self._running]), why, self.position - 1)

    def waits(self, seconds: float) -> None:
        """Tell the user of a collective that has taken ``seconds``, if that is long."""
        self.failures.tell(self.position - 1, seconds, lambda: self._running_program(failure.place(self._program())))

    def _none_ahead(self) -> bool:
        """Raise RankDisagreement if another rank compares, or compiles, where this one has begun a program without;
        return whether none does so where this one has not been yet."""
        begun = self.position  # read before, and ``_compared`` after: the main thread may go on while a watch looks
        compiling, rank = self._compiling()
        comparing = int(read(self.store, f"{self._base}comparing") or -1)
        compared = self._compared
        if compared < compiling < begun:
            self._disagree(compiling, f"rank {rank} {COMPILES}")
        if not compared < comparing < begun:
            return max(compiling, comparing) < begun
        self._raise_announced(comparing)
        # One rank reads what all have published, and another one if that has not helped at the next look.
        if self.store.add(f"{self._prefix(comparing)}/judges", 1) == 1 or self._judging == comparing:
            names = [f"{self._prefix(comparing)}/{rank}" for rank in self.ranks]
            values = dict(zip(self.ranks, read_all(self.store, names), strict=True))
            if found := [rank for rank in self.ranks if values[rank]]:
                key, _, stopped = values[found[0]].partition("\n")
                own = self._key_at(comparing)
                raised = f"rank {found[0]} has raised in {stopped}"
                self._disagree(comparing, raised if stopped else self._difference(found, key, found[0], own, self.me))
        self._judging = comparing
        return False

    def _disagree(self, position: int, other: str) -> None:
        """Announce what another rank does in place of the program that this one has begun there."""
        own = self._key_at(position)
        self._announce(position, f"rank {self.me} runs {self._programs.get(own, own)}, and {other}; {ADVICE}")
        self._raise_announced(position)

    def _key_at(self, position: int) -> str:
        """Return the key of a program that this rank has begun, if it is one of the last."""
        back = position - self.position
        if back == -1:
            return self._running
        return self._past[back] if -len(self._past) <= back < 0 else f"program {position}"

    def _compiling(self) -> tuple[int, str]:
        """Return the position at which a rank waits for others, and this one among them, to compile with it, and the
        rank; -1 if none does."""
        at, _, rank = read(self.store, f"{self._base}compiling{self.compilations}").partition(" ")
        return int(at or -1), rank

    def _running_program(self, where: str) -> str:
        return f"{where}{' of ' if where else ''}{self._programs[self._running]}"

    def raise_again(self) -> None:
        """Raise the error after which this rank can run nothing any more, if there was one."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def _raise_failures(self, position: int, to_do: str) -> None:
        """Raise RankFailure if a rank will not do ``to_do``, which this one waits for at ``position``."""
        self.failures.news()
        found = self.failures.preventing(position)
        why = self._why(found) if found is not None else self.failures.ended()
        if why:
            self._fail(f"the wait for others to {to_do}", why, position)

    def _why(self, found: Failure) -> str:
        """Describe a failure; one that follows from others names the ranks that have ended, too."""
        dead = failure.gone(self.ranks) if found.of_others else ""
        return f"{found}, and {dead}" if dead else str(found)

    def _fail(self, where: str, why: str, position: int) -> None:
        self.failure = RankFailure(
            f"rank {self.me} cannot end {where}, because {why}; start all ranks again from the last complete checkpoint"
        )
        self.failures.announce(Failure(self.me, position, True, True, where, why))
        self.raise_again()

    def stop(self, error: RankFailure, mine: Failure) -> None:
        """Run no program any more because of an error that is ``mine``, and tell the other ranks."""
        self.failure = error
        self.failures.announce(dataclasses.replace(mine, position=self.position))

    def _announce(self, position: int, message: str) -> None:
        """Announce a verdict for every rank that is, or comes, here. As not all came, they cannot go on together."""
        self.store.compare_set(f"{self._prefix(position)}/verdict", "", json.dumps([False, message]))

    def _raise_announced(self, position: int) -> None:
        self._raise_verdict(read(self.store, f"{self._prefix(position)}/verdict"))

    def _raise_verdict(self, verdict: str) -> None:
        all_came, message = json.loads(verdict) if verdict else (True, "")
        if message and not all_came:
            self.failure = RankDisagreement(message)
        if message:
            raise RankDisagreement(message)

    def _difference(self, ranks: list[int], theirs: str, rank: int, own: str, other: int) -> str:
        """Say how ``theirs``, which ``ranks`` want to run, as ``rank`` does, differs from ``own`` of ``other``."""
        a, b = self._programs.get(theirs), self._programs.get(own)
        text = f"ranks {agreement.listed(ranks)} are about to run {a or theirs} where rank {other} runs {b or own}"
        if a is None or b is None or (a.model, a.phase) != (b.model, b.phase):
            return text
        at, in_a, in_b = agreement.first_difference(a.collectives, b.collectives)
        return f"{text}, but with other collectives: entry {at} is {in_a!r} on rank {rank} and {in_b!r} on rank {other}"

    def _prefix(self, position: int) -> str:
        return f"{self._base}{position}"


class Watch(threading.Thread):
    """Watches the ranks of a default process group, whose ``store`` this is, until it is destroyed or the process
    ends."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(name="graph_fsdp watch", daemon=True)
        self.store = store
        self.watched: list[tuple[Lookout, torch.device]] = []
        self._before: dict[Lookout, Any] = {}  # the last collective, at the last look
        self._ends = threading.Event()
        atexit.register(self.end)

    def run(self) -> None:
        while not self._ends.wait(agreement.PATIENCE_SECONDS) and compat.is_default_store(self.store):
            for lockstep, device in tuple(self.watched):
                try:
                    self._look(lockstep)
                except (RankDisagreement, RankFailure) as error:
                    self._end_collectives(device, error)
                    return
        atexit.unregister(self.end)

    def end(self) -> None:
        """End the thread: it must not run into the end of the interpreter."""
        self._ends.set()
        self.join(_END_SECONDS)

    def _look(self, lockstep: Lookout) -> None:
        before = self._before.get(lockstep)
        self._before[lockstep] = lockstep.last_work

        def is_stuck() -> bool:
            return before is not None and not compat.is_done(before)

        with contextlib.suppress(dist.DistError):  # the process that hosts the store has ended
            lockstep.look_for_others(is_stuck)
        lockstep.look_for_ended(is_stuck)

    def _end_collectives(self, device: torch.device, error: RuntimeError) -> None:
        log.error(f"{error} (this rank does not wait for its collectives any longer)")
        try:
            compat.abort_process_groups(device)
        except RuntimeError as why:
            log.error(f"the process groups cannot be aborted, and end what they run after their timeout: {why}")


_watch: Watch | None = None  # of this process


def watch(lockstep: Lookout, store: dist.Store, device: torch.device) -> None:
    """Watch the other ranks of a lockstep, whose collectives on ``device`` the host does not wait for."""
    global _watch
    if _watch is None or _watch.store is not store or not _watch.is_alive():
        _watch = Watch(store)
        _watch.start()
    _watch.watched.append((lockstep, device))
