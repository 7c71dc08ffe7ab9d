"""What a program depends on is in its key, each ingredient of which has a test here, or it is not known and a miss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fake_process_group
from models import CASES, MLP, WIDTH, MLPBlock, loss_of
from programs import ROWS, Custom, WithBuffer, start
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.passes import GraphPass, PassContext, default_pipeline
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.programs import key as keys
from graph_fsdp.programs.folder import Folder
from graph_fsdp.programs.plain import Unknown


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "programs"


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group():
        yield


# Ingredients of the key: each change is a miss


class KeyFound(BaseException):
    def __init__(self, key: dict[str, str]) -> None:
        self.key = key


@pytest.fixture
def key_of(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., dict[str, str]]:
    def read(_: Folder, key: dict[str, str]) -> None:
        raise KeyFound(key)

    def find(
        make: Callable[[], nn.Module] = lambda: MLP(1), batch: Tensor | None = None, set_up: Any = None, **options: Any
    ) -> dict[str, str]:
        torch._dynamo.reset()
        keys.versions.cache_clear()
        model = graph_fsdp.compile(make(), **{"backend": "eager", "programs": folder} | options)
        if set_up is not None:
            set_up(model)
        with monkeypatch.context() as patch, pytest.raises(KeyFound) as found:
            patch.setattr(Folder, "read", read)
            model(torch.ones(ROWS, WIDTH) if batch is None else batch)
        return found.value.key

    return find


class TwiceBlock(MLPBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class ThriceBlock(MLPBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def frozen() -> nn.Module:
    model = MLP(1)
    model.head.requires_grad_(False)
    return model


CHANGES: dict[str, tuple[set[str], dict[str, Any]]] = {
    "an operator": ({"graph"}, {"make": lambda: MLP(1, block=TwiceBlock)}),
    "a shape of the input": ({"inputs"}, {"batch": torch.ones(2 * ROWS, WIDTH)}),
    "the strides of the input": ({"inputs"}, {"batch": torch.ones(WIDTH, ROWS).t()}),
    "the dtype of the input": ({"inputs"}, {"batch": torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)}),
    "a gradient of the input": ({"inputs"}, {"batch": torch.ones(ROWS, WIDTH, requires_grad=True)}),
    "a parameter's shape": ({"model"}, {"make": lambda: MLP(1, 2 * WIDTH), "batch": torch.ones(ROWS, 2 * WIDTH)}),
    "frozen parameters": ({"model"}, {"make": frozen}),
    "units": ({"model"}, {"auto_wrap_policy": {nn.Linear}}),
    "dtypes": ({"model"}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    "reshard_after_forward": ({"options"}, {"reshard_after_forward": False}),
    "settings": ({"settings"}, {"set_up": lambda model: model.set_requires_gradient_sync(False)}),
    "an option of a pass": ({"passes"}, {"passes": default_pipeline(prefetch=3)}),
    "a pass": ({"passes"}, {"passes": default_pipeline().remove("slots")}),
    "the hardware": ({"cost"}, {"passes": default_pipeline(hardware="h100")}),
    "checkpointing": ({"passes"}, {"activation_checkpointing": "unit"}),
    "the backend": ({"backend"}, {"backend": "inductor"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_program_depends_on_is_in_its_key(key_of: Callable[..., dict[str, str]], what: str) -> None:
    changed, options = CHANGES[what]
    before, same, after = key_of(), key_of(), key_of(**options)
    assert before == same
    assert changed <= {name for name in before if before[name] != after[name]}


def test_a_number_in_the_code_is_in_the_key(key_of: Callable[..., dict[str, str]]) -> None:
    twice, thrice = (key_of(lambda block=block: MLP(1, block=block)) for block in (TwiceBlock, ThriceBlock))
    assert "graph" in {name for name in twice if twice[name] != thrice[name]}


def test_the_number_of_ranks_and_their_mesh_are_in_the_key(key_of: Callable[..., dict[str, str]]) -> None:
    one = key_of()
    two = key_of(mesh=init_device_mesh("cpu", (2, 4)))
    half = key_of(mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "fsdp"))["fsdp"])
    assert one["model"] != two["model"] != half["model"] != one["model"]


def in_no_grad() -> Any:
    return torch.no_grad()


def in_autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def in_another_attention() -> Any:
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


@pytest.mark.parametrize("mode", [in_no_grad, in_autocast, in_another_attention, torch.inference_mode])
def test_modes_are_in_the_key(key_of: Callable[..., dict[str, str]], mode: Callable[[], Any]) -> None:
    before = key_of()
    with mode():
        after = key_of()
    assert before["modes"] != after["modes"]


SWITCHES: dict[str, tuple[str, Callable[[], None], Callable[[], None]]] = {
    "deterministic": (
        "modes",
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
    "precision": (
        "modes",
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "paths of einsum": (
        "modes",
        lambda: setattr(torch.backends.opt_einsum, "strategy", "greedy"),
        lambda: setattr(torch.backends.opt_einsum, "strategy", "auto"),
    ),
    "anomaly": (
        "modes",
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.set_detect_anomaly(False),
    ),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_are_in_the_key(key_of: Callable[..., dict[str, str]], switch: str) -> None:
    ingredient, on, off = SWITCHES[switch]
    before = key_of()
    on()
    try:
        after = key_of()
    finally:
        off()
    assert before[ingredient] != after[ingredient]


def test_settings_of_the_compilers_are_in_the_key(key_of: Callable[..., dict[str, str]]) -> None:
    before = key_of(backend="inductor")
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        partitioner = key_of(backend="inductor")
    with torch._inductor.config.patch(pattern_matcher=False):
        inductor = key_of(backend="inductor")
    assert before["backend"] != partitioner["backend"] != inductor["backend"] != before["backend"]


def test_the_machine_and_the_software_are_in_the_key(
    key_of: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_of()
    for name, change in {
        "torch": lambda: monkeypatch.setattr(torch, "__version__", "2.99.0"),
        "commit": lambda: monkeypatch.setattr(torch.version, "git_version", "0123"),
        "Python": lambda: monkeypatch.setattr(keys.platform, "python_version", lambda: "4.0.0"),
        "a library": lambda: monkeypatch.setattr(keys.metadata, "version", lambda name: "99"),
        "own source": lambda: monkeypatch.setattr(keys, "own_source", lambda: "changed"),
    }.items():
        change()
        assert key_of()["versions"] != before["versions"], name
        monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert key_of()["device"] != before["device"]
    monkeypatch.setattr(keys, "FORMAT", 99)
    assert key_of()["format"] != before["format"]


def test_own_source_is_that_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("1")
    monkeypatch.setattr(graph_fsdp.passes, "__path__", [str(tmp_path)])
    before = keys.own_source()
    (tmp_path / "inner" / "a.py").write_text("2")
    assert keys.own_source() != before
    (tmp_path / "inner" / "a.py").unlink()  # an archive's, or compiled: two releases would have one digest
    with pytest.raises(Unknown, match=r"the source of graph_fsdp\.passes, of which .* has no file"):
        keys.own_source()


# What is not known is a miss, and the log says what


class Idle(GraphPass):
    name = "mine"

    def run(self, graph: Graph, context: PassContext) -> None:
        return None


MISSES: dict[str, tuple[str, dict[str, Any]]] = {
    "a pass of the user": (
        "the pass Idle('mine')",
        {"passes": default_pipeline().insert_after("free", Idle())},
    ),
    "an operator of the user": ("the operator graph_fsdp_tests.doubled", {"make": Custom}),
    "symbolic sizes": ("an input is a SymInt", {"dynamic": True}),
    "buffers that are written": ("it writes to its inputs", {"make": WithBuffer}),
}


@pytest.mark.parametrize("what", MISSES)
def test_what_is_not_known_is_not_kept(folder: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    said, options = MISSES[what]
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        assert not start(folder, **options).found
    assert said in caplog.text
    assert not list(folder.glob("*.json"))


def test_a_decomposition_of_the_users_is_not_known_where_a_graph_could_have_the_operator(
    key_of: Callable[..., dict[str, str]], folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    def register(target: Any) -> None:
        table = {**compat.inductor_decompositions(), target: lambda x: x}
        monkeypatch.setattr(compat, "inductor_decompositions", lambda: table)

    before = key_of(backend="inductor")
    register(torch.ops.graph_fsdp_tests.doubled.default)
    assert key_of(backend="inductor") == before
    register(torch.ops.aten.cummax.default)
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        start(folder, lambda: MLP(1), backend="inductor")
    assert "depends on a decomposition of aten.cummax.default that is not torch's" in caplog.text


def test_hooks_on_saved_tensors_are_not_known(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graph_fsdp"), torch.autograd.graph.save_on_cpu():
        start(folder)
    assert "depends on torch.autograd.graph.saved_tensors_hooks" in caplog.text
    assert not list(folder.glob("*.json"))


def test_a_miss_says_what_differs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        start(folder)
        assert "there is none" in caplog.text
        caplog.clear()
        start(folder, batch=torch.ones(2 * ROWS, WIDTH))
    assert "inputs differ from those of the nearest one" in caplog.text


@pytest.mark.parametrize("text", ["[1, 2]", '{"key": "x"}', "3", ""])
def test_other_files_in_the_folder_are_none_of_programs(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "vocabulary.json").write_text(text)
    assert [start(folder).found for _ in range(2)] == [False, True]
    for file in folder.glob("*.json"):
        file.write_text(text)
    assert [start(folder).found for _ in range(2)] == [False, True]


@pytest.mark.parametrize("name", ["hf_llama", "hf_gpt2", "hf_bert", "hf_vit"])
def test_a_program_of_a_transformers_model_is_found(folder: Path, name: str) -> None:
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        model = graph_fsdp.compile(CASES[name].model(), backend="eager", programs=folder)
        loss_of(model, CASES[name].batch(ROWS, 0)).backward()
        found.append(graph_fsdp.inspect(model).graphs[-1].remake is not None)
    assert found == [False, True]
