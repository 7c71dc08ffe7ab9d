"""The Trainer of transformers, with ours in its place, beside the same with Accelerate's own FSDP2."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_script import make_model
from running import run_script

SCRIPT = Path(__file__).with_name("trainer_script.py")
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def launch(folder: Path, *arguments: str) -> dict[str, Any]:
    return run_script(TORCHRUN, SCRIPT, folder, *arguments)


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
