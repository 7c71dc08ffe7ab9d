"""Other people's models train with ours as they do alone; and the comparison would find one that does not."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import models_compatibility
import pytest
import torch
from device_checks.processes import models_that_train
from third_party import library_programs
from third_party.case import Case
from third_party.comparison import Differs, check, compare, train
from third_party.forks import in_this_process
from torch import Tensor, nn

SCRIPT = Path(models_compatibility.__file__)


IN_PIECES = {"Wav2Vec2ForCTC", "SwitchTransformersForConditionalGeneration", "Qwen2VLForConditionalGeneration"}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_sample_of_transformers_trains_as_it_does_alone() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--sample"], capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    sample = {*models_compatibility.SAMPLE_ON_TWO_RANKS, *models_compatibility.SAMPLE_ALONE}
    assert results == {name: "fullgraph=False" if name in IN_PIECES else "fullgraph" for name in sample}


def linear_case() -> Case:
    return Case("", "", lambda: nn.Linear(2, 2), lambda: {"input": torch.randn(3, 2)}, lambda output: output.sum())


@pytest.mark.usefixtures("fake_group")
def test_a_gradient_that_is_off_and_one_that_is_missing_are_found() -> None:
    case = linear_case()
    torch.manual_seed(0)
    expected, found = (train(case, nn.Linear(2, 2).requires_grad_(True)) for _ in range(2))
    with pytest.raises(Differs, match="the loss of step 0"):
        check(found, expected)
    found.losses[:] = expected.losses
    found.gradients[0]["weight"] = Tensor(expected.gradients[0]["weight"]) * 1.01
    with pytest.raises(Differs, match="in step 0, the gradient of 'weight' is off by"):
        check(found, expected)
    found.gradients[0]["weight"] = None
    with pytest.raises(Differs, match="in step 0, 'weight' has no gradient"):
        check(found, expected)


def test_a_model_trains_in_this_process_too() -> None:
    """As on an accelerator, where a process that forks cannot use it."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (the backend "fake")

    found = in_this_process(functools.partial(compare, linear_case(), ("graph_fsdp",)), "fake")
    assert found["graph_fsdp"]["result"] == "fullgraph"


def test_a_check_of_an_accelerator_fails_where_a_model_does_not_train() -> None:
    def row(compiled: str, fsdp2: str, ours: str) -> dict[str, Any]:
        return {"name": "A", "results": {"torch.compile": compiled, "FSDP2": fsdp2, "graph_fsdp": ours}}

    fine = [row("fullgraph", "trains", "fullgraph=False"), row("Unsupported", "trains", "Unsupported")]
    assert models_that_train(fine) == {"models": 2, "train": 1, "with torch.compile neither": ["A"]}
    for wrong in (row("fullgraph=False", "trains", "Differs: …"), row("no CUDA", "no CUDA", "no CUDA")):
        with pytest.raises(AssertionError, match=wrong["results"]["graph_fsdp"]):
            models_that_train([*fine, wrong])


def test_losses_of_libraries_are_compared_one_by_one() -> None:
    expected = {"trained": {"loss": [4.0, 3.0]}}
    assert library_programs.difference(expected, {"trained": {"loss": [4.0, 3.00001]}}) == "as DDP"
    assert library_programs.difference(expected, {"trained": {"loss": [4.0, 3.1]}}) == "trained: loss 1 is 3.1, not 3"
    assert "1 values of loss, not 2" in library_programs.difference(expected, {"trained": {"loss": [4.0]}})
