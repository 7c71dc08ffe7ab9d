"""A thread looks for the other ranks where the host does not wait for collectives, and so cannot look while it waits.

Every ``agreement.PATIENCE_SECONDS`` it reads one key of the store ([Note: news] in ``failure.py``). Where another rank
has failed, or does something else, it logs the error that ranks on the CPU raise, and aborts the process groups, so
that this rank's device, and the main thread that waits for it, go on. The main thread raises that error where it comes
back to a program (``Lockstep.raise_again``).

[Note: collectives that do not end]
A rank that raised, or whose process has ended, may have taken part in all that this one has begun. It is the reason for
an error where a collective that was started before the last look has not ended.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from typing import Any

import torch
import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.runtime.ranks import agreement
from graph_fsdp.runtime.ranks.agreement import RankDisagreement
from graph_fsdp.runtime.ranks.failure import RankFailure
from graph_fsdp.runtime.ranks.lookout import Lookout

log = logging.getLogger(__name__)

_END_SECONDS = 2.0  # for a look under way, when the process ends


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
