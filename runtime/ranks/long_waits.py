"""A rank that waits for others for long says so, once: in what it waits, and who has not come.

Errors come much later: ranks may have good reasons to be slow, and process groups wait for minutes. Ranks that wait
write down where, so that each knows who does; nothing is written in a step in which nobody waits long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist

from graph_fsdp.runtime.ranks.agreement import listed, read
from graph_fsdp.runtime.ranks.failure import in_words, state_of

log = logging.getLogger(__name__)

TELL_AFTER_SECONDS = 20.0
_DESCRIBED = 4  # ranks, of those that are missing


class LongWaits:
    """Of the ranks of a ``Lockstep``. ``base`` begins the names of its keys in the store."""

    def __init__(self, ranks: Sequence[int], store: dist.Store, base: str) -> None:
        self._ranks, self._store, self._base = tuple(ranks), store, base
        self._told = -1  # at which position

    def tell(self, position: int, seconds: float, what: Callable[[], str]) -> None:
        """To be called now and then while this rank waits, in ``what``, at a program's ``position``."""
        if self._told == position:
            return
        self._store.set(self._key(dist.get_rank()), str(position))
        if seconds < TELL_AFTER_SECONDS:
            return
        self._told = position
        if self._store.add(f"{self._base}{position}/told", 1) == 1:  # one rank is enough
            log.warning("%s", self._text(position, seconds, what()))

    def _text(self, position: int, seconds: float, what: str) -> str:
        missing = [rank for rank in self._ranks if read(self._store, self._key(rank)) != str(position)]
        known = in_words({rank: state_of(self._store, rank) for rank in missing[:_DESCRIBED]})
        me = dist.get_rank()
        who = f"ranks {listed(missing)} have" if missing else "all other ranks wait there, too, and none has"
        return (
            f"rank {me} has waited {seconds:.0f} s in {what}, where {who} not come{f' ({known})' if known else ''}; "
            "ranks have to run the model equally often (a data loader that gives one of them fewer batches?). It goes "
            "on waiting"
        )

    def _key(self, rank: int) -> str:
        return f"{self._base}waits/{rank}"


def interrupted(error: BaseException, what: str) -> None:
    """Say where this rank was when the user, or a launcher, ended it: nobody may see a traceback of this rank."""
    if isinstance(error, KeyboardInterrupt):
        log.warning("%s", f"rank {dist.get_rank()} was interrupted in {what}")
