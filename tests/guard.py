"""Nothing that the tests start outlives them: when the process of the tests is gone, however it ended, a process of
this file kills what it had started, and what that had started: ranks, torchrun and its ranks, compilers, browsers.

They are known by a variable of their environment, which a child inherits from its parent, whatever groups and sessions
the two are in. The system's table of processes is Linux's; elsewhere there is no guard.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "GRAPH_FSDP_TESTS"
_POLL_SECONDS = 0.05
_KILL_SECONDS = 60.0  # a process that a signal has killed ends when the system has freed its memory


class Guard:
    """Of this process and what it starts from now on. With several processes of tests each has one of its own."""

    def __init__(self) -> None:
        self.mark = os.environ[VARIABLE] = secrets.token_hex(8)
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), self.mark]
        # In a session of its own: what ends the tests' process group must not end it.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def orphans(self) -> dict[int, str]:
        """Processes that tests have started and whose parents have ended without them, and their commands."""
        parents = {pid: _parent(pid) for pid in _marked(self.mark)}
        found = {}
        for pid in parents:
            above: int | None = pid
            while above in parents:
                above = parents[above]
            if above not in (os.getpid(), None):
                found[pid] = _command(pid)
        return found


def _marked(mark: str) -> list[int]:
    """Processes that run with this mark in the environment that they were started with."""
    entry = f"{VARIABLE}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _parent(pid: int) -> int | None:
    """None: it has ended."""
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return None if state == "Z" else int(parent)
    return None


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return "(ended)"


# In the process that guards


def main(parent: int, mark: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        watched = os.pidfd_open(parent)
        if os.getppid() == parent:
            poll = select.poll()
            poll.register(watched, select.POLLIN)
            poll.poll()
    # The guard is one of them. Others may start more while they are killed.
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := [pid for pid in _marked(mark) if pid != os.getpid()]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
