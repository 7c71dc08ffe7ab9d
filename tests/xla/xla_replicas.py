"""Four replicas: threads of a fresh process, each with one of XLA's virtual devices, as ``torch_xla.launch`` has them.

FACTS = ReplicaFacts(__name__)  # functions that all replicas run, in one launch, as in tests/facts.py
"""

from __future__ import annotations

import functools
import importlib
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from facts import Facts, Failures
from torch import Tensor, nn
from xla_launch import DEVICES, run_xla

_together = threading.Barrier(DEVICES)
_building = threading.Lock()


class ReplicaFacts(Facts):
    """A fact that fails on one replica in the middle of a collective ends the process, and so fails all of them."""

    def on_replicas(self, **options: Any) -> Callable[[Failures, str], None]:
        """The test of all facts, in a process that ``run_xla`` starts with these options."""
        return self.tested(lambda: run_xla(on_threads, check_replica, self.module, **options))


def on_threads(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What each replica returns. As ``torch_xla.launch`` does in the process that it starts."""
    from torch_xla._internal import pjrt

    found = pjrt._run_thread_per_device(0, 1, functools.partial(function, *args), pjrt.initialize_multiprocess)
    return [found[ordinal] for ordinal in sorted(found)]


def check_replica(module: str) -> dict[str, str]:
    failures = {}
    for name, function in importlib.import_module(module).FACTS.functions.items():
        _together.wait(200)
        try:
            function()
        except Exception:
            failures[name] = traceback.format_exc()
    return failures


def built(make: Callable[[], nn.Module]) -> nn.Module:
    """The same model on every replica: threads have one generator of random numbers between them."""
    with _building:
        torch.manual_seed(0)
        return make()


def ordinal() -> int:
    import torch_xla.runtime as xr

    return xr.global_ordinal()


def own_rows(batch: tuple[Tensor, ...]) -> list[Tensor]:
    """Of a batch of all replicas, on this one's device."""
    import torch_xla

    rows = len(batch[0]) // DEVICES
    return [value[ordinal() * rows : (ordinal() + 1) * rows].to(torch_xla.device()) for value in batch]


def mean_of_replicas(value: float) -> float:
    """Not a step of the training: all replicas have come by then."""
    return sum(exchange(value)) / DEVICES


_values: list[Any] = [None] * DEVICES


def exchange(value: Any) -> list[Any]:
    _values[ordinal()] = value
    _together.wait(200)
    found = list(_values)
    _together.wait(200)
    return found
