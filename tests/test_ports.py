"""The scripts that docs/migrating.md ports, on two ranks, beside their originals' steps. The originals are in
``originals.py``. Losses are compared bit for bit."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import digits
import from_deepspeed
import from_fsdp2
import originals
from from_deepspeed import ZERO3, read
from ranks import Ranks, launched

import graph_fsdp

EPOCHS, BATCH, UNIT = 2, 64, 20_000
STEPS, LAYERS, LENGTH, ROWS = 3, 2, 16, 4
SETTINGS = {
    "float32": {"mixed": False, "explicit": False, "dcp_api": False},
    "bfloat16": {"mixed": True, "explicit": True, "dcp_api": True},
}


def fsdp2_port(folder: Path, mixed: bool, explicit: bool, dcp_api: bool) -> list[float]:
    flags = [
        *(["--mixed-precision"] if mixed else []),
        *(["--explicit-prefetching"] if explicit else []),
        *(["--dcp-api"] if dcp_api else []),
    ]
    sizes = ["--steps", STEPS, "--layers", LAYERS, "--length", LENGTH, "--batch", ROWS, "--checkpoints", folder]
    return from_fsdp2.run([*map(str, sizes), *flags, "--backend", "eager", "--device", "cpu"])


def all_of_them(folder: str) -> dict[str, Any]:
    """On a rank."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    common = ["--backend", "eager", "--device", "cpu"]
    with launched("cpu") as ranks, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="offload_policy=")
        sizes = ["--epochs", str(EPOCHS), "--batch", str(BATCH), "--min-num-params", str(UNIT), "--offload"]
        ours = digits.run([*sizes, *common])
        found["fsdp1"] = ours.losses, ours.accuracy
        found["units"] = str(graph_fsdp.inspect(ours.model).forward)
        found["fsdp1 original"] = originals.fsdp1_mnist(EPOCHS, BATCH, UNIT)
        for name, settings in SETTINGS.items():
            torch._dynamo.reset()
            mine, theirs = Path(folder) / name, Path(folder) / f"{name} original"
            first = fsdp2_port(mine, **settings)  # from random values
            if ranks.rank == 0:
                shutil.copytree(mine, theirs)
            ranks.from_first("copied")
            found[name] = [first, fsdp2_port(mine, **settings)]
            sizes_there = {"steps": STEPS, "layers": LAYERS, "length": LENGTH, "batch": ROWS}
            resumed = originals.fsdp2_transformer(**sizes_there, **settings, folder=str(theirs))
            found[f"{name} original"] = [first, resumed]
            by_original = originals.fsdp2_transformer(**sizes_there, **settings, folder=str(mine))
            found[f"{name} handed over"] = [by_original, fsdp2_port(theirs, **settings)]
        torch._dynamo.reset()
        sizes = ["--steps", str(STEPS), "--layers", str(LAYERS), "--length", str(LENGTH)]
        found["zero3"] = from_deepspeed.run([*sizes, *common])
        found["zero3 original"] = originals.zero3(STEPS, LAYERS, LENGTH)
    return found


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(all_of_them, 2, str(tmp_path_factory.mktemp("ports")), backend=None, timeout=600)


@pytest.mark.long
def test_fsdp1s_mnist_tutorial_has_the_originals_losses_and_accuracy(on_two_ranks: list[dict[str, Any]]) -> None:
    for found in on_two_ranks:
        (losses, accuracy), (there, accuracy_there) = found["fsdp1"], found["fsdp1 original"]
        assert losses == pytest.approx(there, rel=1e-7), "sums over ranks are of float32 here"
        assert losses[-1] < losses[0]
        assert accuracy == accuracy_there > 0.5, "a model that learnt nothing finds a tenth"
        assert "fc1" in found["units"] and "root" in found["units"], "a unit by its size, as the policy says"


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_fsdp2s_tutorial_has_the_originals_losses_and_each_resumes_the_other(
    on_two_ranks: list[dict[str, Any]], name: str
) -> None:
    for found in on_two_ranks:
        first, resumed = found[name]
        assert found[f"{name} original"] == [first, resumed], "resumed from the port's checkpoint"
        assert resumed[-1] < first[0]
        by_original, by_port = found[f"{name} handed over"]
        assert by_original == by_port, "each resumed from what the other has saved"
        assert by_port[-1] < resumed[0]
    assert on_two_ranks[0][name] != on_two_ranks[1][name], "each rank has its own batches"


@pytest.mark.long
def test_a_zero3_script_has_the_losses_of_fully_shard(on_two_ranks: list[dict[str, Any]]) -> None:
    for found in on_two_ranks:
        assert len(found["zero3"]) == 2 * STEPS
        assert found["zero3"] == found["zero3 original"]


# What a configuration of DeepSpeed says

ALONE = Ranks(0, 1, torch.device("cpu"), None)


def passes(settings: from_deepspeed.Settings) -> str:
    return str([repr(a_pass) for a_pass in settings.compile["passes"]])


def test_every_key_of_a_configuration_of_deepspeed_is_taken() -> None:
    settings = read({**ZERO3, "train_batch_size": 16, "fp16": {"enabled": False, "hysteresis": 2}}, ALONE)
    assert (settings.batch, settings.accumulation, settings.clipping) == (8, 2, 1.0)
    assert settings.compile["reshard_after_forward"] is True
    assert settings.compile["mp_policy"].param_dtype == torch.bfloat16
    assert not settings.compile["offload_policy"].pin_memory
    assert "4000000" in passes(settings), "stage3_max_live_parameters, in bytes of bfloat16"
    assert settings.without_effect == [
        "fp16.hysteresis",
        "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients",
    ]
    model = torch.nn.Linear(2, 2)
    optimizer = settings.optimizer(model)
    scheduler = settings.scheduler(optimizer)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0, 7.5e-4, 1.5e-3, 2.25e-3, 3e-3, 3e-3])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param.device is 'nvme'"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_optimization.zero_quantized_we"),
        ({"fp16": {"enabled": True}}, "fp16.enabled needs"),
        ({"gradient_clipping": "auto"}, "gradient_clipping is 'auto'"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type is 'OneBitAdam'"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler OneCycle"),
        ({"train_batch_size": 7}, "train_batch_size 7 is not"),
    ],
)
def test_what_has_no_counterpart_is_an_error_that_names_it(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, **config}, ALONE)


@pytest.mark.parametrize(("stage", "reshard"), [(1, False), (2, False), (3, True)])
def test_stages(stage: int, reshard: bool) -> None:
    zero = {"stage": stage, "stage3_prefetch_bucket_size": 1000} if stage == 3 else {"stage": stage}
    found = read({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, ALONE)
    assert found.compile["reshard_after_forward"] is reshard
    assert "passes" not in found.compile or "4000" in passes(found), "in bytes of float32"
