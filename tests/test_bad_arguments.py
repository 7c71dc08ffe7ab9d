"""Bad arguments of the functions beside ``compile``: one error that names the argument, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import fake_process_group
from models import MLP
from torch import nn

import graph_fsdp
from graph_fsdp import checkpoint
from graph_fsdp.checkpoint.contents import contents
from graph_fsdp.planning import search

X = torch.empty(4, 16, device="meta")


@pytest.fixture(scope="module")
def model() -> Any:
    return graph_fsdp.compile(MLP(), backend="eager")


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in graph_fsdp.export(model)}


@pytest.mark.parametrize("name", ["asynchronous", "overwrite", "memory"])
def test_flags_of_a_save(model: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be True"):
        checkpoint.save(tmp_path / "a", model, **{name: "no"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "model must be an nn.Module, got NoneType"),
        (({},), "model must be an nn.Module, got dict"),
        ((nn.Linear(2, 2), 3), "optimizer must be a torch.optim.Optimizer, some of them, or None, got int"),
        ((nn.Linear(2, 2), [None]), "optimizer must be a torch.optim.Optimizer, some of them, or None, got NoneType"),
    ],
)
def test_what_is_saved_and_loaded(tmp_path: Path, arguments: Any, message: str) -> None:
    checkpoint.save(tmp_path / "here", nn.Linear(2, 2))
    with pytest.raises(TypeError, match=message):
        checkpoint.save(tmp_path / "a", *arguments)
    with pytest.raises(TypeError, match=message):
        checkpoint.load(tmp_path / "here", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "no"}, "verify must be True or False, got 'no'"),
        ({"random_states": None}, "random_states must be True or False, got None"),
        ({"extra": 5}, "extra must be a dict of values by name, got int"),
        ({"extra": ["step"]}, "extra must be a dict of values by name, got list"),
    ],
)
def test_options_of_a_load(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    layer = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "here", layer)
    with torch.no_grad():
        layer.weight.fill_(1)
    with pytest.raises(TypeError, match=message):
        checkpoint.load(tmp_path / "here", layer, **options)
    assert layer.weight.eq(1).all()


@pytest.mark.parametrize("path", [None, 3, b"here", ["here"]])
def test_paths_of_checkpoints(model: Any, path: Any) -> None:
    for name, call in {
        "path": lambda: checkpoint.save(path, model),
        "folder": lambda: checkpoint.complete(path),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name} must be the path of a folder, got"):
            call()
    for of_model in (None, model):
        with pytest.raises(TypeError, match=r"^folder must be the path of a folder, got"):
            checkpoint.latest(path, of_model)
    message = r"latest\(…\) has found no complete checkpoint" if path is None else r"must be the path of a folder, got"
    with pytest.raises(TypeError, match=rf"^path .*{message}"):
        checkpoint.load(path, model)


def test_an_empty_path_is_not_the_current_folder(model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    checkpoint.save(tmp_path / "step_1", nn.Linear(2, 2))
    (tmp_path / "step_2").mkdir()
    for name, folder, call in (
        ("path", "step_2", lambda: checkpoint.save("", model)),
        ("path", "step_1", lambda: checkpoint.load("", nn.Linear(2, 2))),
        ("path", "step_1", lambda: contents("")),
        ("folder", ".", lambda: checkpoint.complete("")),
        ("folder", ".", lambda: checkpoint.latest("")),
        ("folder", ".", lambda: checkpoint.latest("", model)),
        ("path", ".", lambda: graph_fsdp.monitor(model, path="")),
        ("path", ".", lambda: graph_fsdp.precompile(MLP, (X,), mesh_shape=(8,), path="")),
    ):
        monkeypatch.chdir(tmp_path / folder)
        with pytest.raises(ValueError, match=rf"^{name} must be the path of .*, got an empty path"):
            call()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_1", "step_2"]


def test_what_ranks_save_and_load_is_a_module(tmp_path: Path) -> None:
    with fake_process_group():
        for call in (checkpoint.save, checkpoint.load):
            with pytest.raises(TypeError, match=r"^model must be an nn\.Module, got str$"):
                call(tmp_path / "a", "model")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^model must be an nn\.Module, got str$"):
            checkpoint.latest(tmp_path, "model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"src": None}, ValueError, r"^src must be the global rank of the model's rank in group, one of \[0, 1"),
        ({"src": -1}, ValueError, "^src must be the global rank"),
        ({"src": True}, ValueError, "^src must be the global rank"),
        ({"src": 8}, ValueError, "^src must be the global rank"),
        ({"src": 0}, ValueError, "^src must be the global rank"),  # this rank itself
        ({"src": 1, "group": None}, TypeError, "^group must be the ProcessGroup that"),
        ({"src": 1, "group": "engine"}, TypeError, "^group must be the ProcessGroup that"),
        ({"src": 1, "device": "gpu"}, RuntimeError, "device string: gpu"),
    ],
)
def test_what_receives_an_export(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with fake_process_group():
        given = {"group": torch.distributed.group.WORLD, **options}
        with pytest.raises(error, match=message):
            graph_fsdp.receive(given.pop("group"), **given)  # at the call, before a rank is waited for


@pytest.mark.parametrize("group", ["engine", 0, torch.ones(2)])
def test_a_group_that_is_none(model: Any, group: Any) -> None:
    with pytest.raises(TypeError, match=r"group must be a ProcessGroup, GroupMember\.NON_GROUP_MEMBER or None"):
        graph_fsdp.export(model, group=group)
    assert list(graph_fsdp.export(model, group=torch.distributed.GroupMember.NON_GROUP_MEMBER))  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [True, -1, "0", torch.tensor([0, 1])])
def test_the_rank_of_an_export(model: Any, rank: Any) -> None:
    with pytest.raises(ValueError, match=r"rank must be a global rank of the model's mesh"):
        graph_fsdp.export(model, rank=rank)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, _: graph_fsdp.unsharded(model, recurse="no").__enter__(), "recurse must be True or False"),
        (
            lambda model, path: graph_fsdp.unsharded(model, writeback=None).__enter__(),
            "writeback must be True or False",
        ),
        (lambda model, path: checkpoint.load_safetensors(model, path, strict="no"), "strict must be True or False"),
        (lambda model, _: checkpoint.load_full_state_dict(model, {}, strict=0), "strict must be True or False"),
    ],
)
def test_flags_of_a_model(model: Any, call: Callable[..., Any], message: str) -> None:
    before = whole(model)
    with pytest.raises(TypeError, match=message):
        call(model, "model.safetensors")
    assert all(tensor.equal(before[name]) for name, tensor in whole(model).items())


def test_flags_of_safetensors() -> None:
    with pytest.raises(TypeError, match="strict must be True or False, got 'no'"):
        checkpoint.Safetensors("model.safetensors", strict="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["set_reshard_after_forward", "set_reshard_after_backward"])
def test_which_units_a_method_is_of(model: Any, method: str) -> None:
    with pytest.raises(ValueError, match="recurse must be True or False, got 'no'"):
        getattr(model, method)(False, recurse="no")


def test_a_norm_may_be_a_number_of_numpy(model: Any) -> None:
    model(torch.ones(4, 16)).sum().backward()
    norm = model.clip_grad_norm_(np.float32(1.0), norm_type=np.int64(2))
    assert norm == model.clip_grad_norm_(np.float64(1.0), norm_type=2.0) or norm > 1
    assert model.clip_grad_norm_(0) > 0 and not any(p.grad.any() for p in model.parameters())
    model.zero_grad()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"finalization": "no"}, TypeError, "finalization must be True or False, got 'no'"),
        ({"parallelize": "tp"}, TypeError, "parallelize must be a function of the model and meshes, or None, got 'tp'"),
        ({"mesh": None}, TypeError, "mesh: there are no ranks here to make it of; give mesh_shape"),
        ({"reshard_after_backward": True}, TypeError, "reshard_after_backward: there is no such argument here, and no"),
    ],
)
def test_options_of_a_plan(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        graph_fsdp.plan(MLP, (X,), mesh_shape=(8,), hardware="h100", **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh_shapes": 8}, TypeError, "mesh_shapes must be a list of what is compared, got 8"),
        ({"reshards": True}, TypeError, "reshards must be a list of what is compared, got True"),
        ({"buckets": "unit"}, TypeError, "buckets must be a list of what is compared, got 'unit'"),
        ({"checkpointings": None}, TypeError, "checkpointings must be a list of what is compared, got None"),
        ({"memory": "80GB"}, ValueError, "memory must be a number of bytes above 0, got '80GB'"),
        ({"memory": True}, ValueError, "memory must be a number of bytes above 0, got True"),
    ],
)
def test_options_of_a_search(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        search(MLP, (X,), **{"mesh_shapes": [(8,)], "hardware": "h100", **options})


def test_a_parameter_that_is_no_text() -> None:
    with fake_process_group():
        model = graph_fsdp.compile(MLP(), backend="eager")
        with pytest.raises(KeyError, match="the model has no sharded parameter 3"):
            graph_fsdp.inspect(model).find(3)  # type: ignore[arg-type]
