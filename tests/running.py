"""Training scripts that are run as their users run them, and write what happened to ``facts.json``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_script(launcher: list[str], script: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """What ``script --out folder arguments…`` has written about itself.

    Args:
        launcher: module and options that start the processes, for ``python -m``: torchrun's, ``accelerate launch``.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", *launcher, str(script), "--out", str(folder), *arguments]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, start_new_session=True
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts
