"""Shards, gradients and optimizer state are tensors like any others: saved by ``torch.save``, copied, shared."""

from __future__ import annotations

import copy
import io
import itertools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import MLP
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import graph_fsdp
from graph_fsdp import checkpoint
from graph_fsdp.errors import CheckpointError
from graph_fsdp.report.report import engine_of

WORLD_SIZE = 2
FACTS = Facts(__name__)
# Two rows over two ranks, seven over two (padded on the second), one over two (the second holds nothing).
SIZES = (2, 7, 1, 6)


def model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(SIZES)]
    return graph_fsdp.compile(nn.Sequential(*layers), backend="eager", **options)


def step(trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    trained(torch.ones(3, SIZES[0])).square().sum().backward()
    optimizer.step()


def tensors(value: Any) -> list[DTensor]:
    if isinstance(value, dict):
        return [t for part in value.values() for t in tensors(part)]
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in tensors(part)]
    return [value] if isinstance(value, DTensor) else []


def comes_back(value: Any) -> int:
    """Bytes of what ``torch.save`` writes for it."""
    file = io.BytesIO()
    torch.save(value, file)
    nbytes = file.tell()
    file.seek(0)
    for again in (torch.load(file), copy.deepcopy(value)):
        found, expected = tensors(again), tensors(value)
        assert len(found) == len(expected) > 0
        for a, b in zip(found, expected, strict=True):
            assert a.placements == b.placements and a.shape == b.shape
            assert torch.equal(a.to_local(), b.to_local())
            assert not b.to_local().numel() or a.to_local().data_ptr() != b.to_local().data_ptr()
    return nbytes


@FACTS
def all_that_a_training_saves_comes_back() -> None:
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        trained = model(**options)
        optimizer = torch.optim.AdamW(trained.parameters())
        comes_back(trained.state_dict())
        for _ in range(2):
            step(trained, optimizer)
            comes_back(trained.state_dict())
            comes_back(optimizer.state_dict())
            comes_back([p.grad for p in trained.parameters()])
            for p in trained.parameters():
                comes_back([p.detach(), p.data])


@FACTS
def states_are_read_and_loaded_in_inference_mode() -> None:
    trained, other = model(), model()
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        other.load_state_dict(trained.state_dict())
        path = f"{folder}/of_rank_0" if dist.get_rank() == 0 else None
        paths = [path]
        dist.broadcast_object_list(paths)
        checkpoint.save(paths[0], trained)
        checkpoint.load(paths[0], trained)
    for a, b in zip(trained.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    step(trained, torch.optim.AdamW(trained.parameters()))
    with torch.no_grad():
        assert not any(value.requires_grad for value in trained.state_dict().values())


@FACTS
def a_file_holds_the_shard_and_no_more() -> None:
    torch.manual_seed(0)
    trained = graph_fsdp.compile(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 4)), backend="eager")
    trained(torch.ones(1, 512)).sum().backward()
    small = trained[1].weight
    for value in (small.detach(), small.grad):
        assert comes_back([value]) < 2 * small.numel() + 8000, "the rest of a file of torch.save is under 8 kB"


@FACTS
def a_bucket_is_still_one_slice() -> None:
    trained = model()
    storage = engine_of(trained).storage
    (buffer,) = storage.buffers
    for p in storage.parameters.values():
        local = p.shard.to_local()
        assert p.input.untyped_storage().data_ptr() == buffer.data_ptr()
        assert local.untyped_storage().nbytes() == local.nbytes and local.storage_offset() == 0
        assert not local.numel() or local.data_ptr() == p.input.data_ptr(), "the same memory"


@FACTS
def writes_through_any_view_are_gathered() -> None:
    trained = model()
    weight = trained[1].weight
    writes = (
        lambda: weight.data.fill_(1.0),
        lambda: weight.detach().mul_(2.0),
        lambda: weight.to_local().detach().add_(1.0),
        lambda: trained.state_dict()["1.weight"].add_(1.0),
    )
    for write, value in zip(writes, (1.0, 2.0, 3.0, 4.0), strict=True):
        write()
        with graph_fsdp.unsharded(trained):
            assert torch.equal(trained[1].weight, torch.full((SIZES[2], SIZES[1]), value))


@FACTS
def what_is_kept_of_a_model_outlives_it() -> None:
    trained = model()
    kept, expected = trained.state_dict(), copy.deepcopy(trained.state_dict())
    del trained
    torch._dynamo.reset()
    _ = [torch.full((1000,), 7.0) for _ in range(100)]
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(kept.values(), expected.values(), strict=True))


@FACTS
def a_shard_in_shared_memory_goes_on_being_the_parameter() -> None:
    trained, other = model(), model()
    for p in trained.parameters():
        if p.to_local().numel():
            p.to_local().detach().share_memory_()  # what sending it to another process does
            assert p.to_local().is_shared()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (trained, other)]
    for _ in range(3):
        step(trained, optimizers[0])
        step(other, optimizers[1])
    for p, q in zip(trained.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        assert p.to_local().is_shared() or not p.to_local().numel()


def columns(p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.dim() == 2 and not p.shape[1] % WORLD_SIZE else None


@FACTS
def shards_of_columns_are_contiguous_as_those_of_fsdp2() -> None:
    found, steps = [], []
    for shard in (
        lambda m: graph_fsdp.compile(m, backend="eager", shard_placement_fn=columns),
        lambda m: fully_shard(
            m, shard_placement_fn=columns, mesh=dist.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,))
        ),
    ):
        torch.manual_seed(0)
        sharded = shard(MLP())
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
        for seed in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed + 10 * dist.get_rank()))
            optimizer.zero_grad()
            sharded(x).square().mean().backward()
            optimizer.step()
        local: list[Tensor] = [p.to_local() for p in sharded.parameters()]
        grads = [p.grad.to_local() for p in sharded.parameters()]
        assert all(t.is_contiguous() for t in (*local, *grads))
        found.append([tuple(t.stride()) for t in (*local, *grads)])
        steps.append(local)
        if not found[1:]:
            comes_back(sharded.state_dict())
    assert found[0] == found[1]
    assert all(torch.equal(a, b) for a, b in zip(*steps, strict=True))


@FACTS
def whole_tensors_load_and_each_rank_takes_its_rows() -> None:
    torch.manual_seed(1)
    whole = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(SIZES))).state_dict()
    for options in ({}, {"assign": True}):
        trained = model()
        trained.load_state_dict(whole, **options)
        assert not any(isinstance(value, DTensor) for value in whole.values()), "the caller's dict stays as it is"
        step(trained, torch.optim.SGD(trained.parameters(), lr=0.0))
        for name, p in trained.named_parameters():
            assert torch.equal(p.full_tensor(), whole[name])
        comes_back(trained.state_dict())


@FACTS
def an_optimizer_state_of_whole_tensors_is_refused_before_anything_changes() -> None:
    alone = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(SIZES)))
    optimizer = torch.optim.AdamW(alone.parameters())
    step(alone, optimizer)
    trained = model()
    sharded = torch.optim.AdamW(trained.parameters())
    sharded.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(trained.state_dict())
    with pytest.raises(CheckpointError, match="set_optimizer_state_dict"):
        step(trained, sharded)
    assert all(torch.equal(before[n].to_local(), p.to_local()) for n, p in trained.named_parameters())


test_on_two_ranks = FACTS.on(WORLD_SIZE)
