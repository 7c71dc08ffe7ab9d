"""What all benchmarks share: their command line, their ranks, and where results go.

A benchmark starts its own ranks (``--ranks 2``), or is itself started on them by torchrun:

    python benchmarks/step_time.py --ranks 2
    torchrun --nproc-per-node 8 benchmarks/step_time.py

Results are JSON under ``benchmarks/results``, plots SVG under ``docs/images``; ``benchmarks/tables.py`` brings the
tables of ``docs/performance.md`` up to date with them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tables import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from workloads import Workload

# A thread of gloo lets go of a collective's tensors after the rank that waited for it has gone on. If Python ends
# first, the process ends with "terminate called without an active exception", as in torch's issue 190489.
GLOO_SECONDS = 0.2

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
PROCESS_GROUPS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Disagreement(Exception):
    """An implementation computed something else than the reference did: what it measures means nothing."""


# The command line


def parser_of(description: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have. ``name``: of the result."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("where to run")
    group.add_argument("--ranks", type=int, help="processes to start (default: one per accelerator, or 2 on CPU)")
    group.add_argument("--device", choices=sorted(PROCESS_GROUPS), help="default: the accelerator, or else cpu")
    group = parser.add_argument_group("what to train")
    sizes = Workload()
    group.add_argument("--model", choices=("gpt", "llama"), default=sizes.model)
    for size in ("width", "heads", "vocab", "batch", "length"):
        group.add_argument(f"--{size}", type=int, default=getattr(sizes, size))
    group.add_argument("--dtype", choices=sorted(POLICIES), default="float32", help="bfloat16 reduces in float32")
    group = parser.add_argument_group("results")
    group.add_argument("--name", default=name, help="of the JSON and SVG file (default: %(default)s)")
    group.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    group.add_argument("--images", type=Path, default=IMAGES, help="folder of the SVG file")
    group.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser


def workload_of(options: argparse.Namespace, **changes: Any) -> Workload:
    names = ("model", "layers", "width", "heads", "vocab", "batch", "length")
    return Workload(**{name: getattr(options, name) for name in names if hasattr(options, name)} | changes)


def command_of(script: str, arguments: Sequence[str]) -> str:
    """The command line without where its results went, behind whether programs were kept, if that was told."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for folder in ("--results", "--images"):
        parser.add_argument(folder)
    _, kept = parser.parse_known_args(list(arguments))
    given = [f"{name}={os.environ[name]}" for name in ("GRAPH_FSDP_PROGRAMS",) if name in os.environ]
    return shlex.join([*given, "python", f"benchmarks/{Path(script).name}", *kept])


# Ranks


def on_a_rank() -> bool:
    return "RANK" in os.environ


def default_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def default_ranks(device: str) -> int:
    return 2 if device == "cpu" else torch.accelerator.device_count()


def start_ranks(script: str, arguments: Sequence[str], ranks: int, device: str, **environment: str) -> int:
    """Run a script on ranks of this machine; the exit code, which is 0 when all of them succeeded."""
    inherited = {"KINETO_LOG_LEVEL": "99", **os.environ}  # the profiler says when it starts and stops
    if device == "cpu":
        inherited.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
        if sys.platform == "linux":  # or gloo looks up the host's name, which may not resolve
            inherited.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    finished = subprocess.run([*command, script, *arguments], env={**inherited, **environment})
    return finished.returncode


@contextlib.contextmanager
def process_group(device: str) -> Iterator[DeviceMesh]:
    """The default process group of this rank, where there is none yet, and a mesh of all ranks."""
    if dist.is_initialized():
        yield init_device_mesh(device, (dist.get_world_size(),))
        return
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(PROCESS_GROUPS[device])
    try:
        yield init_device_mesh(device, (dist.get_world_size(),))
    finally:
        if device == "cpu":
            time.sleep(GLOO_SECONDS)
        dist.destroy_process_group()


def gather(value: Any) -> list[Any]:
    """Each rank's ``value``, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def synchronize(device: str) -> None:
    """Wait for what the device was given."""
    if device != "cpu":
        torch.accelerator.synchronize()


def forget() -> None:
    """Drop compiled code and what it holds, so that the next model starts as the first one did."""
    torch._dynamo.reset()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def say(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


# Results


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: str, ranks: int) -> dict[str, Any]:
    accelerator = torch.get_device_module(device).get_device_name() if device != "cpu" else None
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "accelerator": accelerator,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "process_group": PROCESS_GROUPS[device],
        "ranks": ranks,
        "threads_per_rank": torch.get_num_threads(),
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _rounded(value: Any) -> Any:
    """Floats with as many digits as a measurement has at most."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def publish(
    options: argparse.Namespace,
    result: dict[str, Any],
    table: Callable[[dict[str, Any]], Table],
    plot: Callable[[dict[str, Any], Path], None],
) -> None:
    """Print a benchmark's table, write its JSON, draw its plot."""
    result = _rounded(result)
    print(table(result).markdown() if options.markdown else table(result).text(), flush=True)
    path = options.results / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    plot(result, options.images / f"{options.name}.svg")


def run_on_ranks(
    script: str,
    arguments: Sequence[str],
    options: argparse.Namespace,
    run: Callable[[], dict[str, Any] | None],
    table: Callable[[dict[str, Any]], Table],
    plot: Callable[[dict[str, Any], Path], None],
) -> int:
    """A benchmark whose ranks measure together: start them, or be one of them and ``run``, which returns the result on
    the rank that publishes it. The exit code."""
    if not on_a_rank():
        return start_ranks(script, arguments, options.ranks or default_ranks(options.device), options.device)
    try:
        result = run()
    except Disagreement as error:
        say(f"FAILED: {error}")
        return 1
    if result is not None:
        publish(options, result, table, plot)
    return 0
