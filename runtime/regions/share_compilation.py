"""Work that the ranks of a host divide among themselves without talking: compilations whose results one of them leaves
in a cache on disk for the others.

Each task has a lock, a file of its name. A rank takes the first task that nobody holds; whoever takes one that is done
finds it in the cache. A rank with other tasks, or alone, is not held up. The kernel gives up the locks of a process
that dies; where there is no lock to be had, a rank does the work itself.

What a cache holds is run. The folder that Inductor keeps its own in by default lies where every user of a host may
write, under a name that everyone can guess: whoever makes it first decides what the others run. So folders and files
are made for the user alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

Result = TypeVar("Result")

_FOLDER, _FILE = 0o700, 0o600
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
        path.parent.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
        stack.enter_context(FileLock(path, mode=_FILE).acquire(timeout=0))
    except Timeout:
        return False
    except (OSError, NotImplementedError):  # an unwritable folder, a file system without locks
        return True
    return True


def own_folder(path: Path) -> None:
    """Make a folder for the user alone. One that is there has to be the user's, and is closed to others: torch may have
    made it, as open as the user's files are by default.

    Raises:
        PermissionError: it belongs to another user.
    """
    path.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
    status = path.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, and compiled code in it would be run; name a folder of your own "
            "in the environment variable TORCHINDUCTOR_CACHE_DIR"
        )
    if stat.S_IMODE(status.st_mode) & ~_FOLDER:
        path.chmod(_FOLDER)
