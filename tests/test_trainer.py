"""The Trainer of transformers, with ours in its place, beside the same with Accelerate's own FSDP2."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_script
from accelerate.state import AcceleratorState
from accelerate_script import make_model
from launch import run_ranks
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


@pytest.mark.long
def test_losses_are_those_of_accelerates_fsdp2(folder: Path, theirs: dict[str, Any]) -> None:
    ours = launch(folder / "ours")
    assert ours["compiled"] and not theirs["compiled"]
    assert len(ours["losses"]) == 6
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-6)


@pytest.mark.long
def test_a_checkpoint_of_accelerates_fsdp2_is_resumed(folder: Path, theirs: dict[str, Any]) -> None:
    resumed = launch(folder / "resumed", "--resume", str(folder / "theirs" / "run" / "checkpoint-3"))
    assert resumed["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    loaded = type(make_model()).from_pretrained(folder / "resumed" / "saved")
    expected = type(make_model()).from_pretrained(folder / "theirs" / "saved")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def trained_both(folder: str) -> None:
    """On a rank: the script, without a launcher, with ours and with Accelerate's own FSDP2."""
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"  # not by the launch: the rank would be a new process
    for name in ("ours", "own"):
        AcceleratorState._reset_state(reset_partial_state=True)
        out = Path(folder) / name
        out.mkdir(exist_ok=True)
        sys.argv = ["trainer_script.py", "--out", str(out), "--steps", "2", *(["--own"] if name == "own" else [])]
        trainer_script.main()


def test_two_steps_are_those_of_accelerates_fsdp2(tmp_path: Path) -> None:
    run_ranks(trained_both, 2, str(tmp_path), backend=None)
    ours, own = (json.loads((tmp_path / name / "facts.json").read_text()) for name in ("ours", "own"))
    assert ours["compiled"] and not own["compiled"] and len(ours["losses"]) == 2
    assert ours["losses"] == pytest.approx(own["losses"], rel=1e-6)
    assert ours["norms"] == pytest.approx(own["norms"], rel=1e-6)
