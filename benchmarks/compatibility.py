"""A part of the tests on several releases of torch and Python: the table of docs/compatibility.md.

    python benchmarks/compatibility.py                            the pairs below, each in an environment made for it
    python benchmarks/compatibility.py --pair 2.11.0:3.12         one of them; "newest:3.12": what pip finds
    python benchmarks/compatibility.py --environment .venv-2.9.1  what an environment has that is there already

The package is installed as the wheel that is built first, so that the sources of the repository are not imported. A
pair that cannot be had is recorded with the reason. Rows of a pair that is run again are replaced; the others stay, and
say so where they are of an earlier selection of tests.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness import RESULTS, ROOT
from tables import Table

FILE = RESULTS / "compatibility.json"
NEWEST = "newest"
PAIRS = [f"{torch}:3.{minor}" for torch in ("2.9.1", "2.11.0", "2.13.0", NEWEST) for minor in (10, 11, 12, 13)]
# Capture, passes, verifier, modules, numbers on several processes, checkpoints, programs of earlier starts and reports.
TESTS = (
    "test_passes.py",
    "test_verify.py",
    "test_verify_values.py",
    "test_printed_graphs.py",
    "test_module.py",
    "test_calls.py",
    "test_runtime_ranks.py",
    "test_checkpoint.py",
    "test_programs.py",
    "test_programs_key.py",
    "test_programs_ranks.py",
    "test_report.py",
    "test_package.py",
)
NEEDED = ("pytest", "pytest-timeout", "expecttest", "safetensors", "transformers")
_ABOUT = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"


class CannotBeHad(Exception):
    """An interpreter or a release of torch."""


def make(pair: str, folder: Path, wheel: Path) -> Path:
    """An environment with that torch and the wheel; its interpreter."""
    torch, python = pair.split(":")
    interpreter = shutil.which(f"python{python}")
    if interpreter is None or subprocess.run([interpreter, "--version"], capture_output=True).returncode:
        raise CannotBeHad(f"no interpreter python{python}")
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    requirement = "torch" if torch == NEWEST else f"torch=={torch}"
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", requirement, str(wheel), *NEEDED]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBeHad(f"pip finds no {requirement} for Python {python}")
    return folder / "bin" / "python"


def run(python: Path, wheel: Path, tests: Sequence[str]) -> dict[str, Any]:
    """The tests with an interpreter whose environment has torch: how many passed, and the names of what failed."""
    pip = [sys.executable, "-m", "pip", "--python", str(python)]  # an environment may be without
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], check=True)
    # -P, or the folder that it runs in would come before the installed package; of the processes that tests start too.
    # Python 3.10 does not have it, and starts in a folder without modules.
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run([str(python), "-c", _ABOUT], check=True, capture_output=True, text=True, cwd=folder)
        torch, version = json.loads(found.stdout)
        results = Path(folder) / "results.xml"
        arguments = [f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml"), f"--junitxml={results}", "-q"]
        files = [str(ROOT / "tests" / name) for name in tests]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        environment["PYTHONPATH"] = str(ROOT / "tests")
        subprocess.run([str(python), "-m", "pytest", *arguments, *files], cwd=folder, env=environment)
        return {"torch": torch, "python": version, **counted(ElementTree.parse(results)), "files": list(tests)}


def counted(results: ElementTree.ElementTree[Any]) -> dict[str, Any]:
    passed, skipped, failed = 0, 0, []
    for case in results.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": failed}


def table(result: dict[str, Any]) -> Table:
    rows = []
    for row in result["rows"]:
        if "reason" in row:
            cells = [f"not run: {row['reason']}", "", ""]
        else:
            names = f": {', '.join(row['failed'])}" if row["failed"] else ""
            earlier = "" if row["files"] == result["files"] else f" of an earlier selection, {len(row['files'])} files"
            cells = [f"{row['passed']}{earlier}", str(row["skipped"]), f"{len(row['failed'])}{names}"]
        rows.append([row["torch"], row["python"], *cells])
    return Table(["torch", "Python", "passed", "skipped", "failed"], rows)


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    numbers = [
        [int(part) for part in row[key].split("+")[0].split(".") if part.isdigit()] for key in ("torch", "python")
    ]
    return row["torch"] == NEWEST, *numbers


def record(row: dict[str, Any]) -> None:
    result = json.loads(FILE.read_text()) if FILE.exists() else {"rows": []}
    kept = [old for old in result["rows"] if (old["torch"], old["python"]) != (row["torch"], row["python"])]
    written = {
        "benchmark": "compatibility",
        "command": "make test-matrix",
        "about": f"`{'`, `'.join(TESTS)}` of version {_version()}, on the CPU",
        "files": TESTS,
        "rows": sorted([*kept, row], key=_order),
    }
    FILE.write_text(json.dumps(written, indent=1) + "\n")


def _version() -> str:
    text = (ROOT / "graph_fsdp" / "__init__.py").read_text()
    return text.split('__version__ = "')[1].split('"')[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="append", metavar="TORCH:PYTHON", help="instead of all")
    parser.add_argument("--environment", action="append", type=Path, help="a virtual environment that is there already")
    parser.add_argument("--not-run", action="append", default=[], metavar="TORCH:PYTHON:REASON", help="record as such")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("graph_fsdp-*.whl")
        for text in options.not_run:
            torch, python, reason = text.split(":", 2)
            record({"torch": torch, "python": python, "reason": reason})
        for environment in options.environment or []:
            row = run(environment.absolute() / "bin" / "python", wheel, TESTS)
            failures += len(row["failed"])
            record(row)
        given = options.environment or options.not_run
        for pair in options.pair or ([] if given else PAIRS):
            place = Path(folder) / "environment"
            try:
                row = run(make(pair, place, wheel), wheel, TESTS)
                failures += len(row["failed"])
            except CannotBeHad as problem:
                row = dict(zip(("torch", "python"), pair.split(":"), strict=True), reason=str(problem))
            record(row)
            shutil.rmtree(place, ignore_errors=True)
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
