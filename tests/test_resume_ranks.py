"""Saved on four ranks, resumed on any number, with other meshes and options, and by FSDP2; and what FSDP2 saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_files import uneven
from launch import run_ranks
from resuming import SAVED_AT, STEPS, Training, compiled, different, odd
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graph_fsdp.checkpoint import load
from graph_fsdp.passes import default_pipeline

# On ranks


def sharded_by_fsdp2(model: nn.Module) -> nn.Module:
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def save(folder: Path) -> list[float]:
    """Four ranks train and save, ours and FSDP2's. The losses after that."""
    torch.set_num_threads(1)
    ours = Training(compiled())
    ours.train(SAVED_AT)
    before = ours.values()
    ours.save(folder / "ours_3")
    assert not different(ours.values(), before), "saving changes nothing"
    torch.save(before, folder / f"expected{dist.get_rank()}.pt")
    full = get_model_state_dict(ours.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")
    else:
        assert full == {}

    small = Training(compiled(), make=odd)
    small.train(SAVED_AT)
    small.save(folder / "odd_3")
    torch.save(small.values(), folder / f"expected_of_odd_{dist.get_rank()}.pt")
    theirs = Training(sharded_by_fsdp2, make=odd)
    theirs.train(SAVED_AT)
    model, optimizer = get_state_dict(theirs.model, theirs.optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder / "fsdp2")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(theirs.model, theirs.optimizer, options=flat)
    dcp.save({**model, "optimizer": optimizer}, checkpoint_id=folder / "fsdp2_flat")
    torch.save(theirs.values(), folder / f"expected_of_fsdp2_{dist.get_rank()}.pt")

    hybrid = Training(compiled(init_device_mesh("cpu", (2, 2))), seed=1)
    hybrid.load(folder / "ours_3")
    assert not different(hybrid.values(), before)
    hybrid.save(folder / "hybrid_3")
    return ours.train(STEPS)


def close(losses: list[float], expected: list[float]) -> bool:
    return len(losses) == len(expected) and all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-4), losses, expected))


def resume(folder: Path, losses: list[float], kinds: list[str]) -> None:
    torch.set_num_threads(1)
    expected = torch.load(folder / "expected0.pt")
    for kind in kinds:
        torch._dynamo.reset()
        options: dict[str, Any] = {
            "of hybrid": {"passes": default_pipeline(bucket=600), "reshard_after_forward": False},
            "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        }.get(kind, {})
        training = Training(compiled(**options), seed=2)
        found = training.load(folder / ("hybrid_3" if kind == "of hybrid" else "ours_3"))
        assert found["step"] == training.step == SAVED_AT
        assert found["position"]["file"] == ("a.txt", 3) and found["position"][7].tolist() == [0, 1, 2]
        assert not different(training.values(), expected), kind
        after = training.train(STEPS)
        assert close(after, losses) or kind == "bfloat16", (kind, after, losses)


def without_averages(training: Training, expected: Path) -> list[dict[str, torch.Tensor]]:
    """What a training has, and what is expected, of model and optimizer."""
    both = (training.values(), torch.load(expected))
    return [{name: value for name, value in values.items() if not name.startswith("average")} for values in both]


def mixed_with_fsdp2(folder: Path, losses: list[float]) -> None:
    """Two ranks."""
    resume(folder, losses, ["bfloat16", "of hybrid"])
    theirs = Training(sharded_by_fsdp2, seed=3, make=odd)
    model, optimizer = get_state_dict(theirs.model, theirs.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder / "odd_3")
    set_state_dict(theirs.model, theirs.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    assert different(*without_averages(theirs, folder / "expected_of_odd_0.pt")) == [], "without our help"

    options: dict[str, dict[str, Any]] = {
        "fsdp2": {"optimizer_key": "optim"},
        "fsdp2_flat": {"model_key": ""},
    }
    for kind, keys in options.items():
        ours = Training(compiled(), seed=4, make=odd)
        assert load(folder / kind, ours.model, ours.optimizer, **keys) == {}
        assert different(*without_averages(ours, folder / "expected_of_fsdp2_0.pt")) == [], kind
        assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]


# Here


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("saved")
    losses, *others = run_ranks(save, 4, folder)
    assert all(other == losses for other in others)
    return folder, losses


@pytest.mark.parametrize("ranks", [3, pytest.param(8, marks=pytest.mark.long)])
def test_four_ranks_are_resumed_by_another_number(saved: tuple[Path, list[float]], ranks: int) -> None:
    run_ranks(resume, ranks, *saved, ["plain"])


def test_four_ranks_are_resumed_by_one_process(saved: tuple[Path, list[float]]) -> None:
    resume(*saved, ["plain"])


def test_a_whole_state_dict_that_the_first_rank_saved_is_that_of_a_plain_model(
    saved: tuple[Path, list[float]],
) -> None:
    model = uneven()
    model.load_state_dict(torch.load(saved[0] / "full.pt"))
    expected = torch.load(saved[0] / "expected0.pt")
    assert not [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])]


def test_two_ranks_resume_with_other_options_and_fsdp2_in_both_directions(saved: tuple[Path, list[float]]) -> None:
    run_ranks(mixed_with_fsdp2, 2, *saved)
