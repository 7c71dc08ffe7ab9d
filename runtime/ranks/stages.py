"""Stages of a pipeline tell each other when one of them raises: the others wait for what it would have sent.

A stage that raises writes what happened into the store (``failure.py``) and closes its connections in the group of the
pipeline. A rank that sends to it, or receives from it, gets an error of the process group at once, reads what the
others have written, and does the same: so does each stage after the other, and each rank of a stage that waits for one
of these in a program (``Lockstep``). Nothing of this runs in a step in which nothing fails.

Where the host does not wait for messages, nothing looks yet: there the timeout of the process group ends them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.runtime.ranks import agreement, failure
from graph_fsdp.runtime.ranks.failure import Failure, RankFailure
from graph_fsdp.runtime.ranks.lookout import Lookout


class StageFailures:
    """Tells the ranks of a pipeline's ``group``, whose messages are on ``device``, of errors. After one the pipeline
    runs no more: what its stages have sent does not match any more."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        ranks = dist.get_process_group_ranks(group)
        base = agreement.prefix_of(ranks, f"stages of {group.group_name}/")
        self.failures = failure.Failures(ranks, compat.default_store(), base)
        self.failure: RankFailure | None = None

    def check(self) -> None:
        """Raise RankFailure where a stage has failed before."""
        if self.failure is not None:
            raise RankFailure(str(self.failure))

    def telling(self, where: str, lockstep: Lookout | None) -> contextlib.AbstractContextManager[None]:
        """Tell the other stages if the body raises, which is ``where``, and the ranks of ``lockstep``, which have this
        stage, too. Raises RankFailure in place of an error of the process group, and where torch wraps one."""
        self.check()
        return failure.raised_instead(
            lambda error: self._failed(error, where, lockstep) if self.failure is None else None
        )

    def _failed(self, error: BaseException, where: str, lockstep: Lookout | None) -> RankFailure | None:
        """Tell the other ranks of ``error``; return what to raise in its place where they are the reason, else None."""
        wrapped = None if isinstance(error, failure.OUT_OF_STEP) else error.__cause__
        inner = wrapped or error  # torch's stage wraps errors of forward and backward
        of_group = failure.is_of_process_group(inner)
        is_told = isinstance(inner, failure.OUT_OF_STEP) and not of_group
        failure.interrupted(error, where)
        mine = Failure(self.failures.me, 0, True, of_group, where, failure.described(inner))
        self.failures.announce(mine)
        compat.close_connections(self.group, self.device)
        if of_group:
            self.failure = RankFailure(self.failures.call_the_roll(mine))
            mine = dataclasses.replace(mine, error=str(self.failure))
        else:
            self.failure = RankFailure(str(inner) if is_told else f"{mine}; {failure.ADVICE}")
        if lockstep is not None and not is_told:
            lockstep.stop(self.failure, mine)
        return self.failure if of_group or (wrapped is not None and isinstance(inner, RankFailure)) else None

    def watched(self, messages: list[dist.P2POp], where: str, lockstep: Lookout | None) -> list[dist.P2POp]:
        """Return the same messages, whose errors are told, where the host waits for them."""
        for message in messages if compat.uses_gloo(self.group, self.device) else ():
            message.op = self._told(message, where, lockstep)
        return messages

    def _told(self, message: dist.P2POp, where: str, lockstep: Lookout | None) -> Callable[..., _ToldWork]:
        start, sends = message.op, message.op is dist.isend
        peer = {"group_dst" if sends else "group_src": message.group_peer}
        what = f"{where} {'to' if sends else 'from'} rank {message.peer}"

        def told(tensor: torch.Tensor, *, group: Any, tag: int, **_: int) -> _ToldWork:
            with self.telling(what, lockstep):
                work = start(tensor, group=group, tag=tag, **peer)
            return _ToldWork(work, lambda: self.telling(what, lockstep))

        return told


class _ToldWork:
    """A message under way."""

    def __init__(self, work: Any, telling: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._work, self._telling = work, telling

    def wait(self, *args: Any) -> Any:
        with self._telling():
            return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_failures_of: dict[str, StageFailures] = {}  # by name of a group


def stage_failures(group: dist.ProcessGroup | None, device: torch.device) -> StageFailures | None:
    """Return those that all stages of a group share; None where it has one rank. Without one: the default group."""
    group = group or dist.group.WORLD
    assert group is not None
    if not agreement.is_shared(dist.get_process_group_ranks(group)):
        return None
    found = _failures_of.get(group.group_name)
    if found is None or found.group is not group:  # another group since
        found = _failures_of[group.group_name] = StageFailures(group, device)
    return found
