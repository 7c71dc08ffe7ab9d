"""Work that the ranks of a host divide among themselves without talking: compilations whose results one of them leaves
in a cache on disk for the others.

Each task has a lock, a file of its name. A rank takes the first task that nobody holds; whoever takes one that is done
finds it in the cache. A rank with other tasks, or alone, is not held up. The kernel gives up the locks of a process
that dies; where there is no lock to be had, a rank does the work itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from graph_fsdp.runtime.regions.private_files import FILE, FOLDER

Result = TypeVar("Result")

_POLL_SECONDS = 0.01
PATIENCE_SECONDS = 300.0  # for a task that another rank has begun; longer than any region compiles


def divide(
    tasks: Sequence[tuple[str, Callable[[], Result]]], directory: Path, patience: float = PATIENCE_SECONDS
) -> list[Result]:
    """Run all tasks, each a (name, function), and return their results in the order given. While another process of
    this host runs a task of the same name and ``directory``, others are run first; after ``patience`` seconds without
    any left, it is run all the same. Raises what a function raises."""
    results: dict[int, Result] = {}
    deadline = time.monotonic() + patience
    while len(results) < len(tasks):
        before = len(results)
        for index, (name, run) in enumerate(tasks):
            with contextlib.ExitStack() as stack:
                lock = directory / f"{name}.lock"
                if index not in results and (_acquire(lock, stack) or time.monotonic() > deadline):
                    results[index] = run()
        if len(results) > before:
            deadline = time.monotonic() + patience
        elif len(results) < len(tasks):
            time.sleep(_POLL_SECONDS)
    return [results[index] for index in range(len(tasks))]


def _acquire(path: Path, stack: contextlib.ExitStack) -> bool:
    """Take the lock for as long as ``stack`` lives. False while another process has it."""
    try:
        path.parent.mkdir(mode=FOLDER, parents=True, exist_ok=True)
        stack.enter_context(FileLock(path, mode=FILE).acquire(timeout=0))
    except Timeout:
        return False
    except (OSError, NotImplementedError):  # an unwritable folder, a file system without locks
        return True
    return True
