"""Models on the meta device, on gloo ranks: the same values on any number of them, or those of the first rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import SLACK, nbytes, peak_of
from facts import Facts
from launch import run_ranks
from models import CASES, CLASSES, MLP, WIDTH, Batch, UnevenBlock, loss_of
from reference import parameters_of, rows_of, whole
from test_meta import Shift, built, initialised, on_meta
from test_meta_errors import unchanged, with_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import MetaDeviceError, RankDisagreement, UnsupportedError

FACTS = Facts(__name__)
SEED = 5


# Any number of ranks


MODELS = ["mlp", "gpt_tied", "cnn_batchnorm"]


Mesh = tuple[tuple[int, ...], tuple[str, ...] | None]


def values_and_random_numbers(meshes: list[Mesh]) -> list[tuple[dict[str, Tensor], Tensor]]:
    """On a rank, for each model on each mesh: whole parameters and buffers, and what the rank draws next."""
    results = []
    for shape, names in meshes:
        for name in MODELS:
            model = on_meta(CASES[name].make)
            torch.manual_seed(SEED + dist.get_rank())  # as for dropout: ranks have seeds of their own
            graph_fsdp.compile(model, init_device_mesh("cpu", shape, mesh_dim_names=names), backend="eager")
            drawn = torch.rand(3)
            results.append((parameters_of(model) | {n: b.clone() for n, b in model.named_buffers()}, drawn))
    return results


def check_values(results: list[list[tuple[dict[str, Tensor], Tensor]]], meshes: int) -> None:
    for index, name in enumerate(MODELS * meshes):
        model = initialised(on_meta(CASES[name].make), SEED)
        drawn = torch.rand(3)
        expected = dict(model.named_parameters()) | dict(model.named_buffers())
        for rank, (values, found) in enumerate(result[index] for result in results):
            assert list(values) == list(expected)
            assert all(torch.equal(values[key], value) for key, value in expected.items())
            own = torch.rand(3, generator=torch.Generator().manual_seed(SEED + rank))
            assert torch.equal(found, own if rank else drawn), "the first rank goes on, others are where they were"


def test_the_values_on_two_ranks_are_those_of_one_with_the_seed_of_the_first() -> None:
    check_values(run_ranks(values_and_random_numbers, 2, [((2,), None)]), meshes=1)


def test_the_values_on_four_ranks_are_those_of_one_replicated_or_not() -> None:
    meshes = [((4,), None), ((2, 2), None), ((4,), ("replicate",))]
    check_values(run_ranks(values_and_random_numbers, 4, meshes), meshes=3)


@FACTS
def ranks_in_the_same_state_go_on_alike() -> None:
    built(MLP)
    expected = torch.rand(3)
    initialised(on_meta(MLP))
    assert torch.equal(torch.rand(3), expected)


def step(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The losses of two steps on this rank's rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = loss_of(model, rows_of(batch, dist.get_rank(), 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@FACTS
def training_goes_on_as_from_a_model_that_was_built() -> None:
    """With FSDP2's numbers."""
    case = CASES["cnn_batchnorm"]
    meta, real = initialised(on_meta(case.make)), fully_shard(built(case.make))
    batch = case.batch(8, 0)
    losses, expected = step(meta, batch), step(real, batch)
    assert losses[0] != losses[1] and all(map(torch.equal, losses, expected))
    for key, value in parameters_of(real).items():
        assert torch.equal(whole(meta.get_parameter(key)), value)


# The first rank's values


class Kinds(nn.Module):
    """Parameters and buffers of many shapes and dtypes, which only the first rank can initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = UnevenBlock(WIDTH)  # and a scalar, and fewer rows than ranks
        self.halves = nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16))
        self.integers = nn.Parameter(torch.arange(7), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.rand(3, 3) > 0.5, persistent=False)
        self.register_buffer("nothing", torch.zeros(0))

    def reset_parameters(self) -> None:
        raise AssertionError("values come from the first rank")


def on_first_rank_alone(make: Any) -> nn.Module:
    """Built with values on the first rank, on the meta device elsewhere."""
    return built(make) if dist.get_rank() == 0 else on_meta(make)


@FACTS
def ranks_on_the_meta_device_get_the_values_of_the_first() -> None:
    expected = built(Kinds)
    expected.norm.running_mean.fill_(3.0)
    model = copy.deepcopy(expected) if dist.get_rank() == 0 else on_meta(Kinds)
    before = torch.get_rng_state()
    graph_fsdp.compile(model, backend="eager", sync_module_states=True)
    assert torch.equal(torch.get_rng_state(), before)
    reference = dict(expected.named_parameters())
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and p.requires_grad == reference[name].requires_grad
        assert p.device.type == "cpu" and torch.equal(whole(p), reference[name])
    for name, b in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), b)


@FACTS
def a_model_that_has_values_on_the_first_rank_alone_trains() -> None:
    case = CASES["cnn_batchnorm"]
    model = graph_fsdp.compile(on_first_rank_alone(case.make), backend="eager", sync_module_states=True)
    batch = case.batch(8, 0)
    assert all(map(torch.equal, step(model, batch), step(fully_shard(built(case.make)), batch)))


@FACTS
def values_of_other_ranks_and_their_ignored_parameters_are_replaced() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Shift(), nn.Linear(WIDTH, 3))
    model[0].shift.fill_(dist.get_rank() + 1)
    ignored = model[1].bias
    torch.manual_seed(0)
    expected = nn.Linear(WIDTH, 3)
    graph_fsdp.compile(model, backend="eager", sync_module_states=True, ignored_params=[ignored])
    assert model[1].bias is ignored and torch.equal(ignored, expected.bias)
    assert torch.equal(whole(model[1].weight), expected.weight)
    assert model[0].shift.eq(1).all()


@FACTS
def buffers_that_are_views_come_from_the_first_rank_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    value = torch.tensor([[2j, 3j]]).to(torch.complex64) * (1 - dist.get_rank())
    model.register_buffer("expanded", value.expand(4, 2))
    model.register_buffer("conjugate", value.conj())
    model.register_buffer("negative", value.conj().imag)
    graph_fsdp.compile(model, backend="eager", sync_module_states=True)
    assert torch.equal(model.expanded, torch.tensor([2j, 3j]).expand(4, 2).to(torch.complex64))
    assert torch.equal(model.conjugate, torch.tensor([[-2j, -3j]]).to(torch.complex64))
    assert torch.equal(model.negative, torch.tensor([[-2.0, -3.0]]))


@FACTS
def no_rank_holds_more_than_one_parameter_above_its_shards() -> None:
    model = on_first_rank_alone(lambda: MLP(depth=4, width=256))
    shards, largest = nbytes(model) // 2, nbytes(model.blocks[0].up)
    peak = peak_of(lambda: graph_fsdp.compile(model, backend="eager", sync_module_states=True))
    assert shards < peak <= shards + largest + SLACK


def values_on_meshes() -> list[bool]:
    """On a rank: on each mesh, whether all values are those of the first rank."""
    expected = dict(built(MLP).named_parameters())
    equal = []
    for shape, names in (((2, 2), None), ((1, 4), None), ((4, 1), None), ((4,), ("replicate",))):
        model = on_first_rank_alone(MLP)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        graph_fsdp.compile(model, mesh, backend="eager", sync_module_states=True)
        equal.append(all(torch.equal(value, expected[name]) for name, value in parameters_of(model).items()))
    return equal


def test_the_first_ranks_values_reach_all_ranks_of_a_mesh() -> None:
    assert run_ranks(values_on_meshes, 4) == [[True] * 4] * 4


# Ranks that differ: all of them are told, none waits for ever


@FACTS
def a_rank_on_the_meta_device_without_sync_module_states() -> None:
    model = on_first_rank_alone(MLP)
    tensors = dict(model.named_parameters())
    with pytest.raises(RankDisagreement) as raised:
        graph_fsdp.compile(model, backend="eager")
    for words in (
        "ranks [1]",
        "parameter 'blocks.0.up.weight' is on the meta",
        "all parameters and buffers have values",
    ):
        assert words in str(raised.value)
    assert all(model.get_parameter(name) is p for name, p in tensors.items())
    graph_fsdp.compile(model, backend="eager", sync_module_states=True)  # nothing is left of the failure
    expected = dict(built(MLP).named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in parameters_of(model).items())


@FACTS
def a_sparse_buffer_with_sync_module_states() -> None:
    model = MLP()
    model.register_buffer("mask", torch.eye(2).to_sparse())
    with unchanged(model), pytest.raises(UnsupportedError, match=r"buffer 'mask' is of the layout .*; make it dense"):
        graph_fsdp.compile(model, backend="eager", sync_module_states=True)


@FACTS
def the_first_rank_on_the_meta_device_with_sync_module_states() -> None:
    model = on_meta(MLP) if dist.get_rank() == 0 else MLP()
    error, words = (MetaDeviceError, "leave") if dist.get_rank() == 0 else (RankDisagreement, "MetaDeviceError: sync")
    with pytest.raises(error, match=words):
        graph_fsdp.compile(model, backend="eager", sync_module_states=True)


@FACTS
def a_rank_that_cannot_initialise_its_model_tells_the_others() -> None:
    model = on_meta(with_norm)
    if dist.get_rank() == 0:
        model[1] = on_meta(Shift)
    error = MetaDeviceError if dist.get_rank() == 1 else RankDisagreement
    with pytest.raises(error, match=r"module '1' \(Norm\) has no reset_parameters"):
        graph_fsdp.compile(model, backend="eager")


@FACTS
def other_parts_of_the_model_on_the_meta_device() -> None:
    model = on_meta(MLP)
    model.head = nn.Linear(WIDTH, CLASSES) if dist.get_rank() else model.head
    with pytest.raises(RankDisagreement, match=r"parameter 'head.weight' \[5, 16\] float32\" on rank 1"):
        graph_fsdp.compile(model, backend="eager")


@FACTS
def another_model_on_one_rank() -> None:
    model = on_first_rank_alone(lambda: MLP(depth=2 + dist.get_rank()))
    with pytest.raises(RankDisagreement, match=r"parameter 'blocks.2.up.weight' \[32, 16\] float32.*head.weight"):
        graph_fsdp.compile(model, backend="eager", sync_module_states=True)


@FACTS
def an_option_of_one_rank() -> None:
    with pytest.raises(RankDisagreement, match="sync_module_states=True"):
        graph_fsdp.compile(MLP(), backend="eager", sync_module_states=dist.get_rank() == 1)


test_on_two_ranks = FACTS.on(2)
