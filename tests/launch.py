"""Run a function on several ranks, each a process of its own: ``run_ranks(function, world_size, *args)``.

They inherit no state of the test that starts them (no compile caches, no default group), as under torchrun: a rank is
a fork of a process that has made its imports and forgotten a compilation (see preloaded.py), or a new process where it
cannot be one. The parent hosts the rendezvous store, as torchrun's agent does: the port is bound by the process that
chose it, and no other program can take it in between.

[Note: life of a rank]
A rank writes its result, or its traceback, to a file in a directory of this call, and then waits on its
standard input: a rank that finished must not close its connections while others still communicate, or their
error would hide the first one. The parent answers "finish" once all results are there. End of file instead
means that the parent is gone: the rank then kills its own process group. So nothing outlives the parent,
however it ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from preloaded import READ_LATER, Fork, Preloaded, exit_code
from tracing import trace_cheaply

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

TIMEOUT_SECONDS = 600.0  # ends what hangs: ten times what the longest calls take, which a busy machine does not pass
_POLL_SECONDS = 0.02
_DUMP_SECONDS = 30.0  # at most, for the ranks to print their stacks after a timeout; a stopped one never does
_QUIET_SECONDS = 1.0  # they are printed when nothing more has come for so long
_LOG_CHARACTERS = 4000
_FINISH = b"finish"
# In the process of the tests, where they say nothing about ranks: scikit-learn's, and Inductor's.
SET_BY_LIBRARIES = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}

_Rank: TypeAlias = "subprocess.Popen[bytes] | Fork"
_Seed: TypeAlias = Callable[[int], Preloaded]


def _connected(run: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Once more where gloo could not connect the ranks: a connection was reset while they made their group. It is rare,
    and nothing that a test does."""

    @functools.wraps(run)
    def connected(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if "Gloo connectFullMesh failed" not in str(error):
                raise
        return run(*args, **kwargs)

    return connected


@_connected
def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    *args: object,
    timeout: float = TIMEOUT_SECONDS,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
    lost: Collection[int] = (),
    modules: Collection[str] = (),
) -> list[Result]:
    """Call ``function(*args)`` on ``world_size`` ranks and return their results in the order of ranks.

    ``function`` must be importable (defined at the top of a module); arguments and results are pickled,
    tensors in results arrive on the CPU. ``backend`` is that of the default process group, made before the
    call and destroyed after it; None leaves that to the function. ``env`` adds environment variables. Ranks in ``lost``
    may die or stop, and have no results. Ranks with ``modules`` are forked from a process of their own, which has
    imported these as well, with ``env``.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), exited, or the ranks took more than
            ``timeout`` seconds (the message has what each wrote last, and the stacks of its threads).
            All ranks are dead by then.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        directory = Path(name)
        found = started(
            directory, function, world_size, *args, timeout=timeout, backend=backend, env=env, modules=modules
        )
        with found as ranks:
            _wait(ranks, directory, time.monotonic() + timeout, timeout, lost)
        return [
            torch.load(directory / f"result{rank}.pt", map_location="cpu", weights_only=False)
            for rank in range(world_size)
            if rank not in lost
        ]


@contextlib.contextmanager
def started(
    directory: Path,
    function: Callable[..., object],
    world_size: int,
    *args: object,
    timeout: float,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
    modules: Collection[str] = (),
) -> Iterator[list[_Rank]]:
    """Ranks that call ``function(*args)``, and are killed at the end, as ``run_ranks`` starts them; ``directory`` is to
    be an empty one."""
    module, root = _import_path(function)
    torch.save((module, function.__qualname__, args, backend, timeout), directory / "call.pt")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = _environment(root, store.port, world_size, env or {})
    seed: _Seed = preloaded_of
    if modules:
        extra = tuple(item for item in sorted((env or {}).items()) if item[0] not in READ_LATER)
        seed = lambda _: preloaded_of(0, tuple(modules), extra)  # noqa: E731
    with _processes(directory, world_size, environment, seed) as ranks:
        yield ranks


def _import_path(function: Callable[..., object]) -> tuple[str, Path]:
    """The module of a function, and the folder from which it can be imported."""
    module = inspect.getmodule(function)
    if module is None or module.__file__ is None or "<" in function.__qualname__:
        raise ValueError(f"{function!r} must be defined at the top of a module, so that ranks can import it")
    path = Path(module.__file__).resolve()
    if module.__name__ == "__main__":
        return path.stem, path.parent
    return module.__name__, path.parents[module.__name__.count(".")]


def _environment(root: Path, port: int, world_size: int, extra: Mapping[str, str]) -> dict[str, str]:
    path = dict.fromkeys([str(root), *filter(_is_of_tests, sys.path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **{name: value for name, value in os.environ.items() if name not in SET_BY_LIBRARIES},
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compile workers per rank
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": os.pathsep.join(path),
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # or gloo looks up the host's name, which may not resolve
    return {**environment, **extra}


def _is_of_tests(path: str) -> bool:
    """Whether pytest has put a folder into the path of imports."""
    here = Path(__file__).resolve().parent
    return any(Path(path).resolve().is_relative_to(folder) for folder in (here, here.parent / "benchmarks"))


@functools.cache
def preloaded_of(which: int, modules: tuple[str, ...] = (), extra: tuple[tuple[str, str], ...] = ()) -> Preloaded:
    """One of the two (see [Note: two seeds] there), with the environment of this process and ``extra``."""
    return Preloaded(_environment(Path(__file__).parent, 0, 0, dict(extra)), modules)


def _start(directory: Path, rank: int, environment: dict[str, str], seed: _Seed) -> _Rank:
    environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    arguments = [str(directory), str(rank)]
    with open(directory / f"log{rank}", "wb") as log:
        if sys.platform == "linux" and seed(rank % 2).fits(environment):
            return seed(rank % 2).start(arguments, environment, log.fileno())
        return subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def _processes(directory: Path, world_size: int, environment: dict[str, str], seed: _Seed) -> Iterator[list[_Rank]]:
    """Start the ranks, each the leader of a process group; at the end kill what is left of these groups."""
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            ranks.append(_start(directory, rank, environment, seed))
        yield ranks
    finally:
        for process in ranks:
            # The leader has not been reaped, so its id cannot belong to anyone else.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in ranks:
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
        for rank in range(len(ranks)):
            print(_log(directory, rank), end="")  # pytest shows it with a failing test


def _wait(ranks: list[_Rank], directory: Path, deadline: float, timeout: float, lost: Collection[int]) -> None:
    """Return when all ranks have left a result and exited; raise at the first failure."""
    finishing = False
    while True:
        exits = [_exit_code(process) for process in ranks]
        results = [rank in lost or (directory / f"result{rank}.pt").exists() for rank in range(len(ranks))]
        if _failed(ranks, directory, lost):
            _raise_failures(ranks, directory, lost)
        if all(code == 0 for rank, code in enumerate(exits) if rank not in lost):
            return
        if all(results) and not finishing:
            finishing = True
            for process in ranks:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(_FINISH)  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
        if time.monotonic() > deadline:
            _raise_timeout(ranks, directory, timeout, results)
        time.sleep(_POLL_SECONDS)


def _exit_code(process: _Rank) -> int | None:
    """Without reaping (see ``_processes``)."""
    return process.exit_code() if isinstance(process, Fork) else exit_code(process.pid)


def _failed(ranks: list[_Rank], directory: Path, lost: Collection[int]) -> dict[int, str]:
    """What each rank that has failed left: its traceback, or how it ended."""
    found = {}
    for rank, process in enumerate(ranks):
        code, result = _exit_code(process), (directory / f"result{rank}.pt").exists()
        if (error := directory / f"error{rank}").exists():
            found[rank] = f"rank {rank} raised:\n{error.read_text()}"
        elif rank not in lost and code is not None and (code != 0 or not result):
            what = f"died of signal {-code}" if code < 0 else f"exited with code {code}"
            where = "after" if result else "without"
            found[rank] = f"rank {rank} {what} {where} a result; {_last_output(directory, rank)}"
    return found


def _raise_failures(ranks: list[_Rank], directory: Path, lost: Collection[int]) -> NoReturn:
    """Raise what failed ranks have left: deaths first, then tracebacks, the earliest first, as later ones tend to
    follow from it. One may come a moment after the error that it has caused on another rank."""
    deadline = time.monotonic() + _QUIET_SECONDS
    while len(found := _failed(ranks, directory, lost)) < len(ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    errors = {rank: directory / f"error{rank}" for rank in found}
    order = sorted(found, key=lambda rank: errors[rank].stat().st_mtime_ns if errors[rank].exists() else 0)
    raise RuntimeError("\n".join(found[rank] for rank in order))


def _raise_timeout(ranks: list[_Rank], directory: Path, timeout: float, results: list[bool]) -> NoReturn:
    before = _log_sizes(directory, len(ranks))
    for process in ranks:
        if _exit_code(process) is None:
            process.send_signal(signal.SIGUSR1)  # faulthandler prints the stacks
    _wait_for_stacks(directory, before)
    waiting = [rank for rank, done in enumerate(results) if not done]
    outputs = [f"rank {rank}: {_last_output(directory, rank)}" for rank in range(len(ranks))]
    summary = f"no result of ranks {waiting} after {timeout:g} seconds"
    raise RuntimeError("\n".join([summary if waiting else f"ranks did not exit in {timeout:g} seconds", *outputs]))


def _wait_for_stacks(directory: Path, before: list[int]) -> None:
    """Until all ranks have printed since their logs had the sizes ``before``, and are quiet."""
    deadline, changed, sizes = time.monotonic() + _DUMP_SECONDS, time.monotonic(), before
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        found = _log_sizes(directory, len(before))
        if found != sizes:
            changed, sizes = time.monotonic(), found
        printed = all(size > old for size, old in zip(sizes, before, strict=True))
        if printed and time.monotonic() > changed + _QUIET_SECONDS:
            return


def _log_sizes(directory: Path, world_size: int) -> list[int]:
    return [(directory / f"log{rank}").stat().st_size for rank in range(world_size)]


def _log(directory: Path, rank: int) -> str:
    return (directory / f"log{rank}").read_text(errors="replace")


def _last_output(directory: Path, rank: int) -> str:
    text = _log(directory, rank)[-_LOG_CHARACTERS:]
    return f"its last output:\n{text}" if text else "it wrote nothing"


# In the rank's process


def main(folder: str, number: str) -> None:
    """A rank's life. ``folder``: of the call. ``number``: its rank."""
    directory, rank = Path(folder), int(number)
    trace_cheaply()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts behind & ignores it
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    finish = threading.Event()
    threading.Thread(target=_watch_parent, args=(finish,), daemon=True).start()
    try:
        module, qualname, args, backend, timeout = torch.load(directory / "call.pt", weights_only=False)
        function = _resolve(module, qualname)
        if backend is not None:
            _initialise(backend, rank, timeout)
        result = io.BytesIO()
        torch.save(function(*args), result)
        _publish(directory / f"result{rank}.pt", result.getvalue())
    except BaseException:
        _publish(directory / f"error{rank}", traceback.format_exc().encode())
        threading.Event().wait()  # for the parent's kill (see [Note: life of a rank])
    finish.wait()
    if dist.is_initialized():
        dist.destroy_process_group()


def _resolve(module: str, qualname: str) -> Callable[..., object]:
    value: Any = __import__(module, fromlist=[""])
    for part in qualname.split("."):
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def _initialise(backend: str, rank: int, timeout: float) -> None:
    if torch.accelerator.is_available() and backend != "gloo":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def _publish(path: Path, content: bytes) -> None:
    """Write a file that appears complete or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(path)


def _watch_parent(finish: threading.Event) -> None:
    if os.read(0, len(_FINISH)) == _FINISH:
        finish.set()
    else:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
