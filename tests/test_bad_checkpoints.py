"""What is refused when a checkpoint is saved or loaded in one process, and what a damaged one leaves as it was."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import MLP
from resuming import SAVED_AT, STEPS, Training, compiled, different
from test_resume import names
from torch import nn

import graph_fsdp
from graph_fsdp import CheckpointError
from graph_fsdp.checkpoint import load, save


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


# What is refused


@contextmanager
def refused(training: Training, error: type[Exception], *words: str) -> Iterator[None]:
    """An error with these words, and nothing was changed."""
    before, lr = training.values(), training.optimizer.param_groups[0]["lr"]
    with pytest.raises(error) as raised:
        yield
    assert not [word for word in words if word not in str(raised.value)], str(raised.value)
    assert not different(training.values(), before) and training.optimizer.param_groups[0]["lr"] == lr


def test_wrong_arguments(trained: Training, tmp_path: Path) -> None:
    model, optimizer = trained.model, trained.optimizer
    with pytest.raises(TypeError, match=r"extra\['a'\]\[0\] is a object, and a checkpoint holds"):
        save(tmp_path / "a", model, extra={"a": [object()]})
    with pytest.raises(TypeError, match="is a float64, and a checkpoint holds numbers"):
        save(tmp_path / "a", model, extra={"a": np.float64(1)})
    with pytest.raises(TypeError, match="extra must be a dict of values by name, got list"):
        save(tmp_path / "a", model, extra=[1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, some of them, or None, got int"):
        save(tmp_path / "a", model, [3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="optimizer has 14 parameters that are not the model's; make it after compile"):
        save(tmp_path / "a", MLP(), torch.optim.SGD(optimizer.param_groups[0]["params"][:14]))
    for keep in (0, True):
        with pytest.raises(ValueError, match=f"keep must be a number of checkpoints, at least 1, .* got {keep}"):
            save(tmp_path / "a1", model, keep=keep)
    with pytest.raises(ValueError, match="'best' has no number"):
        save(tmp_path / "best", model, keep=1)
    with pytest.raises(ValueError, match=r"'\.a' begins with a dot"):
        save(tmp_path / ".a", model)
    assert names(tmp_path) == []


def test_loading_into_an_optimizer_of_another_model(trained: Training, tmp_path: Path) -> None:
    save(tmp_path / "a", trained.model, trained.optimizer)
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="optimizer has 2 parameters that are not the model's; make it after co"):
        load(tmp_path / "a", trained.model, other)


def test_parameters_that_are_whole_while_it_is_saved_or_loaded(trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path / "a")
    with graph_fsdp.unsharded(trained.model):
        with pytest.raises(ValueError, match=r"its parameters are whole, .* outside of the block"):
            trained.save(tmp_path / "b")
        with pytest.raises(ValueError, match=r"its parameters are whole, .* outside of the block"):
            trained.load(tmp_path / "a")


def test_an_optimizer_whose_states_only_a_closure_makes(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = graph_fsdp.compile(nn.Linear(4, 2), backend="eager")
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2)

    model, optimizer = make()

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    save(tmp_path / "a", model, optimizer)
    other, fresh = make()
    before = {name: p.detach().clone() for name, p in other.named_parameters()}
    with pytest.raises(CheckpointError, match=r"LBFGS has no states yet, and its step .* failed"):
        load(tmp_path / "a", other, fresh)
    assert fresh.param_groups[0]["lr"] == 0.5 and not fresh.state
    assert not different(before, {name: p.detach() for name, p in other.named_parameters()})


def test_the_checkpoint_of_another_model(trained: Training, tmp_path: Path) -> None:
    save(tmp_path / "a", graph_fsdp.compile(MLP(depth=3), backend="eager"))
    words = (
        'Missing key(s) in state_dict: "blocks.0.gate"',
        "Unexpected key(s)",
        "size mismatch for blocks.0.up.weight",
    )
    with refused(trained, CheckpointError, *words):
        load(tmp_path / "a", trained.model)
    with refused(trained, CheckpointError, 'its keys begin with "model", "rng": say by model_key'):
        load(tmp_path / "a", trained.model, model_key="net")
    with refused(trained, CheckpointError, "has no optimizer under 'optimizer'", "or load without the optimizer"):
        trained.save(tmp_path / "b")
        save(tmp_path / "c", trained.model)
        load(tmp_path / "c", trained.model, trained.optimizer)
    with refused(trained, CheckpointError, 'has no extra "sampler"; it has "average", "position", "schedule", "step"'):
        load(tmp_path / "b", trained.model, extra={"sampler": 1})


def test_a_model_that_cannot_hold_what_is_read(tmp_path: Path) -> None:
    save(tmp_path / "a", MLP())
    for weight in (torch.ones(5, 16, device="meta"), torch.ones(5, 16).to_sparse()):
        model = MLP()
        before = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
        model.head.weight = torch.nn.Parameter(weight)
        with pytest.raises(
            CheckpointError, match=r"head\.weight is o[nf] the .*, and cannot be read into; make it a d"
        ):
            load(tmp_path / "a", model)
        assert all(model.state_dict()[name].equal(value) for name, value in before.items())


def test_the_checkpoint_of_another_optimizer(trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path / "a")
    other = torch.optim.SGD(trained.model.parameters(), lr=0.1, momentum=0.9)
    with refused(trained, CheckpointError, "is of another optimizer", "exp_avg", "momentum_buffer is not in"):
        load(tmp_path / "a", trained.model, other)
    assert not other.state
    part = torch.optim.AdamW(list(trained.model.parameters())[1:])
    with refused(trained, CheckpointError, 'the optimizer does not have "blocks.0.gate"'):
        load(tmp_path / "a", trained.model, part)


def damaged(folder: Path, kind: str) -> str:
    """Words of the error."""
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    if kind == "missing":
        file.unlink()
        return "__0_0.distcp is not there"
    if kind == "cut":
        file.write_bytes(data[:-1])
        return f"__0_0.distcp has {len(data) - 1:,} bytes and should have {len(data):,}"
    if kind == "bit":
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
        return "__0_0.distcp is damaged"
    name = {"metadata": ".metadata", "sums": "checksums.json", "header": "graph_fsdp.json"}[kind]
    (folder / name).write_bytes((folder / name).read_bytes()[:-5])
    return f"{name} cannot be read"


def test_a_damaged_checkpoint_changes_nothing_and_the_one_before_loads(trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path / "step_3")
    trained.train(STEPS)
    trained.save(tmp_path / "whole" / "step_6")
    for kind in ("missing", "cut", "bit", "metadata", "sums", "header"):
        shutil.copytree(tmp_path / "whole" / "step_6", tmp_path / "step_6")
        words = damaged(tmp_path / "step_6", kind)
        with refused(trained, CheckpointError, words):
            trained.load(tmp_path / "step_6")
        shutil.rmtree(tmp_path / "step_6")
    assert trained.load(tmp_path / "step_3")["step"] == SAVED_AT


class Evil:
    """Runs something when it is unpickled."""

    ran = False

    def __reduce__(self) -> Any:
        return _run, ()


def _run() -> None:
    Evil.ran = True


def test_nothing_in_a_checkpoint_is_run(trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with refused(trained, CheckpointError, f"it asks for {__name__}._run, which no description of a checkpoint needs"):
        trained.load(tmp_path / "a")
    state = {name: torch.empty_like(value) for name, value in trained.model.state_dict().items()}
    dcp.save({"model": state, "optimizer": {"param_groups": [{"params": Evil()}]}}, checkpoint_id=tmp_path / "b")
    with refused(trained, CheckpointError, "'optimizer.param_groups.0.params' of", "cannot be read", "weights_only"):
        trained.load(tmp_path / "b")
    assert not Evil.ran
