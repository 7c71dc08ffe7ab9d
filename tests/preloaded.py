"""Processes that have imported torch and the library, and fork ranks: a rank then does not import them again.

Of what a rank cost, the imports were more than the half. A process of this file has made its imports and one
compilation, of which it keeps what torch imports and makes lazily (tables of decompositions, patterns). What it forks
knows no more than a fresh process otherwise: no compile caches, no threads, no process group, no random numbers drawn,
no model numbered. It ends without taking the interpreter down (``_leave``); scripts under torchrun do.

[Note: two seeds]
Python's order of a set of strings is another one in each process, and ranks must agree nevertheless. Forks of one
process would have the same order. So there are two, each with an order of its own, and ranks come from them in turn.

[Note: what imports read]
Some variables of the environment are read while torch is imported. Ranks that are to have another value of one that is
not in ``READ_LATER`` are not forked: ``Preloaded.fits`` says so.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NoReturn

# Of all that a rank needs to compile a model, with what torch imports in its first compilation.
MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.testing._internal.distributed.fake_pg",
    "torch._dynamo.debug_utils",
    "torch._dynamo.testing",
    "torch._export.passes",
    "torch._functorch.compilers",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch._inductor.scheduler",
    "graph_fsdp.passes.verify.verify",
    "pytest",
)

# Read when they are used, and not at an import.
READ_LATER = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"),
        *("PYTEST_CURRENT_TEST", "TORCHELASTIC_RUN_ID", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
        *("CPU_NUM_DEVICES", "XLA_COMPILATION_CACHE_SIZE"),  # when XLA's client is made
    }
)
_MESSAGE_BYTES = 1 << 17
_set_by_imports: dict[str, str] = {}  # variables of the environment


class Preloaded:
    """A process of this file, seen from the one that starts it; it ends with that one. ``environment``: its own.
    ``modules``: what it imports beside ``MODULES``."""

    def __init__(self, environment: Mapping[str, str], modules: Collection[str] = ()) -> None:
        self.environment = dict(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *modules],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.stop)

    def stop(self) -> None:
        """It ends when it sees the other end closed."""
        self._socket.close()
        self._process.wait()

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork with this environment is as a process that had it from its start; and there are forks."""
        names = {*self.environment, *environment} - READ_LATER
        alike = all(self.environment.get(name) == environment.get(name) for name in names)
        return alike and self.forks and self._process.poll() is None

    @functools.cached_property
    def forks(self) -> bool:
        """Whether it came so far as to fork: it ends where imports have started threads, which a fork would lack."""
        try:
            return self._ask(["ready"], []) is not None
        except (OSError, RuntimeError):
            self._process.wait()
            return False

    def start(self, arguments: list[str], environment: Mapping[str, str], log: int) -> Fork:
        """Fork a rank, as ``launch.py`` with these arguments is; ``log``: its standard output and error."""
        read, write = os.pipe()
        try:
            pid = self._ask(["start", arguments, dict(environment)], [read, log])
        except BaseException:
            os.close(write)  # the rank, if there is one, ends by that
            raise
        finally:
            os.close(read)
        return Fork(self, pid, write)

    def ask(self, what: str, pid: int) -> int | None:
        return self._ask([what, pid], [])

    def _ask(self, question: list[object], descriptors: list[int]) -> int | None:
        self._asked += 1
        socket.send_fds(self._socket, [json.dumps([self._asked, *question]).encode()], descriptors)
        while True:
            message = self._socket.recv(_MESSAGE_BYTES)
            if not message:
                raise RuntimeError("the process that forks ranks has ended; what it wrote is above")
            number, answer = json.loads(message)
            if number == self._asked:  # another one is of a question whose asker was interrupted
                return answer  # type: ignore[no-any-return]


class Fork:
    """A rank, with what ``launch`` uses of ``subprocess.Popen``."""

    def __init__(self, parent: Preloaded, pid: int | None, stdin: int) -> None:
        assert pid is not None
        self.pid, self.stdin = pid, os.fdopen(stdin, "wb")
        self._parent = parent

    def exit_code(self) -> int | None:
        """Without reaping it."""
        return self._parent.ask("exit code", self.pid)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> None:
        """Until it has ended, and reap it."""
        self._parent.ask("wait", self.pid)


def exit_code(pid: int) -> int | None:
    """Like ``Popen.poll``, but without reaping: the id of the process stays its own."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


# In the process that forks


def _serve(connection: socket.socket) -> list[str] | None:
    """Answer until the other side is gone, or in a rank: return its arguments."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 2)
        if not message:
            return None
        number, what, *rest = json.loads(message)
        answer: int | None = None
        if what == "start":
            pid = os.fork()
            if not pid:
                connection.close()
                _become(*descriptors, environment=rest[1])
                return rest[0]  # type: ignore[no-any-return]
            # Here, and not in the rank: it may be killed by the id of its group as soon as it is known.
            os.setpgid(pid, pid)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = pid
        elif what == "ready":
            answer = os.getpid()
        elif what == "exit code":
            answer = exit_code(rest[0])
        else:
            os.waitpid(rest[0], 0)
        connection.send(json.dumps([number, answer]).encode())


def _become(stdin: int, log: int, environment: dict[str, str]) -> None:
    """In a rank: the streams, the environment and the path of imports that a new process would have after imports."""
    with contextlib.suppress(PermissionError):  # the other side may have been faster, and this is done then
        os.setpgid(0, 0)
    for descriptor, standard in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    os.close(stdin)
    os.close(log)
    os.environ.clear()
    os.environ.update({**environment, **_set_by_imports})
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in path if folder and folder not in sys.path]


def _warm_up() -> None:
    """Compile a model in one process and forget it, for what is made lazily in a process's first compilation."""
    import torch

    import graph_fsdp

    torch.hub.tqdm.monitor_interval = 0  # or torch's progress bars start a thread
    state = torch.get_rng_state()
    model = graph_fsdp.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), backend="eager")
    # Autograd starts a thread per device; of a torch built for CUDA 8 where there is none, for fake tensors.
    autograd = torch.version.cuda is None
    with torch.set_grad_enabled(autograd):
        loss = model(torch.ones(2, 4)).sum()
    if autograd:
        loss.backward()
    del model, loss
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.set_rng_state(state)
    graph_fsdp.engine.engine._engines = itertools.count()
    graph_fsdp.engine.dynamo._forwards = itertools.count()


def _main(connection: socket.socket, *modules: str) -> None:
    gc.disable()  # or it walks all that is imported, again and again
    before = dict(os.environ)
    for name in (*MODULES, *modules):
        importlib.import_module(name)
    library = importlib.import_module("graph_fsdp")
    for name in library.__all__:  # a module of the library is imported when a name of it is asked for
        getattr(library, name)
    found = {name: value for name, value in os.environ.items() if before.get(name) != value}
    _set_by_imports.update({name: value for name, value in found.items() if name not in READ_LATER})
    if not modules:  # or autograd, once it has run, would have no queues for devices that come with a client in a rank
        _warm_up()
    threads = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else threading.active_count()
    if threads > 1:
        sys.exit(f"{threads} threads run in the process that is to fork: a fork would not have them")
    gc.collect()
    gc.freeze()  # or a collection in a rank copies the pages of all that was imported
    gc.enable()
    arguments = _serve(connection)
    if arguments is not None:
        importlib.import_module("launch").main(*arguments)
    _leave()


def _leave() -> NoReturn:
    """What Python does at the end of a process, but for taking down all modules and objects. In a rank that touches,
    and so copies, every page that the fork shared: half a CPU second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:])
