"""Ranks compare what they are about to run before they run it: a collective that only some of them start is a hang.

The first time that ranks are about to run a sequence of collectives, each publishes it in the process group's store.
The last one to come compares all and publishes one verdict (docs/decisions/ranks_and_collectives.md).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.passes.ir.canonical_form import digest

TIMEOUT_SECONDS = 300.0
PATIENCE_SECONDS = 5.0  # a rank that waits longer looks whether another one has given up
_POLL_SECONDS = 0.02
_POLL_SHARE, _LONGEST_POLL_SECONDS = 0.02, 0.5  # of a wait for another rank's work
_RANKS_IN_MESSAGE = 16
# Backends of which only this process exists: torch's for planning and tests, and those of benchmarks/.
_ALONE = frozenset({"fake", "simulated", "virtual"})

Refused: TypeAlias = Callable[[], None] | None


class RankDisagreement(RuntimeError):
    """Ranks are about to run different collectives, or one did not come. The message says which ranks, and where."""


@dataclass(frozen=True)
class RunnableProgram:
    """Describes a program, or something else that runs ``collectives``, which are listed with their sizes, in order."""

    model: str
    phase: str
    collectives: tuple[str, ...]
    what: str = "graph"

    @property
    def key(self) -> str:
        return f"{self.phase} {self.what} of {self.model} {digest(self.collectives)[:16]}"

    def __str__(self) -> str:
        return f"the {self.phase} {self.what} of {self.model}"


def is_shared(ranks: Sequence[int]) -> bool:
    """Say whether there are several ranks, and not those of a process group that one process plays."""
    return len(ranks) > 1 and dist.get_backend() not in _ALONE


def agree(
    key: str, entries: Sequence[str], ranks: Sequence[int], timeout: float = TIMEOUT_SECONDS, refused: Refused = None
) -> None:
    """Compare ``entries`` with those of the other ``ranks`` (global) under ``key``, which each must choose alike.
    ``refused`` is called while this rank waits, and may raise.

    Raises:
        RankDisagreement: on every rank, when entries differ, or when a rank published none within ``timeout`` seconds.
    """
    if not is_shared(ranks):
        return

    text = json.dumps(list(entries))
    store, prefix = compat.default_store(), prefix_of(ranks, key)

    def judge(published: dict[int, str]) -> str:
        return json.dumps([rank for rank, digest in published.items() if digest != published[ranks[0]]])

    def missing(late: list[int]) -> str:
        return json.dumps(_did_not_come(late, key, timeout))

    found = json.loads(compare(store, prefix, ranks, digest([text]), judge, missing, timeout, refused))
    if isinstance(found, list) and found:  # ranks whose entries differ from the first rank's
        two = (found[0], ranks[0])  # which alone publish their entries: of a large model, they are long
        names = [f"{prefix}/entries/{rank}" for rank in two]
        if (me := dist.get_rank()) in two:
            store.set(f"{prefix}/entries/{me}", text)
        wait(store, names, timeout)
        at, theirs, own = first_difference(*(json.loads(entries or "[]") for entries in read_all(store, names)))
        found = (
            f"ranks {listed(found)} are about to run another program than rank {two[1]} ({key!r}): entry {at} is "
            f"{theirs!r} on rank {two[0]} and {own!r} on rank {two[1]}; use the same model, options and passes on all "
            "ranks, and let no branch depend on a rank's own data"
        )
    if found:
        raise RankDisagreement(found)


def compare(
    store: dist.Store,
    prefix: str,
    ranks: Sequence[int],
    mine: str,
    judge: Callable[[dict[int, str]], str],
    missing: Callable[[list[int]], str],
    timeout: float,
    refused: Refused = None,
) -> str:
    """Publish ``mine`` under a ``prefix`` that all of ``ranks`` come to once; return the verdict for all. Neither is
    empty. The last one to come makes the verdict with ``judge``; ``missing`` makes it, of the ranks that did not come,
    after ``timeout`` seconds. Where two ranks make one at that moment, the first that is written counts."""
    verdict, names = f"{prefix}/verdict", [f"{prefix}/{rank}" for rank in ranks]
    store.set(f"{prefix}/{dist.get_rank()}", mine)
    if store.add(f"{prefix}/arrived", 1) < len(ranks):
        wait(store, [verdict], timeout, refused)
    if not store.check([verdict]):
        published = dict(zip(ranks, read_all(store, names), strict=True))
        late = [rank for rank, value in published.items() if not value]
        store.compare_set(verdict, "", missing(late) if late else judge(published))  # of two ranks, one writes
    return store.get(verdict).decode()


def publish(key: str, value: str, ranks: Sequence[int]) -> None:
    """Publish a value that the other ``ranks`` :func:`receive`."""
    compat.default_store().set(f"{prefix_of(ranks, key)}/value", value)


def receive(key: str, ranks: Sequence[int], timeout: float = TIMEOUT_SECONDS, refused: Refused = None) -> str:
    """Return what the first of ``ranks`` published under ``key``. ``refused`` is called while this rank waits. Raises
    RankDisagreement if nothing is published within ``timeout`` seconds."""
    store, name = compat.default_store(), f"{prefix_of(ranks, key)}/value"
    if wait(store, [name], timeout, refused):
        raise RankDisagreement(_did_not_come(ranks[:1], key, timeout))
    return store.get(name).decode()


def poll(key: str, ranks: Sequence[int], timeout: float, refused: Callable[[], None]) -> str | None:
    """Return what :func:`receive` does, where that may take minutes in which nothing is wrong: torch's own wait warns
    each time that it is interrupted for a look. None where nothing is published within ``timeout`` seconds.

    It asks the store until there is an answer, which is too much for the store of many thousand ranks; ``wait`` asks
    once, and the store answers when it can."""
    store, name = compat.default_store(), f"{prefix_of(ranks, key)}/value"
    begin = looked = now = time.monotonic()
    while not store.check([name]):
        if now - begin > timeout:
            return None
        if now - looked > PATIENCE_SECONDS:
            refused()
            looked = now
        time.sleep(min(max(_POLL_SECONDS, _POLL_SHARE * (now - begin)), _LONGEST_POLL_SECONDS))
        now = time.monotonic()
    return store.get(name).decode()


def read(store: dist.Store, name: str) -> str:
    """Return what is published under ``name``; "" where nothing is."""
    return store.get(name).decode() if store.check([name]) else ""


def read_all(store: dist.Store, names: list[str]) -> list[str]:
    """Return what is published under each name; "" where nothing is."""
    if names and store.check(names):
        return [value.decode() for value in store.multi_get(names)]
    return [read(store, name) for name in names]


def delete(store: dist.Store, name: str) -> None:
    """Delete what is published under ``name``, unless the store keeps everything."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.delete_key(name)


def prefix_of(ranks: Sequence[int], key: str) -> str:
    names = [str(rank) for rank in ranks]
    return f"graph_fsdp/{'-'.join(names) if len(names) < 64 else digest(names)}/{key}"


def first_difference(theirs: Sequence[str], mine: Sequence[str]) -> tuple[int, str, str]:
    """Return the first index at which two sequences differ, and the entry of each."""
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    there, here = ("nothing" if at == len(entries) else entries[at] for entries in (theirs, mine))
    return at, there, here


def _did_not_come(missing: Sequence[int], key: str, timeout: float) -> str:
    return (
        f"rank {dist.get_rank()} waited {timeout:.0f} s for ranks {listed(missing)} to compile {key!r} and they did "
        "not; they run another branch, have failed, or hang: look at their output"
    )


def listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_IN_MESSAGE]))
    more = len(ranks) - _RANKS_IN_MESSAGE
    return f"[{shown}]" if more <= 0 else f"[{shown} and {more} more]"


def wait(store: dist.Store, names: list[str], timeout: float, refused: Refused = None) -> list[str]:
    """Wait until every name is set; return those that are not after ``timeout`` seconds. ``refused`` is called
    meanwhile."""
    deadline = time.monotonic() + timeout
    missing = [name for name in names if not store.check([name])]
    while missing and time.monotonic() < deadline:
        left = max(_POLL_SECONDS, deadline - time.monotonic())
        if refused is not None:
            refused()
            left = min(left, PATIENCE_SECONDS)
        with contextlib.suppress(RuntimeError, dist.DistStoreError):
            store.wait(missing, datetime.timedelta(seconds=left))
        missing = [name for name in missing if not store.check([name])]
    return missing
