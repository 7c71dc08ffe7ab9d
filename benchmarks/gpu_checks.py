"""One command on an accelerator: is it right there, and how fast.

    make gpu                     all parts
    make gpu PART=A              A: correctness; B: several ranks; C: speed. Each takes at most 9 minutes
    python benchmarks/gpu_checks.py A --device cuda --out here
    python benchmarks/gpu_results.py here there    what of these folders the documentation shows

Each check is a process of its own, which is ended when its time is up, so that one that hangs or crashes takes no other
with it. Those of part A, which measure nothing, run several at a time. A check passed, failed, or could not run, and
then says what it needs; none is left out in silence. Results are ``gpu_checks_A.json`` and so on in ``--out``, written
after each check. The exit code is 1 if a check failed.

Without an accelerator this is a rehearsal on the virtual device (``virtual/``), or on the CPU where there is no C++
compiler: small models, all checks in one process, as long as none of them hangs or crashes.

The package need not be installed: what is missing of it is taken from this checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("A", "B", "C")
# Of ``device_checks``, in the order in which what they check is wanted.
FILES = ("correctness", "host_waits", "processes", "features", "one_rank", "several_ranks", "speed", "triton_kernels")
PART_SECONDS = 9 * 60
AT_A_TIME = {"A": 4, "B": 1, "C": 1}  # on an accelerator; at most one for four cores
MARK = "RESULT "
PASSED, FAILED, CANNOT_RUN = "passed", "FAILED", "could not run"
TIME_UP = "the part's time was up: run it by itself, with --only"
Result = dict[str, Any]


# In the process of checks


def run_checks(names: Sequence[str], device: str) -> None:
    """Print what came of each check, as a line of JSON."""
    from device_checks import REHEARSED

    load_checks()
    if device in REHEARSED:
        sys.path.append(str(ROOT / "tests"))
        from tracing import trace_cheaply

        trace_cheaply()
    for name in names:
        print(f"\n{MARK}{json.dumps(run_check(name, device))}", flush=True)
    os._exit(0)  # what a process group's threads would still wait for is of no interest


def run_check(name: str, device: str) -> Result:
    import torch
    from device_checks import CHECKS, CannotRun

    try:
        with on_device(device, CHECKS[name].host):
            chosen = torch.device(device) if device == "cpu" else torch.device(device, 0)
            return {"state": PASSED, "figures": CHECKS[name].function(chosen), "says": ""}
    except CannotRun as reason:
        return {"state": CANNOT_RUN, "figures": {}, "says": str(reason)}
    except ModuleNotFoundError as error:
        if (ROOT / "benchmarks" / f"{error.name}.py").exists() or (error.name or "").startswith("graph_fsdp"):
            raise
        return {"state": CANNOT_RUN, "figures": {}, "says": f"{error.name} is not installed"}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return {"state": FAILED, "figures": {}, "says": f"{type(error).__name__}: {error}"}
    finally:
        torch._dynamo.reset()
        gc.collect()


def on_device(device: str, host: Any) -> contextlib.AbstractContextManager[Any]:
    import torch
    from device_checks import VIRTUAL

    if device == VIRTUAL:
        from virtual.machine import Machine

        return Machine("h100", host=host)
    if device != "cpu":
        torch.accelerator.set_device_index(0)
    return contextlib.nullcontext()


def load_checks() -> None:
    """Import the files of checks, which registers them."""
    for name in FILES:
        importlib.import_module(f"device_checks.{name}")


# In the process that starts them


class Output:
    """What a process prints, read while it runs."""

    def __init__(self, process: subprocess.Popen[bytes], file: IO[str]) -> None:
        self.process, self.file = process, file
        self.lines: list[str] = []
        self.rest = ""

    def result(self, limit: float) -> tuple[Result, bool]:
        """What comes of the next check, within so many seconds; False if nothing more will come."""
        begin, printed = time.monotonic(), list[str]()
        while True:
            code, late = self.process.poll(), time.monotonic() - begin > limit
            *lines, self.rest = (self.rest + self.file.read()).split("\n")
            self.lines += lines
            while self.lines:
                line = self.lines.pop(0)
                if line.startswith(MARK):
                    return {**json.loads(line.removeprefix(MARK)), **ended(begin, printed)}, True
                printed.append(line)
            if code is not None or late:
                says = f"was ended after {limit:.0f} s" if late else f"the process ended with {code} and said nothing"
                return {"state": FAILED, "figures": {}, "says": says, **ended(begin, [*printed, self.rest])}, False
            time.sleep(0.02)


def ended(begin: float, printed: Sequence[str]) -> Result:
    return {"seconds": round(time.monotonic() - begin, 1), "output": printed[-60:]}


def in_a_process(names: Sequence[str], device: str, limit_of: Callable[[str], float]) -> Iterator[tuple[str, Result]]:
    """What comes of checks in one process, each with its limit. After one that hangs or dies there are no more."""
    script = str(Path(__file__).resolve())
    command = [sys.executable, script, "--device", device, "--check", *names]
    with tempfile.NamedTemporaryFile() as file, open(file.name, errors="replace") as said:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        output, goes_on = Output(process, said), True
        try:
            for name in names:
                if goes_on:
                    result, goes_on = output.result(limit_of(name))
                    yield name, result
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """The package can be imported here and in what is started: from this checkout, if it is not installed. Its folders
    lie elsewhere in the source, so a copy is made."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(ROOT / "benchmarks")]
        if importlib.util.find_spec("graph_fsdp") is None:
            ignored = shutil.ignore_patterns("__pycache__")
            package = Path(folder) / "graph_fsdp"
            shutil.copytree(ROOT / "graph_fsdp", package, ignore=ignored)
            for part in ("passes", "runtime"):
                shutil.copytree(ROOT / part, package / part, ignore=ignored)
            paths.append(folder)
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        yield


class Checks:
    """Checks on a device, what came of them so far, and when the time of those that run is up. ``seconds``: what a part
    has. ``at_a_time``: so many checks of all parts together."""

    def __init__(
        self, device: str, names: Sequence[str], out: Path, seconds: float = PART_SECONDS, at_a_time: int | None = None
    ) -> None:
        self.device, self.names, self.out = device, names, out
        self.seconds, self.at_a_time = seconds, at_a_time
        self.results: dict[str, Result] = {}
        self.end = 0.0
        self.lock = threading.Lock()

    def run(self) -> dict[str, Result]:
        from device_checks import CHECKS, REHEARSED

        parts: dict[str, list[str]] = {}
        for name in self.names:
            if refusal := CHECKS[name].refusal(self.device):
                self.add(name, cannot_run(refusal))
            else:
                parts.setdefault(CHECKS[name].part, []).append(name)
        if self.device in REHEARSED:
            self.end = time.monotonic() + self.seconds * len(PARTS)
            self.run_in_turn([name for names in parts.values() for name in names])
            return self.results
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self.at_a_time:
            parts = {"all": [name for names in parts.values() for name in names]}
        for part, names in parts.items():
            self.end = time.monotonic() + self.seconds
            with ThreadPoolExecutor(self.at_a_time or max(1, min(AT_A_TIME[part], cores // 4))) as pool:
                list(pool.map(self.run_in_turn, [[name] for name in names]))
        return self.results

    def run_in_turn(self, names: Sequence[str]) -> None:
        """In one process, and in another one after each check that hangs or dies."""
        from device_checks import CHECKS

        left = list(names)

        def limit_of(name: str) -> float:
            return min(CHECKS[name].seconds, self.end - time.monotonic())

        while left and self.end - time.monotonic() > 5:
            with contextlib.closing(in_a_process(list(left), self.device, limit_of)) as results:
                for name, result in results:
                    left.remove(name)
                    in_time = time.monotonic() < self.end
                    self.add(name, result if in_time or result["state"] == PASSED else cannot_run(TIME_UP))
                    if not in_time:
                        break
        for name in left:
            self.add(name, cannot_run(TIME_UP))

    def add(self, name: str, result: Result) -> None:
        """Print a line and write what there is of the check's part."""
        from device_checks import CHECKS

        part = CHECKS[name].part
        with self.lock:
            self.results[name] = result
            says = (result["says"] or ", ".join(f"{k}: {v}" for k, v in result["figures"].items())).splitlines()[:1]
            line = f"{part}  {name:<58} {result['state']:<14}{result['seconds']:>6.1f} s  {''.join(says)}"
            print(line[:200], flush=True)
            in_order = {n: self.results[n] for n in self.names if n in self.results and CHECKS[n].part == part}
            self.out.mkdir(parents=True, exist_ok=True)
            path = self.out / f"gpu_checks_{part}.json"
            about = {"device": self.device, "side_by_side": self.at_a_time is not None}
            path.write_text(json.dumps({**about, "checks": in_order}, indent=1) + "\n")


def cannot(row: Result) -> bool:
    return bool(row["state"] == CANNOT_RUN)


def cannot_run(reason: str) -> Result:
    return {"state": CANNOT_RUN, "figures": {}, "says": reason, "seconds": 0.0, "output": []}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="A, B, C; default: all")
    parser.add_argument("--device", help="cuda, xpu, virtual or cpu; default: the accelerator, or else a rehearsal")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="checks whose names begin so")
    parser.add_argument("--seconds", type=float, default=PART_SECONDS, help="that each part has")
    parser.add_argument(
        "--at-a-time", type=int, help="so many checks, of all parts together: no figure of time is right"
    )
    parser.add_argument("--out", type=Path, help="default: build/gpu, and build/rehearsal for a rehearsal")
    parser.add_argument("--check", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"PART: {', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    if options.check:
        run_checks(options.check, options.device)
    with importable():
        return run_parts(parser, options)


def run_parts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from device_checks import CHECKS, REHEARSED

    load_checks()
    device = options.device or default_device()
    prefixes = options.only or [""]
    if unknown := [p for p in prefixes if not any(name.startswith(p) for name in CHECKS)]:
        parser.error(f"--only: {', '.join(unknown)}: known are {', '.join(CHECKS)}")
    rehearsal = device in REHEARSED
    if rehearsal:
        print(f"A rehearsal on {device!r}: no figure of it is an accelerator's.")
    out = options.out or ROOT / ("build/rehearsal" if rehearsal else "build/gpu")
    wanted = [check.name for check in CHECKS.values() if check.part in (options.parts or PARTS)]
    names = sorted((n for n in wanted if n.startswith(tuple(prefixes))), key=lambda n: CHECKS[n].part)
    everything = Checks(device, names, out, options.seconds, options.at_a_time).run()
    left = Counter((name.partition(":")[0], row["says"]) for name, row in everything.items() if cannot(row))
    states = [row["state"] for row in everything.values()]
    print(", ".join(f"{states.count(state)} {state}" for state in (PASSED, FAILED, CANNOT_RUN)), f"({out})")
    if left:
        print("Could not run:")
    for (name, says), count in left.items():
        print(f"  {name}{f', {count} cases' if count > 1 else ''} ({says})")
    return int(FAILED in states)


def default_device() -> str:
    import torch
    from virtual import library

    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return accelerator.type
    return library.NAME if library.COMPILER is not None else "cpu"


if __name__ == "__main__":
    sys.exit(main())
