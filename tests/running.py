"""Training scripts that are run as their users run them, and write what happened to ``facts.json``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_script(launcher: list[str], script: Path, folder: Path, *trainings: list[str]) -> list[dict[str, Any]]:
    """What each training of a script has written about itself.

    Args:
        launcher: module and options that start the processes, for ``python -m``: ``accelerate launch``.
        folder: with one for each training, which is the script's ``--out``.
        trainings: the name of the folder, and what else the script is given.
    """
    command = [sys.executable, "-m", *launcher, str(script)]
    for name, *arguments in trainings:
        (folder / name).mkdir()
        command += [*(["--then"] if command[-1] != str(script) else []), "--out", str(folder / name), *arguments]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, start_new_session=True
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    return [json.loads((folder / name / "facts.json").read_text()) for name, *_ in trainings]
