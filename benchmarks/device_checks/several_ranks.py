"""Part B: several ranks of the device's own process group, on several devices or on one that allows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from harness import PROCESS_GROUPS, ROOT

from device_checks import ACCELERATORS, HERE, CannotRun, Figures, check

REFUSED = ("Duplicate GPU detected", "invalid usage")


@check("B", 240, needs=ACCELERATORS, reason="NCCL or xccl joins the ranks; gloo's on the CPU are tested")
def ranks_of_the_devices_own_group(device: torch.device) -> Figures:
    """Two ranks with the process group that training uses; of one device, where it takes two ranks of one."""
    devices = torch.accelerator.device_count()
    script = str(Path(__file__).with_name("two_ranks.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    ranks = subprocess.run(
        [*command, device.type, PROCESS_GROUPS[device.type]],
        capture_output=True,
        text=True,
        cwd=ROOT / "benchmarks",
        env={**os.environ, **HERE},
    )
    said = ranks.stdout + ranks.stderr
    if ranks.returncode and devices == 1 and any(text in said for text in REFUSED):
        raise CannotRun(f"{PROCESS_GROUPS[device.type]} takes one rank of a device, and there is one device")
    assert ranks.returncode == 0, said[-3000:]
    return {"devices": devices}
