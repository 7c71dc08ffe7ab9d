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
devices the host does not wait for collectives: the rank that compares raises after ``TIMEOUT_SECONDS``, and the others
end by the timeout of their process group, or by their launcher.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.runtime.ranks import agreement, failure
from graph_fsdp.runtime.ranks.agreement import RankDisagreement, RunnableProgram, read
from graph_fsdp.runtime.ranks.failure import CollectiveFailed, Failure, RankFailure

Runnable: TypeAlias = Callable[[list[Any]], Any]

TIMEOUT_SECONDS = 1800.0  # as long as a process group waits: another rank may be writing a checkpoint
# A process group ends by itself what a rank that is gone takes part in; seldom one of gloo's has waited for ever.
_ROUNDS_WITHOUT_A_RANK = 3
_DEPTH = 4  # programs of the past that a prediction looks at
_MOST_PREDICTIONS = 4096
_COMPILES = "compiles a graph that no rank has run before"
_ADVICE = (
    "ranks have to take the same branches, freeze the same parameters, and train or evaluate together: decide by what "
    "all of them share"
)


class Lockstep:
    """Runs programs in the same order on some ranks. ``comparisons`` counts those with other ranks."""

    def __init__(self, ranks: Sequence[int], store: dist.Store) -> None:
        self.ranks, self.store = tuple(ranks), store
        self.position = 0  # programs begun; the same on all ranks
        self.comparisons = 0
        self._base = agreement.prefix_of(ranks, "program")
        self._programs: dict[str, RunnableProgram] = {}
        self._past: tuple[str, ...] = ()
        self._predictions: dict[tuple[str, ...], str] = {}
        self._running = ""  # key of the program that began last
        self._program: Callable[[], Any] = lambda: None  # that program
        self._failure: RankDisagreement | RankFailure | None = None  # after which nothing can be run any more
        self._stopped = ""  # where the program raised that began last
        self.failures = failure.Failures(ranks, store, self._base)
        self.failures.publish_process()
        self._compared = -1  # position of the last comparison
        self._compiled = 0  # how often this rank has waited for others to compile
        self._compiling_since = 0.0

    def know(self, program: RunnableProgram) -> str:
        """Register a program; return the key with which it is given to ``begin``."""
        self._programs[program.key] = program
        return program.key

    def begin(self, key: str, program: Any = None) -> None:
        """Begin a program; called before it starts its first collective.

        Raises:
            RankDisagreement: other ranks are about to run another program.
            RankFailure: other ranks have failed and cannot run this one.
        """
        global _current
        if self._failure is not None or self.failures.mine is not None:  # this rank has failed, and runs again
            self._raise_again()
            if not self._stopped:
                self.failures.withdraw()
        if self._predictions.get(past := self._past) != key:
            try:
                if self._stopped or self._predicted() != key:
                    self._compare(key)
            finally:
                self.position += 1
                self._stopped = ""
            self._learn(key)
        else:
            self.position += 1
        self._past = (*past[1 - _DEPTH :], key)
        self._running = key
        self._program = weakref.ref(program) if program is not None else lambda: None
        _current = self

    def around(self, program: Runnable, key: str) -> Runnable:
        """Wrap ``program``, so that it begins when all ranks are about to run it, and tells them if it raises."""

        def run(args: list[Any]) -> Any:
            self.begin(key, program)
            with self.telling(program):
                return program(args)

        vars(run)["_boxed_call"] = True  # see Program
        return run

    @contextlib.contextmanager
    def telling(self, program: Any = None) -> Iterator[None]:
        """Tell the other ranks if the body raises: ``program``, which began last, or a part of it. Raises RankFailure
        instead if other ranks are the reason."""
        try:
            yield
        except BaseException as error:
            cause = self._failed(error, program)
            if cause is None:
                raise
            raise cause from error

    def compiling(self) -> None:
        """Announce that this rank is about to wait for others to compile what they have not run before. Another rank
        may be in the program that is predicted here, and learns of it."""
        self._raise_again()
        self.store.set(f"{self._base}compiling{self._compiled}", f"{self.position} {dist.get_rank()}")
        self._compiled += 1
        self._compiling_since = time.monotonic()

    def check_refused(self) -> None:
        """Raise RankDisagreement if another rank runs a program here, while this one waits to compile, RankFailure if
        it failed."""
        self._raise_announced(self.position)
        self._raise_failures(self.position, "compile with this rank")
        seconds = time.monotonic() - self._compiling_since
        self.failures.tell(self.position, seconds, lambda: "the wait for others to compile with it")

    def look_for_others(self) -> None:
        """Raise RankDisagreement if another rank does not run the collective that this one is in, RankFailure if it
        failed."""
        self._raise_again()
        here = self.position - 1
        found = self.failures.preventing(here)
        if found is not None:
            self._fail(str(self._programs[self._running]), self._why(found), here)
        if self._compared == here:  # all ranks are in this program
            return
        self._raise_announced(here)
        other = self._other_than_here(here)
        if other:
            text = f"rank {dist.get_rank()} runs {self._programs[self._running]}, and {other}; {_ADVICE}"
            self._announce(here, text)
            self._raise_announced(here)

    def waits(self, seconds: float) -> None:
        """Tell the user of a collective that has taken ``seconds``, if that is long."""

        def what() -> str:
            return self._running_program(failure.place(self._program()))

        self.failures.tell(self.position - 1, seconds, what)

    def _other_than_here(self, here: int) -> str:
        """Say what another rank does in place of the program that is predicted here; "" if none does."""
        rank = self._compiling_at(here)
        if rank:
            return f"rank {rank} {_COMPILES}"
        values = {rank: read(self.store, f"{self._prefix(here)}/{rank}") for rank in self.ranks}
        found = [rank for rank in self.ranks if values[rank]]
        if not found:
            return ""
        other = found[0]
        key, _, stopped = values[other].partition("\n")
        if stopped:
            return f"rank {other} has raised in {stopped}"
        return self._difference(found, key, other, self._running, dist.get_rank())

    def _compiling_at(self, position: int) -> str:
        """Return a rank that waits there for others, and this one among them, to compile with it; "" if none does."""
        at, _, rank = read(self.store, f"{self._base}compiling{self._compiled}").partition(" ")
        return rank if at == str(position) else ""

    def _failed(self, error: BaseException, program: Any) -> RankFailure | None:
        """Tell the other ranks of an error; return what to raise in its place where they are the reason, else None."""
        if isinstance(error, (RankDisagreement, RankFailure)) or self._failure is not None:  # others know
            return None
        where = self._running_program(failure.place(program, error))
        failure.interrupted(error, where)
        of_others = failure.is_of_process_group(error)
        mine = Failure(dist.get_rank(), self.position - 1, True, of_others, where, failure.described(error))
        self.failures.announce(mine)
        if of_others:
            self._failure = RankFailure(self.failures.call_the_roll(mine))
            return self._failure
        # Whether a collective was started that raised in its start, only this rank knows.
        self._stopped = f"{where} on rank {mine.rank}" if " start of " in where else where
        self._past = (f"failed at {self.position}",)  # which nothing was predicted from
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised on rank {mine.rank} in {where}")
        return None

    def failed_outside(self, error: BaseException, where: str) -> None:
        """Tell the other ranks, which may run a program, that a forward raised outside of one."""
        own = self.failures.mine
        if own is not None and own.position == self.position - 1:  # the program has told
            return
        if not isinstance(error, (RankDisagreement, RankFailure)):
            said = failure.described(error)
            self.failures.announce(Failure(dist.get_rank(), self.position, False, False, where, said))

    def _running_program(self, where: str) -> str:
        return f"{where}{' of ' if where else ''}{self._programs[self._running]}"

    def _raise_again(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _raise_failures(self, position: int, to_do: str) -> None:
        """Raise RankFailure if a rank will not do ``to_do``, which this one waits for at ``position``."""
        found = self.failures.preventing(position)
        why = self._why(found) if found is not None else failure.ended(self.store, self.ranks)
        if why:
            self._fail(f"the wait for others to {to_do}", why, position)

    def _why(self, found: Failure) -> str:
        """Describe a failure; one that follows from others names the ranks that have ended, too."""
        dead = failure.gone(self.ranks) if found.of_others else ""
        return f"{found}, and {dead}" if dead else str(found)

    def _fail(self, where: str, why: str, position: int) -> None:
        me = dist.get_rank()
        self._failure = RankFailure(
            f"rank {me} cannot end {where}, because {why}; start all ranks again from the last complete checkpoint"
        )
        self.failures.announce(Failure(me, position, True, True, where, why))
        self._raise_again()

    def _predicted(self) -> str | None:
        """Predict by the longest past that was met before."""
        return next((self._predictions[past] for past in _ends(self._past) if past in self._predictions), None)

    def _learn(self, key: str) -> None:
        if len(self._predictions) > _MOST_PREDICTIONS:
            self._predictions.clear()
        self._predictions.update(dict.fromkeys(_ends(self._past), key))

    def _compare(self, key: str) -> None:
        self.comparisons += 1
        position, begin, me, program = self.position, time.monotonic(), dist.get_rank(), self._programs[key]
        what = f"the wait for others to run {program}"

        def refused() -> None:
            # Another one that compiles here waits for this one in vain, and one that has failed does not come.
            self._raise_failures(position, f"run {program}")
            if rank := self._compiling_at(position):
                text = f"rank {me} is about to run {program}, and rank {rank} {_COMPILES}; {_ADVICE}"
                self._announce(position, text)
            self.failures.tell(position, time.monotonic() - begin, lambda: what)

        def missing(late: list[int]) -> str:
            text = (
                f"rank {me} waited {TIMEOUT_SECONDS:.0f} s for ranks {agreement.listed(late)} to run {program}, and "
                f"they did not; they run another one, have failed, or hang: look at their output; {_ADVICE}"
            )
            return json.dumps([False, text])

        value = f"{key}\n{self._stopped}" if self._stopped else key
        try:
            where = (self.store, self._prefix(position), self.ranks)
            agreement.compare(*where, value, self._verdict, missing, TIMEOUT_SECONDS, refused)
        except KeyboardInterrupt as error:
            failure.interrupted(error, what)
            raise
        self._compared = position
        self._forget(position, str(me))
        self._raise_announced(position)
        if self._stopped:
            self.failures.withdraw()

    def _announce(self, position: int, message: str) -> None:
        """Announce a verdict for every rank that is, or comes, here. As not all came, they cannot go on together."""
        agreement.write_once(self.store, f"{self._prefix(position)}/verdict", json.dumps([False, message]))

    def _raise_announced(self, position: int) -> None:
        verdict = read(self.store, f"{self._prefix(position)}/verdict")
        all_came, message = json.loads(verdict) if verdict else (True, "")
        if message and not all_came:
            self._failure = RankDisagreement(message)
        if message:
            raise RankDisagreement(message)

    def _verdict(self, published: dict[int, str]) -> str:
        """Return whether all ranks may go on, and what is wrong: ranks raised in different places, or are about to run
        different programs. Called on the last one to come."""
        if self._compared >= 0:  # everyone has read that one
            self._forget(self._compared, "arrived", "verdict")
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
            text = f"{self._difference(different, values[different[0]][0], different[0], key, first)}; {_ADVICE}"
        return json.dumps([not elsewhere, text])

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

    def _forget(self, position: int, *names: str) -> None:
        for name in names:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a store that keeps everything
                self.store.delete_key(f"{self._prefix(position)}/{name}")


def _ends(past: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the ends of the past, from all of it to nothing."""
    return (past[begin:] for begin in range(len(past) + 1))


_lockstep_of: dict[tuple[int, ...], Lockstep] = {}
_current: Lockstep | None = None  # that of the program that began last


def lockstep_of(ranks: Sequence[int]) -> Lockstep:
    """Return the ``Lockstep`` that all models on these ranks share."""
    store, key = compat.default_store(), tuple(ranks)
    found = _lockstep_of.get(key)
    if found is None or found.store is not store:  # another process group since
        found = _lockstep_of[key] = Lockstep(ranks, store)
    return found


def finish(work: Any, device: torch.device) -> None:
    """Wait for a collective; see [Note: predicted programs]."""
    lockstep = _current
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
        rounds_without = rounds_without + 1 if failure.ended(lockstep.store, lockstep.ranks) else 0
