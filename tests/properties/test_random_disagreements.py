"""Random forwards with Python between their graphs, whose branches each rank decides by its own rows: where ranks take
the same ones, they train as plain PyTorch would on all rows; where they do not, all raise the same error, none waits,
and none has other numbers. A test's number is its seed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from random_programs import random_program
from test_random_graph_breaks import whole
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp import RankDisagreement

TURNS = 4
AGREE = [9011]
DIFFER = [9001, 9109]


def mean_over_ranks(plain: nn.Module) -> list[Tensor | None]:
    """The mean of a plain model's gradients, with zeros of ranks that have none; None where no rank has one."""
    means = []
    for p in plain.parameters():
        has, total = torch.tensor(float(p.grad is not None)), torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(has)
        dist.all_reduce(total)
        means.append(total / dist.get_world_size() if has else None)
    return means


def trained(seed: int) -> tuple[int, str]:
    """Turns that were trained, and the error that ended them."""
    torch.manual_seed(seed)
    plain = random_program(seed)[1]().double()
    model = copy.deepcopy(plain)
    policy = {type(plain.get_submodule("layers.0"))} if seed % 2 else None
    graph_fsdp.compile(model, backend="eager", fullgraph=False, auto_wrap_policy=policy)
    torch.manual_seed(100 * seed + dist.get_rank())
    warnings.filterwarnings("ignore", message="code outside of graphs reads")
    for turn in range(TURNS):
        x = torch.randn(3 + turn % 2, 4, dtype=torch.float64)
        expected = plain(x, turn)
        expected.square().sum().backward()
        means = mean_over_ranks(plain)
        try:
            found = model(x, turn)
            assert torch.allclose(found, expected)
            found.square().sum().backward()
        except RankDisagreement as error:
            return turn, str(error)
        for mean, p, q in zip(means, plain.parameters(), model.parameters(), strict=True):
            assert (q.grad is None) == (mean is None)
            assert mean is None or torch.allclose(whole(q.grad), mean)
            p.grad = mean
        for parameters in (model.parameters(), plain.parameters()):
            torch.optim.SGD(parameters, lr=0.01).step()
        model.zero_grad()
        plain.zero_grad()
    return TURNS, ""


@pytest.mark.long
@pytest.mark.parametrize("seed", [*AGREE, *DIFFER])
def test_ranks_train_as_plain_pytorch_or_all_say_where_they_differ(seed: int) -> None:
    first, *others = run_ranks(trained, 2, seed)
    assert others == [first], "at the same turn, by the same words"
    assert (first[0] == TURNS) == (first[1] == "") == (seed in AGREE)
