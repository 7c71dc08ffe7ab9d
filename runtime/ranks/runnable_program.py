"""A program as ranks compare it: what runs, what of it they must have in common, and how it begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graph_fsdp.runtime.ranks.agreement import digest

if TYPE_CHECKING:
    from graph_fsdp.runtime.ranks.lockstep import Lockstep

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


def in_step(program: Runnable, lockstep: Lockstep, key: str) -> Runnable:
    """``program``, which begins when all ranks are about to run it, and tells them if it raises."""

    def run(args: list[Any]) -> Any:
        lockstep.begin(key, program)
        try:
            return program(args)
        except BaseException as error:
            cause = lockstep.failed(error, program)
            if cause is None:
                raise
            raise cause from error

    vars(run)["_boxed_call"] = True  # see Program
    return run
