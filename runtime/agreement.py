"""Ranks compare what they are about to run before they run it.

A collective that one rank starts and another does not is a hang. So the first time that a model's ranks are about
to run a sequence of collectives, each publishes it in the process group's store, reads the others' and compares:
with a timeout, and not by a collective, which could hang itself. A sequence that was agreed on before needs
nothing: a rank may recompile alone as long as its collectives stay the same.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from graph_fsdp.passes import compat

TIMEOUT_SECONDS = 300.0
_POLL_SECONDS = 0.02


class RankDisagreement(RuntimeError):
    """Ranks are about to run different collectives, or one of them did not come. Says which ranks, and where."""


def digest(entries: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()


def agree(key: str, entries: Sequence[str], ranks: Sequence[int], timeout: float = TIMEOUT_SECONDS) -> None:
    """Compare ``entries`` with the other ``ranks``' (global, this one's among them) under ``key``. Each rank must
    choose the key and give the ranks alike.

    Raises:
        RankDisagreement: on every rank, when entries differ, or when a rank did not publish any within ``timeout``
            seconds.
    """
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return
    me = dist.get_rank()
    prefix = f"graph_fsdp/{'-'.join(map(str, ranks)) if len(ranks) < 64 else digest(list(map(str, ranks)))}/{key}"
    store = compat.default_store()
    store.set(f"{prefix}/{me}", json.dumps([digest(entries), *entries]))
    missing = _wait(store, prefix, ranks, timeout)
    if missing:
        raise RankDisagreement(
            f"rank {me} waited {timeout:.0f} s for ranks {missing} to compile {key!r} and they did not; they run "
            "another branch, have failed, or hang: look at their output"
        )
    mine = list(entries)
    others = {rank: json.loads(store.get(f"{prefix}/{rank}")) for rank in ranks}
    different = {rank: value[1:] for rank, value in others.items() if value[0] != digest(mine)}
    if different:
        rank, theirs = next(iter(different.items()))
        at = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        entry = lambda sequence: sequence[at] if at < len(sequence) else "nothing"  # noqa: E731
        raise RankDisagreement(
            f"rank {me} and ranks {sorted(different)} are about to run different programs ({key!r}): entry {at} is "
            f"{entry(mine)!r} on rank {me} and {entry(theirs)!r} on rank {rank}; use the same model, options and "
            "passes on all ranks"
        )


def _wait(store: dist.Store, prefix: str, ranks: Sequence[int], timeout: float) -> list[int]:
    """Wait until every rank has published; the ranks that have not when time is up."""
    deadline = time.monotonic() + timeout
    missing = [rank for rank in ranks if not store.check([f"{prefix}/{rank}"])]
    while missing and time.monotonic() < deadline:
        left = max(_POLL_SECONDS, deadline - time.monotonic())
        with contextlib.suppress(RuntimeError, dist.DistStoreError):
            store.wait([f"{prefix}/{rank}" for rank in missing], datetime.timedelta(seconds=left))
        missing = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
    return missing
