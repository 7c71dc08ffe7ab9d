"""Ranks compare what they took for a step, through the store, and none of them waits for another.

The mesh's first rank says that it reads. As long as it does, each of the others appends a line to a key of the step,
and the first rank looks there after each of its own steps, until all lines are there or the next record is due: then
it goes on without them. So a rank that has no monitor, is late or has failed costs nobody anything, and the store does
not grow (docs/decisions/reports_and_plans.md, "Comparison of ranks by a monitor").
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.runtime.ranks.agreement import delete, is_shared, prefix_of, read


@dataclass(frozen=True)
class Measured:
    """Holds what one rank has measured of a step. ``busy_seconds``: of the step, without waits for collectives.
    ``square``: this rank's part of the squared norm of the gradients. None: not known."""

    rank: int
    busy_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    square: float | None = None


class Comparison:
    """Carries the measurements of ``ranks``, in the order of the mesh; the first of them reads. Nothing is published
    before ``begin``."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.is_shared = tuple(ranks), is_shared(ranks)
        self.me = dist.get_rank() if self.is_shared else self.ranks[0]
        self.is_first = self.me == self.ranks[0]
        self._store = compat.clone_store(compat.default_store()) if self.is_shared else None
        self.name = ""

    def begin(self, name: str) -> None:
        """Begin under a ``name`` that all ranks give this comparison and no other."""
        self.name = name
        if self._store is not None and self.is_first:
            self._store.set(self._reader, "")

    def publish(self, step: int, mine: Measured) -> None:
        """Publish what this rank has measured of ``step``."""
        if self._store is not None and self.name and not self.is_first:
            with contextlib.suppress(RuntimeError):  # the store is gone: the training has an error of its own
                if self._store.check([self._reader]):
                    compat.append(self._store, self._key(step), f"{json.dumps(astuple(mine))}\n")

    def others(self, step: int) -> list[Measured] | None:
        """On the first rank: return what the others have measured of ``step``; None while one has not published."""
        if self._store is None:
            return []
        try:
            lines = read(self._store, self._key(step)).splitlines()
        except RuntimeError:
            return None
        found = {measured.rank: measured for measured in (Measured(*json.loads(line)) for line in lines)}
        if len(found) < len(self.ranks) - 1:
            return None
        self.forget(step)
        return list(found.values())

    def forget(self, step: int) -> None:
        """On the first rank: delete what was published of a step."""
        if self._store is not None:
            delete(self._store, self._key(step))

    def close(self) -> None:
        """On the first rank: read no longer."""
        if self._store is not None and self.is_first:
            delete(self._store, self._reader)

    @property
    def _reader(self) -> str:
        return f"{prefix_of(self.ranks, self.name)}/reader"

    def _key(self, step: int) -> str:
        return f"{prefix_of(self.ranks, self.name)}/{step}"


def straggler(measured: Sequence[Measured]) -> tuple[float | None, int | None]:
    """Return by how many times the slowest rank computes longer than the median one, and which it is."""
    busy = {m.rank: m.busy_seconds for m in measured if m.busy_seconds is not None}
    if len(busy) < 2 or len(busy) < len(measured):
        return None, None
    slowest = max(busy, key=lambda rank: busy[rank])
    return busy[slowest] / max(statistics.median_low(busy.values()), 1e-9), slowest


def norm(measured: Sequence[Measured]) -> float | None:
    """Return the norm of the gradients; None where a rank does not know its part."""
    squares = [m.square for m in measured if m.square is not None]
    return math.sqrt(math.fsum(squares)) if len(squares) == len(measured) else None
