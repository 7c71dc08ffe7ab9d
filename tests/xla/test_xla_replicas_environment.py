"""``sharding="replicas"`` where a process is no replica: one clear error each, and nothing is changed."""

from __future__ import annotations

import os
import re

import pytest
from launch import run_ranks
from torch import nn
from xla_launch import ENVIRONMENT, MODULES, run_xla

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


def refusals_under_torchrun() -> list[str]:
    """Without a process group, and with one."""
    import torch.distributed as dist
    import torch_xla

    found = []

    def train(index: int) -> None:
        assert index == int(os.environ["LOCAL_RANK"]), "it is called in the process that torchrun has started"
        found.append(refusal(spmd=False))

    torch_xla.launch(train)
    dist.init_process_group("gloo")
    torch_xla.launch(train)
    return found


def test_processes_of_torchrun_on_the_cpu_client_are_worlds_of_one() -> None:
    """Each would train a model of its own, without a word."""
    env = {**ENVIRONMENT, "CPU_NUM_DEVICES": "1", "TORCHELASTIC_RUN_ID": "none"}
    for refused in run_ranks(refusals_under_torchrun, 2, backend=None, env=env, modules=MODULES):
        assert len(refused) == 2
        for message in refused:
            assert re.search(r"^MeshError: mesh: torch\.distributed .* counts 2 processes and XLA 1 ", message)
