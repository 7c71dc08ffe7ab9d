"""Facts that hold on several ranks: functions with assertions that all ranks run, in one launch for a module's.

FACTS = Facts(__name__)

@FACTS
def a_mean_is_a_mean() -> None:
    ...

test_on_two_ranks = FACTS.on(2)
"""

from __future__ import annotations

import atexit
import importlib
import shutil
import tempfile
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from marks import selected

Fact: TypeAlias = Callable[[], None]
Failures: TypeAlias = list[dict[str, str]]  # per rank: name → traceback


class Facts:
    """The facts of a module, in the order in which they are defined; it must be the module's ``FACTS``."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.functions: dict[str, Fact] = {}
        self._cases: list[Any] = []  # of the test: the name of each fact, with its marks

    def __call__(self, function: Fact) -> Fact:
        return self.marked()(function)

    def long(self, function: Fact) -> Fact:
        """A fact that ``make test`` leaves out."""
        return self.marked(pytest.mark.long)(function)

    def marked(self, *marks: pytest.MarkDecorator) -> Callable[[Fact], Fact]:
        """A fact whose test has these marks."""

        def add(function: Fact) -> Fact:
            self.functions[function.__name__] = function
            self._cases.append(pytest.param(function.__name__, marks=marks))
            return function

        return add

    def on(self, world_size: int, **options: Any) -> Callable[[Failures, str], None]:
        """The test of all facts, to be named ``test_…``: each holds on so many ranks, which ``run_ranks`` starts with
        these options, and which run those facts whose tests will run."""

        def launch() -> Failures:
            names = selected(self.functions, self.module, "name")
            return run_ranks(check_all, world_size, self.module, names, **options)

        return self.tested(launch)

    def in_a_fresh_process(self) -> Callable[[Failures, str], None]:
        """As ``on`` one rank that is no fork, in which autograd has run before torch knew of a device, and that makes
        process groups itself."""
        return self.on(1, backend=None, env={"GRAPH_FSDP_FRESH": "1"})

    def tested(self, launch: Callable[[], Failures]) -> Callable[[Failures, str], None]:
        """The test of all facts, by ``failures`` (``conftest.py``), for which ``launch`` is called once."""
        self.launch = launch

        @pytest.mark.parametrize("name", self._cases)
        def test(failures: Failures, name: str) -> None:
            check(failures, name)

        return test


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
            traceback.print_exc()  # in what a rank wrote last, if others wait for it until the launch's timeout
    return failures
