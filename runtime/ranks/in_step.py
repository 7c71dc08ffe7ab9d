"""A program that begins when all ranks are about to run it, and tells them if it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graph_fsdp.runtime.ranks.lockstep import Lockstep


class InStep:
    """A program that begins when all ranks are about to run it."""

    def __init__(self, program: Callable[[list[Any]], Any], lockstep: Lockstep, key: str) -> None:
        self._boxed_call = True  # see Program
        self.program, self.lockstep, self.key = program, lockstep, key

    def __call__(self, args: list[Any]) -> Any:
        self.lockstep.begin(self.key, self.program)
        try:
            return self.program(args)
        except BaseException as error:
            cause = self.lockstep.failed(error, self.program)
            if cause is None:
                raise
            raise cause from error
