"""Checks of one accelerator, each a function that runs in a process of its own (see ``gpu_checks.py``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Figures = dict[str, Any]  # what a check measured, as JSON


class CannotRun(Exception):
    """What a check needs is not here; the text says what."""


@dataclass(frozen=True)
class Check:
    """``function`` gets the device and returns figures, raises on what is wrong, and ``CannotRun`` where it cannot
    tell. It has ``seconds`` before it is ended. ``needs``: the type of device that it is for; None: any."""

    part: str
    seconds: int
    needs: str | None
    function: Callable[[torch.device], Figures]

    @property
    def name(self) -> str:
        return self.function.__name__


CHECKS: dict[str, Check] = {}


def check(
    part: str, seconds: int, needs: str | None = None
) -> Callable[[Callable[[torch.device], Figures]], Callable[[torch.device], Figures]]:
    def register(function: Callable[[torch.device], Figures]) -> Callable[[torch.device], Figures]:
        CHECKS[function.__name__] = Check(part, seconds, needs, function)
        return function

    return register
