"""Facts that hold on several ranks: functions with assertions that all ranks run, in one launch for a module's.

FACTS = Facts(__name__)

@FACTS
def a_mean_is_a_mean() -> None:
    ...

@pytest.fixture(scope="module")
def ranks() -> Failures:
    return FACTS.check_on(2)

@pytest.mark.parametrize("name", FACTS.names)
def test_on_two_ranks(ranks: Failures, name: str) -> None:
    check(ranks, name)
"""

from __future__ import annotations

import atexit
import importlib
import shutil
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from launch import TIMEOUT_SECONDS, run_ranks
from marks import mostly_long, selected

Fact: TypeAlias = Callable[[], None]
Failures: TypeAlias = list[dict[str, str]]  # per rank: name → traceback


class Facts:
    """The facts of a module, in the order in which they are defined; it must be the module's ``FACTS``."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.functions: dict[str, Fact] = {}
        self._long: set[str] = set()

    def __call__(self, function: Fact) -> Fact:
        self.functions[function.__name__] = function
        return function

    def long(self, function: Fact) -> Fact:
        """A fact that ``make test`` leaves out."""
        self._long.add(function.__name__)
        return self(function)

    @property
    def names(self) -> list[Any]:
        """As parameters of a test, whose argument must be ``name``."""
        return mostly_long(self.functions, [name for name in self.functions if name not in self._long])

    def check_on(
        self,
        world_size: int,
        timeout: float = TIMEOUT_SECONDS,
        env: Mapping[str, str] | None = None,
        backend: str | None = "gloo",
    ) -> Failures:
        """Those facts whose tests will run."""
        names = selected(self.functions, self.module, "name")
        return run_ranks(check_all, world_size, self.module, names, timeout=timeout, env=env, backend=backend)


def check(ranks: Failures, name: str) -> None:
    """Fail the test with the tracebacks of the ranks on which a fact does not hold."""
    wrong = [f"rank {rank}:\n{failures[name]}" for rank, failures in enumerate(ranks) if name in failures]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def shared_folder() -> Path:
    """One folder, on all ranks."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0:
        atexit.register(shutil.rmtree, str(box[0]), ignore_errors=True)
    dist.broadcast_object_list(box, src=0)
    return Path(str(box[0]))


def check_all(module: str, names: Collection[str] | None = None) -> dict[str, str]:
    """On a rank. A fact that fails in the middle of a collective fails the launch, by its timeout."""
    torch.set_num_threads(1)
    failures = {}
    for name, function in importlib.import_module(module).FACTS.functions.items():
        if names is not None and name not in names:
            continue
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            function()
        except Exception:
            failures[name] = traceback.format_exc()
    return failures
