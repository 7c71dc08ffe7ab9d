"""A compiled model is still the user's module: class, names, hooks, state dicts, and the usual tools on DTensors."""

from __future__ import annotations

import copy
import gc
import inspect as python_inspect
import itertools
import logging
import math
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from conftest import fake_process_group
from launch import run_ranks
from models import MLP
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

import graph_fsdp
from graph_fsdp.passes.ir.dialect import ALIGNMENT
from graph_fsdp.report.report import engine_of


@dataclass
class Trained:
    """A model that has made two steps without its gradients being cleared."""

    model: nn.Module
    parameters: list[nn.Parameter]  # before the first step
    memory: list[list[int]]  # of the gradients, after each step
    errors: list[str]  # that torch logged


@pytest.fixture(scope="module")
def trained() -> Trained:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    with fake_process_group(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(logging.getLogger("torch._dynamo"), "handlers", [handler])
        model = graph_fsdp.compile(MLP(), backend="eager")
        before, memory = list(model.parameters()), []
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()
            memory.append([p.grad.to_local().data_ptr() for p in model.parameters()])
    return Trained(model, before, memory, [record.getMessage() for record in records])


def autograd_nodes() -> int:
    """Those between the inputs of graphs and the shards, of calls whose backward may still come."""
    gc.collect()
    return sum(type(o).__name__ == "LinkedBackward" for o in gc.get_objects())


@pytest.mark.usefixtures("older_objects_frozen", "fake_group")
class TestOneProcess:
    def test_the_same_object_comes_back_with_its_own_class_and_fsdp_module(self) -> None:
        model = MLP()
        assert graph_fsdp.compile(model, backend="eager") is model
        assert isinstance(model, MLP) and isinstance(model, FSDPModule)
        assert type(model).__name__ == "FSDPMLP" and repr(model).startswith("MLP(")
        assert type(type(model)(depth=1)) is MLP, "constructing the compiled class makes a plain model"

    def test_names_and_signature_stay(self) -> None:
        model = MLP()
        names = [name for name, _ in model.named_parameters()]
        keys = list(model.state_dict())
        signature = python_inspect.signature(model.forward)
        graph_fsdp.compile(model, backend="eager")
        assert [name for name, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == keys
        assert python_inspect.signature(model.forward) == signature

    def test_a_deleted_model_leaves_nothing_behind(self) -> None:
        nodes = autograd_nodes()
        model = graph_fsdp.compile(MLP(), backend="eager")
        model(torch.randn(4, 16)).sum().backward()
        assert autograd_nodes() == nodes, "they have the parameters, where the garbage collector may not see it"
        engine, storage = map(weakref.ref, (engine_of(model), engine_of(model).storage))
        del model
        gc.collect()
        assert engine() is None and storage() is None

    def test_torch_logs_no_error(self, trained: Trained) -> None:
        assert trained.errors == []

    def test_a_second_backward_adds_into_the_memory_of_the_first(self, trained: Trained) -> None:
        assert trained.memory[0] == trained.memory[1]

    def test_backward_runs_when_the_model_is_gone(self) -> None:
        model = graph_fsdp.compile(MLP(), backend="eager")
        loss, weight = model(torch.randn(4, 16)).sum(), model.head.weight
        del model
        gc.collect()
        loss.backward()
        assert weight.grad is not None

    def test_parameters_are_shards_before_and_after_a_step(self, trained: Trained) -> None:
        assert all(a is b for a, b in zip(trained.parameters, trained.model.parameters(), strict=True))
        for p in trained.model.parameters():
            assert isinstance(p, DTensor) and p.placements == (Shard(0),)
            assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements and p.grad.shape == p.shape

    def test_gradients_lie_in_their_buckets_reduced_buffer(self, trained: Trained) -> None:
        for bucket in engine_of(trained.model).spec.buckets:
            grads = [trained.model.get_parameter(name).grad.to_local() for name in bucket.offsets]
            gaps = [b.data_ptr() - a.data_ptr() - a.nbytes for a, b in itertools.pairwise(grads)]
            assert all(0 <= gap < ALIGNMENT for gap in gaps), "a copy would lie elsewhere"

    @pytest.mark.parametrize("before", [True, False])
    def test_hooks_of_all_modules_run_for_submodules_if_they_were_there_when_traced(self, before: bool) -> None:
        model, seen = graph_fsdp.compile(MLP(), backend="eager"), {}

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen[type(module).__name__] = True

        if not before:
            model(torch.ones(2, 16))
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            model(torch.ones(2, 16))
        finally:
            handle.remove()
        assert type(model).__name__ in seen
        assert ("Linear" in seen) == before

    def test_module_hooks_of_root_and_submodules_run(self) -> None:
        model, seen = MLP(), []
        model.register_forward_hook(lambda *_: seen.append("root"))
        model.blocks[0].register_forward_hook(lambda module, args, output: output * 2)
        reference = copy.deepcopy(model)
        graph_fsdp.compile(model, backend="eager")
        with torch.no_grad():
            assert model(torch.randn(4, 16)).shape == reference(torch.randn(4, 16)).shape
        assert seen == ["root", "root"]

    def test_a_forward_set_on_the_instance_is_the_one_that_runs(self) -> None:
        model = MLP()
        plain = model.forward
        model.forward = lambda x: plain(x).relu()  # type: ignore[method-assign]
        graph_fsdp.compile(model, backend="eager")
        model(torch.randn(4, 16))
        assert "relu" in graph_fsdp.inspect(model).forward.stages["partition"].code

    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_a_parameter_that_the_model_returns_is_whole(self, fullgraph: bool) -> None:
        class ReturnsWeight(nn.Linear):
            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"y": super().forward(x), "weight": self.weight}

        model = graph_fsdp.compile(ReturnsWeight(16, 16), backend="eager", fullgraph=fullgraph)
        found = model(torch.randn(4, 16))["weight"]
        assert type(found) is torch.Tensor and found.shape == (16, 16) and found.requires_grad

    def test_two_models_of_one_class_share_nothing(self) -> None:
        first, second = (graph_fsdp.compile(MLP(depth=1), backend="eager") for _ in range(2))
        for model in (first, second):
            model(torch.randn(4, 16)).sum().backward()
        assert [len(graph_fsdp.inspect(m).graphs) for m in (first, second)] == [1, 1]


def tools_on_shards() -> dict[str, Any]:
    """On a rank: what users do with a sharded model besides training it."""
    torch.manual_seed(0)
    model = MLP()
    reference = copy.deepcopy(model)
    x = torch.randn(8, 16)
    graph_fsdp.compile(model, backend="eager")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    hooked: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: hooked.append(name))
    model(x[4 * dist.get_rank() :][:4]).square().mean().backward()
    reference(x).square().mean().backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
    clipped = {n: p.grad.full_tensor() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    return {
        "full": full,
        "saved": dict(reference.state_dict()),
        "hooked": sorted(hooked),
        "norms": [norms[0].full_tensor(), norms[1]],  # type: ignore[attr-defined]
        "clipped": clipped,
        "expected": {n: p.grad for n, p in reference.named_parameters()},
        "synchronised": rank_zero_values(),
    }


def rank_zero_values() -> dict[str, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    model = MLP()
    graph_fsdp.compile(model, backend="eager", sync_module_states=True)
    return {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(tools_on_shards, 2)


def test_state_dict_clipping_and_gradient_hooks_on_two_ranks(results: list[dict[str, Any]]) -> None:
    full = results[0]["full"]  # DCP gives the full state dict to rank 0
    assert list(full) == list(results[0]["saved"])
    assert all(torch.equal(full[name], value) for name, value in results[0]["saved"].items())
    for result in results:
        assert result["hooked"] == sorted(result["expected"])
        torch.testing.assert_close(result["norms"][0], result["norms"][1], rtol=1e-6, atol=0)
        torch.testing.assert_close(result["clipped"], result["expected"], rtol=1e-5, atol=1e-8)


def test_sync_module_states_gives_every_rank_the_values_of_rank_zero(results: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    expected = dict(MLP().named_parameters())
    for result in results:
        assert all(torch.equal(result["synchronised"][name], p) for name, p in expected.items())


def readme_loop() -> list[float]:
    """On a rank: the README's program, which starts the process group by itself."""
    torch.manual_seed(0)
    model = graph_fsdp.compile(MLP(), backend="eager")
    assert dist.get_world_size() == 2 and all(isinstance(p, DTensor) for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = torch.randn(8, 16), torch.arange(8) % 5
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert "all_gather_start" in graph_fsdp.inspect(model).forward.stages["bucket"].code
    dist.destroy_process_group()
    return losses


def test_without_a_mesh_the_ranks_of_torchrun_are_found_and_joined() -> None:
    first, second = run_ranks(readme_loop, 2, backend=None)
    assert first == second and first[-1] < first[0] / 2


class WithoutElements(nn.Module):
    """A prompt of no tokens, as of an ablation."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.head = nn.Parameter(torch.empty(0, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.prompt, x]))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_parameter_without_elements_has_a_gradient_without_elements(backend: Literal["eager", "inductor"]) -> None:
    with fake_process_group():
        model = graph_fsdp.compile(WithoutElements(), backend=backend)
        model(torch.ones(2, 16)).sum().backward()
        assert model.prompt.grad.shape == (0, 16) and model.head.weight.grad.shape == (4, 16)
        largest = model.head.weight.grad.abs().max()
        assert model.clip_grad_norm_(1e9, math.inf) >= largest, "also where a rank has no rows of a parameter"
        report = graph_fsdp.inspect(model)
        assert "aten.new_empty.default" in report.backward.stages["bucket"].body
