"""The Trainer of transformers, with ours in its place, beside the same with Accelerate's own FSDP2."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_script import make_model

SCRIPT = Path(__file__).with_name("trainer_script.py")


def launch(folder: Path, *arguments: str) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    finished = subprocess.run(
        [*command, "--out", str(folder), *arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Any]:
    return launch(folder / "theirs", "--own")


def test_losses_are_those_of_accelerates_fsdp2(folder: Path, theirs: dict[str, Any]) -> None:
    ours = launch(folder / "ours")
    assert ours["compiled"] and not theirs["compiled"]
    assert len(ours["losses"]) == 6
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-6)


def test_a_checkpoint_of_accelerates_fsdp2_is_resumed(folder: Path, theirs: dict[str, Any]) -> None:
    resumed = launch(folder / "resumed", "--resume", str(folder / "theirs" / "run" / "checkpoint-3"))
    assert resumed["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    loaded = type(make_model()).from_pretrained(folder / "resumed" / "saved")
    expected = type(make_model()).from_pretrained(folder / "theirs" / "saved")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-4, atol=1e-6)
