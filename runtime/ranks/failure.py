"""Ranks tell each other when one of them fails, or waits for long, so that all can name it.

A rank that fails in or before a program writes what happened into the store. A rank whose collective ends with an error
writes that, too, and calls the roll: it names ranks that raised, with their errors, and those that do not answer, with
the state of their processes where they run on this host. A rank that waits in a collective looks into the store now and
then (``lockstep.finish``), and so answers; after long it warns, once. Where hosts do not wait for collectives, a thread
looks (``Watch``). Nothing else runs in a step in which nothing fails and nobody waits for long
(docs/decisions/ranks_and_collectives.md, "Failure of a rank").

[Note: news]
A look is one access of the store, whatever the number of ranks: a counter, which a rank increases once it has written
something that others have to know. What ranks have written, under keys of their own, is read where that has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.runtime.ranks.agreement import PATIENCE_SECONDS, RankDisagreement, listed, read, read_all

log = logging.getLogger(__name__)

TELL_AFTER_SECONDS = 20.0
# A rank that waits in a collective answers after ``PATIENCE_SECONDS`` at the latest.
ROLL_CALL_SECONDS = 2 * PATIENCE_SECONDS + 2.0
# A rank that raised before it began a program may catch the error and come back.
RETRY_SECONDS = 60.0
_POLL_SECONDS = 0.05
_END_SECONDS = 2.0
_DESCRIBED = 4  # ranks, of those that a long wait is for
_ERROR_CHARACTERS = 600
ADVICE = "start all ranks again from the last complete checkpoint: their collectives do not match any more"

Value = TypeVar("Value")


class RankFailure(RuntimeError):
    """Another rank raised, died or stopped, so that a collective could not end. The message names the ranks and what is
    known about each. The ranks of the process group cannot go on: start them again."""


class CollectiveFailed(RuntimeError):
    """A collective ended with an error of the process group. It becomes a ``RankFailure``."""


# Errors after which collectives of this rank do not end, or have ended.
OUT_OF_STEP = (RankDisagreement, RankFailure, CollectiveFailed)


@contextlib.contextmanager
def raised_instead(cause_of: Callable[[BaseException], BaseException | None]) -> Iterator[None]:
    """Raise, in place of an error of the body, what ``cause_of`` returns for it, unless that is None."""
    try:
        yield
    except BaseException as error:
        cause = cause_of(error)
        if cause is None:
            raise
        raise cause from error


@dataclass(frozen=True)
class Failure:
    """Describes what happened on a rank. ``position`` is that of the program in which it failed, or which it had not
    begun yet. ``of_others``: a collective ended with an error, or did not end because of another rank."""

    rank: int
    position: int
    inside: bool
    of_others: bool
    where: str
    error: str

    def __str__(self) -> str:
        if self.of_others:
            return f"rank {self.rank} could not end {self.where}: {self.error}"
        return f"rank {self.rank} raised {self.error} in {self.where}"


def described(error: BaseException) -> str:
    name = "" if isinstance(error, CollectiveFailed) else f"{type(error).__name__}: "
    text = f"{name}{error}".strip().rstrip(":")
    return text if len(text) <= _ERROR_CHARACTERS else f"{text[:_ERROR_CHARACTERS]}…"


def store_lost(error: BaseException, more: str = "") -> str:
    return (
        f"the store of the process group does not answer{more} ({described(error)}): the process that hosts it, rank 0 "
        "or torchrun's, has ended"
    )


def is_of_process_group(error: BaseException) -> bool:
    """Say whether a collective ended with it. A wait in compiled code (``regions="whole"``) raises the process group's
    own error, a plain RuntimeError that names gloo's source file."""
    if isinstance(error, (CollectiveFailed, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return type(error) is RuntimeError and ("/gloo/" in str(error) or "Application timeout" in str(error))


def place(program: Any, error: BaseException | None = None) -> str:
    """Return the region or collective in which a program (``executor.Program``) raised ``error``, or, without one, in
    which it is now, as the caller of this function; "" where that is not known."""
    walked = traceback.walk_stack(sys._getframe()) if error is None else traceback.walk_tb(error.__traceback__)
    frames = list(walked) if error is None else reversed(list(walked))  # the innermost first
    code = getattr(getattr(program, "ordinary", None), "__code__", None)
    return next((program.places.get(line, "") for frame, line in frames if frame.f_code is code), "")


class Failures:
    """Keeps the failures and long waits of some ranks in the store. ``base`` begins the names of its keys."""

    def __init__(self, ranks: Sequence[int], store: dist.Store, base: str) -> None:
        self.ranks, self.store, self.base = tuple(ranks), store, base
        self.me = dist.get_rank()
        self.mine: Failure | None = None
        self.standing = False  # whether other ranks had failures at the last look
        self._last_own = -1  # position of the last program in which this rank failed by itself
        self._first_seen: dict[Failure, float] = {}
        self._waits = self._told = -1  # the position of a wait, and of one that others were told of
        self._news = -1
        self._processes: Processes = {}
        _answered(lambda: publish_process(store, self.me, os.getpid()))
        _answered(self.add_news)

    def add_news(self) -> None:
        """Have the other ranks read what this one has written."""
        self.store.add(f"{self.base}news", 1)

    def news(self) -> int:
        """Return a number that grows with what ranks have written; see [Note: news]."""
        found = self.store.add(f"{self.base}news", 0)
        if found != self._news:
            self._processes, self._news = processes_of_host(self.store), found
        return found

    def ended(self) -> str:
        """Name the ranks whose processes had been published at the last ``news``, and have ended; "" for none."""
        return ended(self._processes, self.ranks)

    def announce(self, failure: Failure) -> None:
        """Announce what happened on this rank, in place of what it announced before."""
        self.mine = failure
        if failure.inside and not failure.of_others:
            self._last_own = failure.position
        text = json.dumps(dataclasses.astuple(failure))
        _answered(lambda: self.store.set(f"{self.base}failure/{failure.rank}", text))
        _answered(lambda: compat.append(self.store, f"{self.base}failures", f"{failure.rank} "))
        _answered(self.add_news)

    def withdraw(self) -> None:
        """Withdraw this rank's failure: it takes part again."""
        if self.mine is not None:
            name = f"{self.base}failure/{self.mine.rank}"
            self.mine = None
            _answered(lambda: self.store.set(name, ""))  # not deleted: another rank may be about to read it

    def others(self) -> list[Failure]:
        """Return what other ranks have announced, not withdrawn, and has not happened here as well."""
        failed = set(map(int, read(self.store, f"{self.base}failures").split())) - {self.me}
        texts = read_all(self.store, [f"{self.base}failure/{rank}" for rank in sorted(failed)])
        found = [Failure(*json.loads(text)) for text in texts if text]
        return [f for f in found if not f.inside or f.of_others or f.position != self._last_own]

    def preventing(self, position: int) -> Failure | None:
        """Return the failure of another rank because of which the program at ``position`` will not begin or end."""
        now = time.monotonic()
        others = self.others()
        self.standing = bool(others)
        # A rank's own error first: those of others follow from it.
        for failure in sorted(others, key=lambda f: f.of_others):
            if failure.inside and failure.position <= position:
                return failure
            if not failure.inside:
                first_seen = self._first_seen.setdefault(failure, now)
                if now - first_seen >= RETRY_SECONDS or ended(self._processes, [failure.rank]):
                    return failure
        self._first_seen = {f: first for f, first in list(self._first_seen.items()) if f in others}
        return None

    def tell(self, position: int, seconds: float, what: Callable[[], str]) -> None:
        """Warn once of a long wait in ``what`` at a program's ``position``. Called now and then while it lasts."""
        if self._told == position:
            return
        me, names = self.me, [f"{self.base}waits/{rank}" for rank in self.ranks]
        if self._waits != position:
            self.store.set(f"{self.base}waits/{me}", str(position))
            self._waits = position
        if seconds < TELL_AFTER_SECONDS:
            return
        self._told = position
        if self.store.add(f"{self.base}{position}/told", 1) > 1:  # one rank is enough
            return
        found = zip(self.ranks, read_all(self.store, names), strict=True)
        missing = [rank for rank, waits in found if waits != str(position)]
        self.news()
        known = in_words({rank: state_of(self._processes, rank) for rank in missing[:_DESCRIBED]})
        who = (
            f"ranks {listed(missing)} have not come{f' ({known})' if known else ''}; ranks have to run the model "
            "equally often (a data loader that gives one of them fewer batches?)"
            if missing
            else "all other ranks wait now, too: it takes long, as on a busy machine or a slow network"
        )
        if raised := [failure for failure in self.others() if not failure.of_others]:  # and came back from its wait
            who = f"{'; '.join(map(str, raised))}, and has not come since"
        log.warning(f"rank {me} has waited {seconds:.0f} s in {what()}, where {who}. It goes on waiting")

    def call_the_roll(self, mine: Failure) -> str:
        """Return an error message that says which ranks are the reason that a collective ended with an error here.
        Takes ``ROLL_CALL_SECONDS`` at most."""
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        what = f"rank {mine.rank}: {mine.where} failed"
        while True:
            try:
                self.news()
                others = self.others()
                answered = {failure.rank for failure in others}
                missing = [rank for rank in self.ranks if rank != mine.rank and rank not in answered]
                states = {rank: state_of(self._processes, rank) for rank in missing}
            except RuntimeError as error:
                return f"{what} ({mine.error}), and {store_lost(error, ' either')}; {ADVICE}"
            causes = "; ".join(str(failure) for failure in others if not failure.of_others)
            gone = {rank: state for rank, state in states.items() if state and "runs" not in state}
            if causes or gone:
                causes = causes or f"ranks {listed(list(gone))} do not take part ({in_words(gone)})"
                return f"{what}, because {causes}; {ADVICE} ({mine.error})"
            if not missing:
                return (
                    f"{what} ({mine.error}), and all other ranks were in a collective, too: a connection between them "
                    f"broke, or one took longer than the timeout of the process group; {ADVICE}"
                )
            if time.monotonic() > deadline:
                names = in_words(states)
                return (
                    f"{what}, and ranks {listed(missing)} did not answer within {ROLL_CALL_SECONDS:.0f} s"
                    f"{f' ({names})' if names else ''}: killed, stopped, out of reach, or busy with something else; "
                    f"look at their output; {ADVICE} ({mine.error})"
                )
            time.sleep(_POLL_SECONDS)


def interrupted(error: BaseException, what: str) -> None:
    """Say where this rank was when the user, or a launcher, ended it: nobody may see its traceback."""
    if isinstance(error, KeyboardInterrupt):
        log.warning(f"rank {dist.get_rank()} was interrupted in {what}")


def ended(processes: Processes, ranks: Sequence[int]) -> str:
    """Name those of ``ranks`` whose ``processes`` have ended; "" for none."""
    return in_words({rank: state for rank in ranks if "ended" in (state := state_of(processes, rank))})


def in_words(states: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {state}" for rank, state in states.items() if state)


def gone(ranks: Sequence[int]) -> str:
    """Call ``ended`` for an error message about a connection that broke, where the store may be gone, too. The kernel
    closes the connections of a process shortly before it ends it."""
    deadline = time.monotonic() + _END_SECONDS
    processes = _answered(lambda: processes_of_host(compat.default_store())) or {}
    while not (found := ended(processes, ranks)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


# Rank → its process id and when that started, of the ranks of a host.
Processes: TypeAlias = dict[int, tuple[int, str]]


def publish_process(store: dist.Store, rank: int, pid: int) -> None:
    """Publish the process of a rank, so that other ranks of its host can see whether it exists."""
    compat.append(store, _name_of_host(), f"{rank} {pid} {started_at(pid)}\n")


def processes_of_host(store: dist.Store) -> Processes:
    """Return the processes that ranks of this host have published."""
    lines = map(str.split, read(store, _name_of_host()).splitlines())
    return {int(line[0]): (int(line[1]), line[2]) for line in lines if len(line) == 3}


def _name_of_host() -> str:
    return f"graph_fsdp/processes/{' '.join(kernel_of_host())}"


def state_of(processes: Processes, rank: int) -> str:
    """Return the state of the rank's process; "" where it is on another host, or this host's kernel does not say."""
    if rank not in processes:
        return ""
    pid, started = processes[rank]
    letter = _stat(pid)[0] if started_at(pid) == started else "X"
    if letter in "XxZ":
        return f"its process {pid} has ended"
    return f"its process {pid} {'is stopped' if letter in 'Tt' else 'runs'}"


def _answered(ask: Callable[[], Value]) -> Value | None:
    """Return what the store says; None where it is gone: there is another error to report already."""
    try:
        return ask()
    except RuntimeError:
        return None


def kernel_of_host() -> list[str]:
    """Identify the kernel and its process ids: ranks with equal results can look at each other's. Linux only."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return ["", ""]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; "X" (dead) where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def started_at(pid: int) -> str:
    """Return when a process started, in the kernel's ticks, as ids are used again; "" where unknown."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""
