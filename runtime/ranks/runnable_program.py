"""A program as ranks compare it: what runs, and what of it they must have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graph_fsdp.runtime.ranks.agreement import digest

Runnable = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class RunnableProgram:
    """A program as ranks know it, or what else runs collectives. ``collectives``: each with its sizes, in order."""

    model: str
    phase: str
    collectives: tuple[str, ...]
    what: str = "graph"

    @property
    def key(self) -> str:
        return f"{self.phase} {self.what} of {self.model} {digest(self.collectives)[:16]}"

    def __str__(self) -> str:
        return f"the {self.phase} {self.what} of {self.model}"
