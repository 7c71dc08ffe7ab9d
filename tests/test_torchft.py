"""Replica groups that torchft manages: what the graph says, what is refused, and what a group that heals gets."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import replica_groups
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from marks import fake_reductions
from models import MLP, MLPBlock
from printed import calls
from replica_groups import RANKS, Training, check, group_of, manager_of, needs_torchft, results
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp import CheckpointError, RankDisagreement, UnsupportedError
from graph_fsdp.integrations.torchft import replicate
from graph_fsdp.report.report import engine_of

pytestmark = needs_torchft


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[str]:
    with replica_groups.lighthouse() as address:
        yield address


@pytest.fixture
def manager(lighthouse: str, fake_group: None) -> Iterator[Any]:
    """That of a replica group that is alone. The other ranks of its group are played."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    where = {"store_addr": "localhost", "store_port": store.port, "rank": 0, "world_size": 1}
    made = manager_of(0, lighthouse, use_async_quorum=False, **where)
    yield made
    made.shutdown()


def compiled(shape: tuple[int, ...] = (8,), **options: Any) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return graph_fsdp.compile(MLP(depth=2), mesh, backend="eager", **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def backward_of(model: Any) -> Any:
    model(torch.randn(4, 16)).sum().backward()
    return graph_fsdp.inspect(model).backward


def test_the_mean_over_groups_stands_behind_reductions_and_before_the_users_hook(manager: Any) -> None:
    model = compiled((2, 4))
    assert not calls(backward_of(model), "mean_over_groups")
    replicate(model, manager, adamw(model))
    model.set_all_reduce_hook(lambda reduced: None)
    manager.start_quorum()
    assert_expected_inline(
        calls(backward_of(model), "all_reduce_shard_start", "mean_over_groups", "reduce_hook"),
        """\
replicate_root = all_reduce_shard_start(reduced_root, ranks=8)
replicate_blocks_1 = all_reduce_shard_start(reduced_blocks_1, ranks=8)
mean_root = mean_over_groups(replicated_root, bucket=root)
hook_root = reduce_hook(mean_root)
replicate_blocks_0 = all_reduce_shard_start(reduced_blocks_0, ranks=8)
mean_blocks_1 = mean_over_groups(replicated_blocks_1, bucket=blocks.1)
mean_blocks_0 = mean_over_groups(replicated_blocks_0, bucket=blocks.0)""",
    )


def test_microbatches_may_leave_it_out(manager: Any) -> None:
    model = compiled()
    replicate(model, manager, adamw(model))
    with model.no_sync():
        assert not calls(backward_of(model), "mean_over_groups")
    manager.start_quorum()
    assert calls(backward_of(model), "mean_over_groups").count("mean_over_groups(") == 3


def test_buckets_of_several_units_have_one_mean(manager: Any) -> None:
    model = compiled(passes=graph_fsdp.passes.default_pipeline(bucket=100_000))
    replicate(model, manager, adamw(model))
    manager.start_quorum()
    assert calls(backward_of(model), "mean_over_groups").count("mean_over_groups(") == 1


def test_a_group_that_comes_back_compiles_little(manager: Any, tmp_path: Path) -> None:
    """Its regions are those of a step before ``replicate``, its programs those of an earlier start."""
    model = compiled(programs=tmp_path)
    backward_of(model)
    regions = engine_of(model).regions
    before = regions.compiled
    for key in ("first", "second"):
        replicate(model, manager, adamw(model), key=key)
        manager.start_quorum()
        assert calls(backward_of(model), "mean_over_groups")
        assert (graph_fsdp.inspect(model).graphs[-1].remake is not None) is (key == "second"), "found on disk"
        assert key == "second" or regions.compiled == before
        torch._dynamo.reset()
        model = compiled(programs=tmp_path)


def test_a_failed_collective_raises_nothing_and_the_step_is_repeated(manager: Any) -> None:
    import torchft

    model = compiled()
    optimizer = torchft.Optimizer(manager, adamw(model))
    replicate(model, manager, optimizer)
    before = [p.to_local().clone() for p in model.parameters()]
    for fails in (True, False):
        optimizer.zero_grad()
        if fails:
            manager.report_error(RuntimeError("the connection is closed"))
        backward_of(model)
        optimizer.step()
        assert manager.current_step() == (not fails)
        changed = [not torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True)]
        assert any(changed) is not fails


def test_gradients_that_are_complex_are_averaged(manager: Any) -> None:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex64) @ self.weight).abs()

    model: Any = graph_fsdp.compile(Phases(), backend="eager")
    replicate(model, manager, adamw(model))
    manager.start_quorum()
    backward_of(model)
    assert not manager.errored() and model.weight.grad.dtype is torch.complex64


def test_a_backward_needs_a_quorum(manager: Any) -> None:
    model = compiled()
    replicate(model, manager, adamw(model))
    with pytest.raises(AssertionError, match="must call start_quorum"):
        backward_of(model)


def test_models_that_are_refused(manager: Any) -> None:
    alone = init_device_mesh("cpu", (8, 1), mesh_dim_names=("experts", "dp"))["dp"]
    for model, reason in (
        (graph_fsdp.compile(MLP(depth=2), regions="whole"), "regions='whole' has the compiler run the collectives"),
        (compiled(meshes={MLPBlock: alone}), "parameter 'blocks.0.up.weight' is on no other rank of its mesh"),
        (compiled().blocks[0], "it was called on the unit 'blocks.0'"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            replicate(model, manager, adamw(model))
    manager.register_state_dict_fn("graph_fsdp", print, dict)  # the key is free


def test_an_optimizer_that_steps_in_backward_is_refused_before_and_after(manager: Any) -> None:
    model = compiled()
    optimizer = graph_fsdp.distribute_optimizer(adamw(model), in_backward=True)
    with pytest.raises(UnsupportedError, match="in_backward=True"):
        replicate(model, manager, optimizer)
    model = compiled()
    replicate(model, manager, optimizer := adamw(model))
    with pytest.raises(UnsupportedError, match="torchft says after a backward"):
        graph_fsdp.distribute_optimizer(optimizer, in_backward=True)
    with pytest.raises(UnsupportedError, match="it was replicated before"):
        replicate(model, manager, optimizer, key="other")


def test_wrong_arguments_change_nothing(manager: Any) -> None:
    model = compiled()
    optimizer = adamw(model)
    for arguments, message in (
        ((nn.Linear(4, 4), manager, optimizer), "model: Linear was not compiled by graph_fsdp"),
        ((model, optimizer, optimizer), "manager must be a torchft.Manager, and this AdamW has no allreduce"),
        ((model, manager, None), "optimizer must be one or several"),
        ((model, manager, [model]), "optimizer must be a torch.optim.Optimizer"),
    ):
        with pytest.raises(TypeError, match=message):
            replicate(*arguments)
    with pytest.raises(TypeError, match="key must be a name"):
        replicate(model, manager, optimizer, key="")
    assert not calls(backward_of(model), "mean_over_groups")
    manager.register_state_dict_fn("graph_fsdp", print, dict)  # the key is free


def test_one_process_is_no_group_to_replicate(lighthouse: str) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = manager_of(0, lighthouse, store_addr="localhost", store_port=store.port, rank=0, world_size=1)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(manager.shutdown)
        with pytest.raises(UnsupportedError, match="this replica group is one process"):
            replicate(model, manager, adamw(model))


def test_groups_get_the_mean_or_an_error_if_they_reduce_something_else(fake_group: None) -> None:
    """Two managers in one process, a thread each, and real messages between them."""
    store = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as threads:
        address = stack.enter_context(replica_groups.lighthouse(groups=2))
        groups = []
        for group in range(2):
            where = {"store_addr": "localhost", "store_port": store[group].port, "rank": 0, "world_size": 1}
            manager = manager_of(group, address, use_async_quorum=False, **where)
            stack.callback(manager.shutdown)
            model = compiled()
            replicate(model, manager, adamw(model))
            groups.append((manager, engine_of(model).kept.mean_over_groups))

        def step(group: int, of_all: str) -> list[float]:
            manager, mean = groups[group]
            manager.start_quorum()
            for index in range(2):
                mean("" if index else of_all, reduced := torch.full((3,), float(group + index)))
            manager.should_commit()
            return reduced.tolist()

        assert list(threads.map(step, range(2), ["2 buckets", "2 buckets"])) == [[1.5] * 3] * 2
        for result in [threads.submit(step, group, f"{group} buckets") for group in range(2)]:
            with pytest.raises(RankDisagreement, match=r"is about to reduce \d buckets"):
                result.result()


@pytest.fixture
def states(manager: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By key, what loads and what gives a state."""
    found: dict[str, Any] = {}
    register = manager.register_state_dict_fn

    def recorded(key: str, load: Any, save: Any) -> None:
        register(key, load, save)
        found[key] = load, save

    monkeypatch.setattr(manager, "register_state_dict_fn", recorded)
    return found


def sent(states: dict[str, Any]) -> dict[str, Any]:
    """What a live group sends, after the way through a file."""
    content = io.BytesIO()
    torch.save(states["graph_fsdp"][1](), content)
    return torch.load(io.BytesIO(content.getvalue()), weights_only=False)  # as torchft's transports load it


@fake_reductions
@pytest.mark.parametrize("distributed", [False, True])
def test_a_group_that_heals_has_the_state_of_the_live_one(
    manager: Any, states: dict[str, Any], distributed: bool
) -> None:
    def group(seed: int, key: str) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = compiled()
        optimizer = adamw(model)
        optimizer = graph_fsdp.distribute_optimizer(optimizer) if distributed else optimizer
        model.register_buffer("seen", torch.tensor(float(seed)))
        replicate(model, manager, optimizer, key=key)
        return model, optimizer

    def step(model: Any, optimizer: Any) -> None:
        manager.start_quorum()
        model(torch.ones(4, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    live, healing = group(1, "graph_fsdp"), group(2, "healing")
    live[1].param_groups[0]["lr"] = 0.125
    for _ in range(2):
        step(*live)
    states["healing"][0](sent(states))
    assert healing[1].param_groups[0]["lr"] == 0.125
    for _ in range(2):
        for p, q in zip(live[0].parameters(), healing[0].parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local())
            for name, value in live[1].state[p].items():
                own = healing[1].state[q][name]
                assert type(own) is type(value), "DTensors again"
                assert torch.equal(getattr(own, "_local_tensor", own), getattr(value, "_local_tensor", value)), name
        assert healing[0].seen == 1
        step(*live)
        step(*healing)


def test_the_state_of_another_group_is_refused_before_anything_is_changed(manager: Any, states: dict[str, Any]) -> None:
    model = compiled()
    replicate(model, manager, adamw(model))
    load, _ = states["graph_fsdp"]
    before = [p.to_local().clone() for p in model.parameters()]
    other = sent(states)
    other["tensors"]["head.weight"] = other["tensors"]["head.weight"][:0]
    with pytest.raises(CheckpointError, match=r"float32\[0, 16\] for this rank's part of 'head.weight'"):
        load(other)
    other = sent(states)
    other["optimizers"][0]["param_groups"] *= 2
    with pytest.raises(CheckpointError, match="groups with"):
        load(other)
    assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_groups_train_as_one_process(tmp_path: Path, lighthouse: str, asynchronous: bool) -> None:
    given = Training(str(tmp_path), lighthouse, steps=4, asynchronous=asynchronous, microbatches=2)
    with contextlib.ExitStack() as running:
        for group in range(2):
            running.enter_context(group_of(group, tmp_path / f"ranks{group}", given))
        parameters = results(tmp_path / "ranks0", tmp_path / "ranks1")
    assert len(parameters) == 2 * RANKS
    check(tmp_path, given, parameters)


@pytest.mark.long
def test_means_in_bfloat16(tmp_path: Path, lighthouse: str) -> None:
    given = Training(str(tmp_path), lighthouse, steps=4, reduce_dtype=torch.bfloat16)
    with contextlib.ExitStack() as running:
        for group in range(2):
            running.enter_context(group_of(group, tmp_path / f"ranks{group}", given))
        parameters = results(tmp_path / "ranks0", tmp_path / "ranks1")
    check(tmp_path, given, parameters, tolerance=2e-2)  # of gradients with 8 bits, on which Adam's steps depend
