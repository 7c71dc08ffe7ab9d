"""``make replay``: does a change leave every graph, program and report as they were?

    python tests/replay.py [--against REVISION] [--only REGULAR_EXPRESSION] [--jobs 2]

The corpus of ``replay_cases.py`` runs on the package as it is in the working tree and as it is in a revision of git, in
processes of their own. Texts that differ are printed as unified diffs (whole ones are left in ``build/replay/diffs``),
and the exit code is 1. A revision's texts are kept for the next comparison.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "replay"
CORPUS = ("replay_cases.py", "models.py")
SHOWN = 40  # lines of each diff that are printed


def texts_of(source: Path, folder: Path, names: Sequence[str], jobs: int) -> Path:
    """Writes the texts of ``names`` to ``folder`` with the package that lies in ``source``."""
    package = folder.with_name(f"{folder.name}-package")
    shutil.rmtree(package, ignore_errors=True)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(package), str(source)]
    subprocess.run(install, check=True)
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(ROOT / "tests" / "replay_cases.py"), str(folder)]
    parts = [names[first::jobs] for first in range(jobs)]
    running = [subprocess.Popen([*program, *part], env=environment) for part in parts if part]
    if any([process.wait() for process in running]):
        raise SystemExit(f"the corpus did not run on the package of {source}")
    return folder


def revision_texts(revision: str, names: Sequence[str], jobs: int) -> Path:
    """The texts of a revision of git: those that an earlier comparison has left, and the others."""
    commit = subprocess.run(
        ["git", "rev-parse", "--verify", f"{revision}^{{commit}}"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    corpus = hashlib.sha256(b"".join((ROOT / "tests" / name).read_bytes() for name in CORPUS)).hexdigest()
    folder = FOLDER / f"{commit[:12]}-{corpus[:12]}"
    missing = [name for name in names if not file_of(folder, name).exists()]
    if missing:
        source = FOLDER / f"{commit[:12]}-source"
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(source, filter="data")
        texts_of(source, folder, missing, jobs)
    return folder


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.txt"


def differences(before: Path, after: Path, names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Name → lines of a unified diff, of the texts that differ."""
    for name in names:
        texts = [file_of(folder, name).read_text() for folder in (before, after)]
        if texts[0] != texts[1]:
            old, new = (text.splitlines() for text in texts)
            yield name, list(difflib.unified_diff(old, new, f"{name}, before", f"{name}, after", lineterm="", n=2))


def main() -> int:
    from replay_cases import names as names_of_corpus

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", metavar="REVISION", help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="REGEX", help="of 'model, setting'; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one per core")
    options = parser.parse_args()
    names = [name for name in names_of_corpus() if re.search(options.only, name)]
    if not names:
        parser.error(f"--only: no case matches {options.only!r}")
    before = revision_texts(options.against, names, options.jobs)
    shutil.rmtree(FOLDER / "now", ignore_errors=True)
    after = texts_of(ROOT, FOLDER / "now", names, options.jobs)
    diffs = FOLDER / "diffs"
    shutil.rmtree(diffs, ignore_errors=True)
    diffs.mkdir()
    changed = 0
    for name, lines in differences(before, after, names):
        changed += 1
        file_of(diffs, name).write_text("\n".join(lines))
        left = len(lines) - SHOWN
        print("\n".join(lines[:SHOWN] + ([f"… {left} more lines"] if left > 0 else [])))
    print(f"{len(names)} texts, {changed} of them changed since {options.against}")
    return 1 if changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
