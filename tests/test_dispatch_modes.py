"""Dispatch modes around a compiled model see its operators and collectives, and change nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import MLP
from reference import fsdp2
from test_calls_ranks import pair, rows, whole
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import graph_fsdp

FACTS = Facts(__name__)


class Operators(TorchDispatchMode):
    """Counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] = self.seen.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    with warnings.catch_warnings():  # CommDebugMode's hooks on modules whose inputs need no gradients
        warnings.simplefilter("ignore")
        model(x).square().mean().backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def counts(model: nn.Module, x: Tensor) -> dict[str, int]:
    with CommDebugMode() as mode:
        step(model, x)
    return {str(name): number for name, number in mode.get_comm_counts().items()}


def equal(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)  # type: ignore[arg-type]


@FACTS
def comm_debug_mode_counts_what_it_counts_of_fsdp2() -> None:
    x = rows(4, 16)
    torch.manual_seed(0)
    model, plain = pair(MLP())
    expected = counts(fsdp2(plain), x)
    assert expected and counts(model, x) == expected, "a first call under a mode"
    assert counts(model, x) == expected
    without = step(model, x)
    with CommDebugMode():
        assert equal(step(model, x), without)
    graphs = len(graph_fsdp.inspect(model).graphs)
    assert graphs == 1 or torch.__version__.startswith("2.9"), "a mode compiles nothing again, but with torch 2.9"


@FACTS
def a_mode_on_one_rank_changes_no_collective() -> None:
    x = rows(4, 16)
    torch.manual_seed(0)
    model, _ = pair(MLP())
    without = step(model, x)
    if dist.get_rank() == 0:
        with FlopCounterMode(display=False), Operators() as mode:
            found = step(model, x)
        assert mode.seen["c10d._reduce_scatter_base_.default"] == 3
        assert "c10d.alltoall_base_.default" not in mode.seen, "how two ranks of gloo do it"
    else:
        found = step(model, x)
    assert equal(found, without)


@FACTS
def a_unit_that_is_unsharded_is_seen() -> None:
    model, _ = pair(MLP())
    with Operators() as mode:
        model.blocks[0].unshard()  # type: ignore[index, operator]
    assert mode.seen["c10d._allgather_base_.default"] == 1


test_on_two_ranks = FACTS.on(2)


class Broken(MLP):
    """With a piece that Python runs."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x) @ torch.ones(5, 3)


def flops(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(x).square().mean().backward()
    model.zero_grad()
    return counter.get_total_flops()


@pytest.mark.parametrize(("kind", "fullgraph"), [(MLP, True), (Broken, False)])
def test_flops_are_those_of_the_plain_model(kind: type[nn.Module], fullgraph: bool) -> None:
    x = torch.randn(4, 16)
    model, plain = pair(kind(), fullgraph=fullgraph)
    expected = flops(plain, x)
    assert expected > 0
    for _ in range(2):
        assert flops(model, x) == expected
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    assert 0 < counter.get_total_flops() < expected


def test_hooks_on_all_modules_are_there_again() -> None:
    called = []
    before = nn.modules.module.register_module_forward_pre_hook(lambda module, args: called.append(type(module)))
    try:
        linear = nn.Linear(2, 2)
        with FlopCounterMode(display=False) as counter:
            pair(MLP())[0](torch.randn(4, 16))
            called.clear()
            linear(torch.randn(3, 2))
        assert called == [nn.Linear] and "Linear" in counter.get_flop_counts()
    finally:
        before.remove()
