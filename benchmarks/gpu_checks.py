"""One command on an accelerator: is it right there, and how fast.

    make gpu                     all parts
    make gpu PART=A              A: correctness; B: several ranks; C: speed. Each takes at most 9 minutes
    python benchmarks/gpu_checks.py A --device cpu

Each check is a process of its own, which is ended when its time is up, so that one that hangs or crashes takes no other
with it. A check passed, failed, or could not run, and then says what it needs; none is left out in silence. Results are
``gpu_checks_A.json`` and so on in ``--out``. The exit code is 1 if a check failed.

On a machine without an accelerator the parts run to their end on the CPU, with small models: a rehearsal. The package
need not be installed: what is missing of it is taken from this checkout. Not run on an accelerator so far.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("A", "B", "C")
PART_SECONDS = 9 * 60
MARK = "RESULT "
PASSED, FAILED, CANNOT_RUN = "passed", "FAILED", "could not run"


def run_check(name: str, device: str) -> None:
    """In a process of its own: print what came of one check, as a line of JSON."""
    import torch
    from device_checks import CHECKS, CannotRun

    load_checks()
    chosen = torch.device(device) if device == "cpu" else torch.device(device, 0)
    try:
        if device != "cpu":
            torch.accelerator.set_device_index(0)
        result = {"state": PASSED, "figures": CHECKS[name].function(chosen), "says": ""}
    except CannotRun as reason:
        result = {"state": CANNOT_RUN, "figures": {}, "says": str(reason)}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        result = {"state": FAILED, "figures": {}, "says": f"{type(error).__name__}: {error}"}
    print(f"\n{MARK}{json.dumps(result)}", flush=True)
    os._exit(0)  # what a process group's threads would still wait for is of no interest


def load_checks() -> None:
    from device_checks import correctness, several_ranks, speed

    assert correctness and several_ranks and speed  # importing them has registered their checks


def in_a_process(name: str, device: str, seconds: float) -> dict[str, Any]:
    """What came of one check, with the seconds that it took and the end of what it printed."""
    command = [sys.executable, str(Path(__file__).resolve()), "--check", name, "--device", device]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(seconds)
            result = {"state": FAILED, "figures": {}, "says": f"the process ended with {code} and said nothing"}
        except subprocess.TimeoutExpired:
            result = {"state": FAILED, "figures": {}, "says": f"was ended after {seconds:.0f} s"}
        finally:
            end(process)
        output.seek(0)
        lines = output.read().splitlines()
    for line in lines:
        if line.startswith(MARK):
            result = json.loads(line.removeprefix(MARK))
    printed = [line for line in lines if not line.startswith(MARK)]
    return {**result, "seconds": round(time.monotonic() - begin, 1), "output": printed[-60:]}


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


def cannot_run(reason: str) -> dict[str, Any]:
    return {"state": CANNOT_RUN, "figures": {}, "says": reason, "seconds": 0.0, "output": []}


def run_part(part: str, device: str, names: Sequence[str], out: Path) -> dict[str, Any]:
    """Run the checks of a part one after the other, print a line of each, and write what came of them."""
    from device_checks import CHECKS

    results: dict[str, Any] = {}
    begin = time.monotonic()
    for name in names:
        check, left = CHECKS[name], PART_SECONDS - (time.monotonic() - begin)
        if check.needs not in (None, device):
            row = cannot_run(f"needs a device of type {check.needs!r}, and this is {device!r}")
        elif left < 5:
            row = cannot_run("the part's time was up")
        else:
            row = in_a_process(name, device, min(check.seconds, left))
        results[name] = row
        says = row["says"].splitlines()[:1]
        print(f"{part}  {name:<42} {row['state']:<14}{row['seconds']:>6.1f} s  {''.join(says)[:200]}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"gpu_checks_{part}.json"
    path.write_text(json.dumps({"device": device, "checks": results}, indent=1) + "\n")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="A, B, C; default: all")
    parser.add_argument("--device", help="cuda, xpu or cpu; default: the accelerator, or else cpu")
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="these checks alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"PART: {', '.join(unknown)}: the parts are {', '.join(PARTS)}")
    if options.check:
        run_check(options.check, options.device)
    with importable():
        return run_parts(parser, options)


def run_parts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    import torch
    from device_checks import CHECKS

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = options.device or (accelerator.type if accelerator else "cpu")
    load_checks()
    if unknown := sorted(set(options.only or ()) - set(CHECKS)):
        parser.error(f"--only: {', '.join(unknown)}: known are {', '.join(CHECKS)}")
    if device == "cpu":
        print("No accelerator: a rehearsal on the CPU.")
    everything: dict[str, Any] = {}
    for part in options.parts or PARTS:
        names = [c.name for c in CHECKS.values() if c.part == part and (not options.only or c.name in options.only)]
        everything |= run_part(part, device, names, options.out)
    left = [f"{name} ({row['says']})" for name, row in everything.items() if row["state"] == CANNOT_RUN]
    if left:
        print("Could not run:", *left, sep="\n  ")
    return int(any(row["state"] == FAILED for row in everything.values()))


if __name__ == "__main__":
    sys.exit(main())
