"""Checks of one accelerator, each a function that runs in a process of its own (see ``gpu_checks.py``).

A rehearsal runs them on the virtual device (``virtual/``), inside of a ``Machine``: what nothing orders is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from simulated_group import SimulatedGroup, simulated_group
from simulated_link import INSTANT, Link

from graph_fsdp.passes import default_pipeline

Figures = dict[str, Any]  # what a check measured, as JSON
Function = Callable[..., Figures]

VIRTUAL = "virtual"
REHEARSED = ("cpu", VIRTUAL)  # devices that compute on the host: models are small
ACCELERATORS = ("cuda", "xpu")
HERE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # ranks of one machine, whose name may not resolve


class CannotRun(Exception):
    """What a check needs is not here; the text says what."""


@dataclass(frozen=True)
class Check:
    """``function`` gets the device, and the case if the check is one of several; it returns figures, raises on what is
    wrong, and ``CannotRun`` where it cannot tell. It has ``seconds`` before it is ended. ``needs``: the types of device
    that it is for (none: any), and ``reason``: why those. ``host``: whether the time of the virtual device's host
    counts."""

    name: str
    part: str
    seconds: int
    function: Callable[[torch.device], Figures]
    needs: Sequence[str] = ()
    reason: str = ""
    host: Literal["zero", "counted"] = "zero"

    def refusal(self, device: str) -> str:
        """Why it cannot run on a device of this type; "" if it can."""
        if not self.needs or device in self.needs:
            return ""
        return f"needs {' or '.join(self.needs)}, and this is {device}: {self.reason}"


CHECKS: dict[str, Check] = {}


def check(part: str, seconds: int, *, cases: Sequence[str] = (), **options: Any) -> Callable[[Function], Function]:
    """Register a function as a check, or as one for each of ``cases``. ``options``: fields of ``Check``."""

    def register(function: Function) -> Function:
        name = function.__name__
        if not cases:
            CHECKS[name] = Check(name, part, seconds, function, **options)
        for case in cases:
            called = f"{name}: {case}"
            CHECKS[called] = Check(called, part, seconds, lambda device, case=case: function(device, case), **options)
        return function

    return register


def schedule_of(device: torch.device) -> dict[str, Any]:
    """Options of ``graph_fsdp.compile``: the virtual device has an H100's schedule, which nothing there detects."""
    return {"passes": default_pipeline(hardware="h100")} if device.type == VIRTUAL else {}


def one_of(device: torch.device, ranks: int, link: Link = INSTANT) -> AbstractContextManager[SimulatedGroup]:
    """A process group of which this device is one rank, for a while."""
    if device.type == VIRTUAL:
        from virtual.group import virtual_group

        return virtual_group(ranks, link)
    return simulated_group(ranks, link)
