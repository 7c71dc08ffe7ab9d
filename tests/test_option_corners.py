"""Options together with parameters and operators that hardly anyone has, as random models have found them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

import graph_fsdp


def compiled(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*OffloadPolicy.*")  # saves nothing on a CPU
        return graph_fsdp.compile(model, mesh, backend="eager", **options)


class Rows(nn.Module):
    """A parameter without rows, beside one with some."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.gain = nn.Parameter(torch.randn(0, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.rows.sum(0)


def assert_trains_alike(model: nn.Module, x: Tensor, **options: Any) -> None:
    plain = copy.deepcopy(model)
    ours = compiled(model, **options)
    for m in (ours, plain):
        m(x).square().mean().backward()
    assert torch.equal(ours(x), plain(x))
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in ours.named_parameters():
        assert torch.equal(p.grad, expected[name]), name  # type: ignore[arg-type]


def test_an_empty_parameter_is_trained_with_offloading() -> None:
    assert_trains_alike(Rows(), torch.randn(2, 3), offload_policy=CPUOffloadPolicy())


@pytest.mark.usefixtures("fake_group")
def test_an_empty_parameter_is_not_fetched() -> None:
    model = compiled(Rows(), offload_policy=CPUOffloadPolicy())
    model(torch.randn(2, 3)).sum().backward()
    code = graph_fsdp.inspect(model).forward.stages["bucket"].code
    assert "new_empty" in code
    fetches = [line for line in code.splitlines() if "fetch_start" in line]
    assert len(fetches) == 1 and "[0], 3" not in fetches[0]


@pytest.mark.usefixtures("fake_group")
def test_a_parameter_sharded_by_columns_over_one_rank_is_fetched_as_it_is_stored() -> None:
    mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = nn.Linear(3, 5)
    x = torch.randn(2, 3)
    expected = model(x)
    ours = compiled(model, mesh, offload_policy=CPUOffloadPolicy(), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    torch.testing.assert_close(ours(x), expected)


class Dropped(nn.Module):
    """All that backward needs is drawn at random: the partitioner has nothing to choose from."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.sin(x * self.gain)) * self.gain


@pytest.mark.parametrize("budget", [0, 0.5])
def test_a_mask_is_saved_under_a_budget_and_not_the_tuple_that_it_is_in(budget: float) -> None:
    model, x = nn.Sequential(Dropped(), Dropped()), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    ours = compiled(model, activation_checkpointing=budget, auto_wrap_policy={Dropped})
    for m in (ours, plain):
        torch.manual_seed(1)
        m(x).square().mean().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
