"""Run a function in a fresh process with four virtual XLA devices: ``run_xla(function, *args)``.

XLA's CPU client is made once in a process, with the number of devices that the environment says, and SPMD cannot be
switched off again; a collective whose partners do not come aborts the process. So a test starts a process of its
own, as `tests/launch.py` starts ranks (with its hard timeout, and the child's output in the failure).

FACTS = XlaFacts(__name__)      # small facts that share one process, as in tests/facts.py

@FACTS
def a_shard_is_a_quarter() -> None:
    ...

test_on_four_devices = FACTS.on_devices()
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from facts import Facts, Failures, check_all
from launch import TIMEOUT_SECONDS, run_ranks

Result = TypeVar("Result")

DEVICES = 4
ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": str(DEVICES),
    "XLA_THREAD_POOL_SIZE": str(2 * DEVICES),  # a collective holds a thread per device until all have come
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # Without LLVM's passes over kernels, which took half of the time; all that XLA does before them stays the same.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}
# What all these processes import, once for all of a worker's tests: see tests/preloaded.py.
MODULES = ("torch_xla", "torch_xla.distributed.spmd", "graph_fsdp.xla", "graph_fsdp.runtime.xla.program", "numpy")
_FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def run_xla(
    function: Callable[..., Result],
    *args: object,
    timeout: float = TIMEOUT_SECONDS,
    env: Mapping[str, str] | None = None,
) -> Result:
    """Call ``function(*args)`` in a fresh process with ``ENVIRONMENT``, which ``env`` adds to, and return its result.

    ``function`` must be importable; arguments and results are pickled (return tensors on the CPU).

    Raises:
        RuntimeError: the function raised (its traceback is in the message), the process died, or it took more than
            ``timeout`` seconds. The process and its children are dead by then.
    """
    path = os.pathsep.join([*_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**ENVIRONMENT, "PYTHONPATH": path, **(env or {})}
    return run_ranks(function, 1, *args, timeout=timeout, backend=None, env=environment, modules=MODULES)[0]


def run_program(path: Path, *arguments: str, timeout: float = TIMEOUT_SECONDS) -> str:
    """What ``python path arguments`` prints in a fresh process with ``ENVIRONMENT``, as ``run_xla`` starts it.

    Raises:
        RuntimeError: as ``run_xla``, and where the program ends with another exit code than 0.
    """
    return run_xla(_as_program, path, arguments, timeout=timeout)


def _as_program(path: Path, arguments: Sequence[str]) -> str:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]  # no launcher starts it
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{path.name} ended with {end.code}; it printed:\n{printed.getvalue()}") from end
    return printed.getvalue()


class XlaFacts(Facts):
    """Facts that share a process: none may leave SPMD, a mesh or a seed other than the next expects."""

    def on_devices(self, **options: Any) -> Callable[[Failures, str], None]:
        """The test of all facts, in a process that ``run_xla`` starts with these options."""
        return self.tested(lambda: [run_xla(check_all_on_xla, self.module, **options)])


def check_all_on_xla(module: str) -> dict[str, str]:
    import torch_xla  # noqa: F401  # or "xla" is no device

    return check_all(module)
