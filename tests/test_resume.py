"""Saving and resuming in one process: what is in a checkpoint, what is kept, and what is refused."""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import CASES, GPT, MLP, WIDTH, loss_of
from resuming import SAVED_AT, STEPS, Training, compiled, different
from torch import nn

import graph_fsdp
from graph_fsdp import CheckpointError
from graph_fsdp.checkpoint import complete, latest, load, save
from graph_fsdp.checkpoint.metadata import Checkpoint


@pytest.fixture(scope="module")
def of_module() -> tuple[Training, Callable[[], None]]:
    """One training for all tests, and what brings it back to where it is now."""
    torch.manual_seed(0)
    training = Training(compiled())
    training.train(SAVED_AT)
    return training, training.kept()


@pytest.fixture
def trained(of_module: tuple[Training, Callable[[], None]]) -> Training:
    training, restore = of_module
    restore()
    return training


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# What is saved


def test_a_training_goes_on_bit_for_bit(trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path / "step_3")
    expected = trained.train(STEPS), trained.values(), torch.rand(3), random.random(), np.random.rand()
    resumed = Training(compiled(), seed=1)
    found = resumed.load(tmp_path / "step_3")
    assert found["step"] == SAVED_AT and found["position"]["file"] == ("a.txt", 3)
    assert found["schedule"]["last_epoch"] == SAVED_AT
    assert resumed.train(STEPS) == expected[0]
    assert not different(resumed.values(), expected[1])
    assert torch.equal(torch.rand(3), expected[2]), "random states of torch, Python and NumPy"
    assert (random.random(), np.random.rand()) == expected[3:]


def test_random_states_may_stay(trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path / "step_3")
    torch.manual_seed(3)
    trained.load(tmp_path / "step_3", random_states=False)
    found = torch.rand(3)
    assert torch.equal(found, torch.rand(3, generator=torch.Generator().manual_seed(3)))


def test_keys_are_the_models_own_names(trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path / "step_3")
    checkpoint = Checkpoint.open(tmp_path / "step_3")
    state = trained.model.state_dict()
    assert list(checkpoint.under("model")) == list(state)
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert set(checkpoint.under("optimizer.state")) == {f"{name}.{kind}" for name in state for kind in kinds}
    plain = {"model": {name: torch.empty_like(value) for name, value in state.items()}}
    dcp.load(plain, checkpoint_id=tmp_path / "step_3")
    assert all(torch.equal(plain["model"][name], value) for name, value in state.items())


def test_files_are_the_users_alone(trained: Training, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        trained.save(tmp_path / "new" / "step_3")
    finally:
        os.umask(before)
    path = tmp_path / "new" / "step_3"
    assert names(path) == [".metadata", "__0_0.distcp", "checksums.json", "graph_fsdp.json"]
    assert mode(path) == 0o700 and {mode(file) for file in path.iterdir()} == {0o600}


def test_an_optimizer_that_has_not_stepped_yet(tmp_path: Path) -> None:
    training = Training(compiled())
    training.save(tmp_path / "step_0")
    assert not training.optimizer.state, "saving makes it no state"
    other = Training(compiled(), seed=1)
    other.train(2)
    other.load(tmp_path / "step_0")
    assert not other.optimizer.state
    assert other.train(STEPS) == training.train(STEPS)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.experts[which](x)


def test_states_that_there_are_for_some_parameters_only(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, which: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH), which).sum().backward()
        optimizer.step()

    found = []
    for train_first in (True, False):
        torch.manual_seed(0)
        model = graph_fsdp.compile(Experts(), backend="eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if train_first:
            step(model, optimizer, 0)
            save(tmp_path / "a_1", model, optimizer)
        else:
            step(model, optimizer, 1)  # gradients stay, and another expert's state is there
            load(tmp_path / "a_1", model, optimizer)
        assert {name for name, p in model.named_parameters() if p in optimizer.state} == {
            "experts.0.weight",
            "experts.0.bias",
        }
        step(model, optimizer, 1)
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert not different(*found)


def test_states_of_parameters_that_were_frozen_since(tmp_path: Path) -> None:
    """Both trainings unfreeze them later, and go on with their states."""
    first, other = Training(compiled()), Training(compiled(), seed=1)
    first.train(2)
    for training in (first, other):
        training.model.blocks[0].requires_grad_(False)
    first.train(3)
    first.save(tmp_path / "step_3")
    other.load(tmp_path / "step_3")
    assert not any(p.requires_grad for p in other.model.blocks[0].parameters())
    for training in (first, other):
        training.model.blocks[0].requires_grad_(True)
    assert other.train(STEPS) == first.train(STEPS)
    assert not different(other.values(), first.values())


def test_several_optimizers_and_groups(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = graph_fsdp.compile(MLP(), backend="eager")
        first = [{"params": list(model.blocks[0].parameters())}, {"params": list(model.head.parameters()), "lr": 0.5}]
        return model, [
            torch.optim.AdamW(first, lr=0.1 * (seed + 1)),
            torch.optim.SGD(model.blocks[1].parameters(), lr=0.2, momentum=0.9),
        ]

    def train(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> float:
        for at in range(2):
            loss = loss_of(model, CASES["mlp"].batch(4, at))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return loss.item()

    model, optimizers = make(0)
    train(model, optimizers)
    save(tmp_path / "a_1", model, optimizers)
    other, others = make(1)
    load(tmp_path / "a_1", other, others)
    assert [group["lr"] for o in others for group in o.param_groups] == [0.1, 0.5, 0.2]
    assert train(other, others) == train(model, optimizers)


def test_options_of_groups_may_have_parts_and_names_with_dots(tmp_path: Path) -> None:
    options = {
        "schedule": {"kind": "cosine", "at": [1, 2]},
        "factors": [torch.ones(2), {"x": None}],
        "layer.decay": 0.9,
    }

    def make(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = graph_fsdp.compile(nn.Linear(WIDTH, 2), backend="eager")
        groups = [{"params": [model.weight], **settings}, {"params": [model.bias], "lr": 0.5}]
        return model, torch.optim.SGD(groups, lr=0.1)

    save(tmp_path / "a_1", *make(**options))
    model, optimizer = make()
    load(tmp_path / "a_1", model, optimizer)
    first, second = optimizer.param_groups
    assert torch.equal(first["factors"].pop(0), torch.ones(2))
    assert {name: first[name] for name in options} == {**options, "factors": [{"x": None}]}
    assert second["lr"] == 0.5 and options.keys().isdisjoint(second)


def test_values_beside_the_model_keep_their_types(tmp_path: Path) -> None:
    model = graph_fsdp.compile(nn.Linear(2, 2), backend="eager")
    extra: dict[str, Any] = {
        "a": {1: [torch.ones(2), (None, 1.5)], "1": OrderedDict(x=True), (2, 3): b"x"},
        "b": float("inf"),
        "c": torch.float16,
        "d": torch.Size([2]),
        "e.f": {"g": torch.tensor(1)},
        "e": {"f.g": torch.tensor(2)},
    }
    save(tmp_path / "a", model, extra=extra)
    found = load(tmp_path / "a", model)
    assert list(found) == list(extra) and found["b"] == float("inf") and found["c"] is torch.float16
    one, other = found["a"].pop(1), extra["a"].pop(1)
    assert torch.equal(one[0], other[0]) and one[1] == other[1]
    assert found["a"] == extra["a"] and type(found["a"]["1"]) is OrderedDict
    assert found["e.f"]["g"].item() == 1 and found["e"]["f.g"].item() == 2


def test_a_tied_weight_is_in_a_checkpoint_under_one_of_its_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = GPT(tied=True).state_dict()
    del state["head.weight"]
    dcp.save({"model": state}, checkpoint_id=tmp_path / "a")
    model = graph_fsdp.compile(GPT(tied=True), backend="eager")
    load(tmp_path / "a", model)
    assert torch.equal(model.head.weight, state["tokens.weight"]) and model.head.weight is model.tokens.weight


def test_values_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    model = graph_fsdp.compile(nn.Linear(3, 3), backend="eager")
    save(tmp_path / "a", model)
    narrow = graph_fsdp.compile(nn.Linear(3, 3).bfloat16(), backend="eager")
    load(tmp_path / "a", narrow)
    assert torch.equal(narrow.weight, model.weight.bfloat16())


def test_models_of_others_are_saved_and_loaded_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = MLP()
    save(tmp_path / "a", plain)
    model = graph_fsdp.compile(MLP(), backend="eager")
    load(tmp_path / "a", model)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


# In the background


def test_a_save_in_the_background_has_the_values_of_its_call(trained: Training, tmp_path: Path) -> None:
    expected = trained.values()
    pending = trained.save(tmp_path / "step_3", asynchronous=True)
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.fill_(7)
        for state in trained.optimizer.state.values():
            for value in state.values():
                value.fill_(7)
        for value in trained.average.values():
            value.fill_(7)
    trained.optimizer.param_groups[0]["lr"] = 7.0
    assert pending.result(60) == tmp_path / "step_3" and pending.done()
    assert repr(pending) == f"<PendingSave to {tmp_path / 'step_3'}: done>"
    resumed = Training(compiled(), seed=1)
    resumed.load(tmp_path / "step_3")
    assert not different(resumed.values(), expected) and resumed.optimizer.param_groups[0]["lr"] < 1


def test_saves_follow_each_other_and_a_load_waits(trained: Training, tmp_path: Path) -> None:
    first = trained.save(tmp_path / "step_1", asynchronous=True)
    second = trained.save(tmp_path / "step_2", asynchronous=True)
    assert first.done()
    assert trained.load(tmp_path / "step_2")["step"] == SAVED_AT and second.done()
    assert [path.name for path in complete(tmp_path)] == ["step_1", "step_2"]


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Writing more to a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_save_that_is_interrupted_is_no_error_of_a_checkpoint(
    trained: Training, tmp_path: Path, stop: type[BaseException]
) -> None:
    def interrupt(*_: object) -> None:
        raise stop

    before = signal.signal(signal.SIGXFSZ, interrupt)  # comes while a file is written
    try:
        with file_size_limit(4096), pytest.raises(stop):
            trained.save(tmp_path / "step_2")
    finally:
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path) == []


def test_a_save_that_fails_leaves_what_was_there(trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path / "step_1")
    expected = trained.values()
    with file_size_limit(4096), pytest.raises(CheckpointError):
        trained.save(tmp_path / "step_2", keep=1)
    assert names(tmp_path) == ["step_1"]
    trained.train(STEPS)
    trained.load(tmp_path / "step_1")
    assert not different(trained.values(), expected)


def test_an_error_in_the_background_is_raised_once(trained: Training, tmp_path: Path) -> None:
    with file_size_limit(4096):
        pending = trained.save(tmp_path / "step_1", asynchronous=True)
        with pytest.raises(CheckpointError):
            pending.result()
        assert repr(pending).startswith(f"<PendingSave to {tmp_path / 'step_1'}: failed, ")
        trained.save(tmp_path / "step_2", asynchronous=True)
        while names(tmp_path) != []:
            pass
    with pytest.raises(CheckpointError):
        trained.save(tmp_path / "step_3")
    trained.save(tmp_path / "step_4")
    assert names(tmp_path) == ["step_4"]


# Which are kept


def test_the_last_few_are_kept(trained: Training, tmp_path: Path) -> None:
    for name in ("other_1", "best", "step_8"):
        trained.save(tmp_path / name)
    for step in (9, 10, 11):
        trained.save(tmp_path / f"step_{step}", keep=2)
    assert names(tmp_path) == ["best", "other_1", "step_10", "step_11"]
    assert [path.name for path in complete(tmp_path)] == ["other_1", "best", "step_10", "step_11"]
    assert latest(tmp_path) == tmp_path / "step_11"
    trained.save(tmp_path / "step_2")
    assert latest(tmp_path) == tmp_path / "step_2", "the last that was saved, whatever its number"


def test_what_is_not_complete_is_not_seen_and_is_removed(trained: Training, tmp_path: Path) -> None:
    assert latest(tmp_path / "nothing") is None and latest(tmp_path) is None
    left = tmp_path / f".step_5.{'0' * 16}.partial"
    other = tmp_path / f".run_5.{'0' * 16}.partial"
    for path in (left, other, tmp_path / "step_9"):
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(b"half")
    (left / ".metadata").write_bytes(b"even")
    assert complete(tmp_path) == []
    trained.save(tmp_path / "step_6")
    assert names(tmp_path) == sorted([other.name, "step_6", "step_9"])
    with pytest.raises(CheckpointError, match=r"step_9 has no .metadata: it is no checkpoint, or not a complete one"):
        trained.load(tmp_path / "step_9")


def test_a_checkpoint_is_replaced_when_asked(trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path / "step_3")
    with pytest.raises(CheckpointError, match="step_3 is there already; choose another name, or overwrite=True"):
        trained.save(tmp_path / "step_3")
    trained.train(STEPS)
    trained.save(tmp_path / "step_3", overwrite=True)
    assert names(tmp_path) == ["step_3"]
    assert Training(compiled()).load(tmp_path / "step_3")["step"] == STEPS
