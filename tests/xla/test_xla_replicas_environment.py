"""``sharding="replicas"`` where a process is no replica: one clear error each, and nothing is changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn
from xla_launch import ENVIRONMENT, run_xla

import graph_fsdp


def refusal(spmd: bool) -> str:
    import torch_xla.runtime as xr

    if spmd:
        xr.use_spmd()
    model = nn.Linear(4, 4)
    try:
        graph_fsdp.compile(model, backend="xla", sharding="replicas")
    except (ValueError, NotImplementedError) as error:
        assert type(model) is nn.Linear and model.weight.device.type == "cpu"
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("spmd", "expected"),
    [
        (True, r"^UnsupportedError: sharding='replicas' .* SPMD is on, .* leave out torch_xla\.runtime\.use_spmd\(\)"),
        (
            False,
            r"^MeshError: mesh: XLA has 4 devices, and this process is no replica .* torch_xla\.launch\(function\)",
        ),
    ],
)
def test_the_process_must_be_a_replica(spmd: bool, expected: str) -> None:
    assert re.search(expected, run_xla(refusal, spmd))


def test_other_backends_have_no_replicas() -> None:
    with pytest.raises(ValueError, match=r"sharding='replicas' .* takes backend='xla'; backend is 'eager'"):
        graph_fsdp.compile(nn.Linear(4, 4), backend="eager", sharding="replicas")


UNDER_TORCHRUN = """
import sys
import torch.distributed as dist
import torch_xla
from torch import nn
import graph_fsdp

def train(index):
    if sys.argv[1] == "gloo":
        dist.init_process_group("gloo")
    model = nn.Linear(4, 4)
    try:
        graph_fsdp.compile(model, backend="xla", sharding="replicas")
    except graph_fsdp.MeshError as error:
        print("refused:", error, model.weight.device, type(model) is nn.Linear, flush=True)

torch_xla.launch(train)  # which calls it in this process where torchrun started it
"""


@pytest.mark.parametrize("group", ["gloo", "none"])
def test_processes_of_torchrun_on_the_cpu_client_are_worlds_of_one(group: str, tmp_path: Path) -> None:
    """Each would train a model of its own, without a word."""
    program = tmp_path / "train.py"
    program.write_text(UNDER_TORCHRUN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, **ENVIRONMENT, "CPU_NUM_DEVICES": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(program), group], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"refused: mesh: torch\.distributed .* counts 2 processes and XLA 1 .* cpu True", done.stdout)
    assert len(found) == 2, done.stdout + done.stderr[-2000:]
