"""Counts the CPU time of each Python process that the tests start, by what it is spent on; see ``suite_time.py``.

Python imports this file, by its name, when a process starts whose ``PYTHONPATH`` has this folder. A timer of CPU time
interrupts the process; the time since the last interrupt goes to the innermost frame that tells what it is for. The
sums are written as the process runs, so that one that is killed is counted too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import time
from types import FrameType

INTERVAL = 0.01  # seconds of CPU time
WRITE_EVERY = 0.5
FOLDER = os.environ["GRAPH_FSDP_SUITE_TIME"]
# What time is for, by a part of the file of the innermost frame that has one of these.
KINDS = (
    ("importlib._bootstrap", "imports"),
    ("torch/_inductor/", "compiling"),
    ("torch/_dynamo/", "tracing"),
    ("torch/_functorch/", "tracing"),
    ("torch/_subclasses/", "tracing"),
    ("torch/fx/", "tracing"),
    ("passes/", "tracing"),
)

_sums: dict[str, dict[str, float]] = {}  # test → kind → seconds
_last = _written = 0.0
_path = ""
_counting = False


def _kind(frame: FrameType | None) -> str:
    while frame is not None:
        for part, kind in KINDS:
            if part in frame.f_code.co_filename:
                return kind
        frame = frame.f_back
    return "running"


def _count(number: int, frame: FrameType | None) -> None:
    global _last, _written, _counting
    if _counting:  # an interrupt in this function: the next one counts its time
        return
    _counting = True
    now = time.process_time()
    kinds = _sums.setdefault(os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0], {})
    kind = _kind(frame)
    kinds[kind] = kinds.get(kind, 0.0) + now - _last
    _last = now
    if now - _written > WRITE_EVERY:
        _write()
        _written = now
    _counting = False


def _write() -> None:
    process = "rank" if "RANK" in os.environ else "tests"
    with contextlib.suppress(OSError):  # a test that bounds the size of files
        with open(_path + ".partial", "w") as file:
            json.dump({"process": process, "sums": _sums}, file)
        os.replace(_path + ".partial", _path)


def _begin() -> None:
    """At the start of a process, and of a fork, which inherits no timer."""
    global _last, _written, _path, _counting
    _counting = False
    _sums.clear()
    _path = os.path.join(FOLDER, f"{os.getpid()}-{time.monotonic_ns()}.json")
    _last = _written = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)


def _end() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    _count(0, None)
    _write()


signal.signal(signal.SIGPROF, _count)
os.register_at_fork(after_in_child=_begin)
atexit.register(_end)
_begin()
