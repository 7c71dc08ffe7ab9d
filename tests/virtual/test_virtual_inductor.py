"""Inductor generates code for the virtual device: the numbers are right, and its kernels take part in time and races.

Long: a C++ compiler takes some ten seconds for the kernels of a model.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from both_devices import Training, on_cpu, on_virtual
from facts import Facts
from models import MLP
from reference import fsdp2
from torch import Tensor, nn
from virtual import inductor, library
from virtual.machine import Machine

import graph_fsdp
from graph_fsdp.passes import default_pipeline

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(library.COMPILER is None, reason="needs a C++ compiler"),
]
FACTS = Facts(__name__)
mlp = functools.partial(MLP, depth=2)


def rows(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 16, generator=generator)


def compiled_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(fullgraph=True)
    return fsdp2(model)


def ours(model: nn.Module, **options: Any) -> nn.Module:
    return graph_fsdp.compile(model, backend="inductor", **options)


def close_to_eager(shard: Any) -> Machine:
    """Trains on the virtual device, which raises where it finds a race, and by FSDP2 on the CPU, uncompiled."""
    inductor.register()
    machine = Machine("h100", traced=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = on_virtual(machine, lambda device: Training(shard, mlp, rows, device).values(steps=2))
        expected = on_cpu(lambda device: Training(fsdp2, mlp, rows, device).values(steps=2))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)  # AdamW divides small gradients by small roots
    return machine


def generated(machine: Machine) -> list[str]:
    return [op.operator for op in machine.operations or () if op.operator.startswith("cpp_fused")]


@FACTS
def fsdp2_with_compiled_blocks() -> None:
    assert generated(close_to_eager(compiled_blocks))


@FACTS
def ours_by_regions() -> None:
    machine = close_to_eager(functools.partial(ours, passes=default_pipeline(hardware="h100")))
    assert generated(machine)
    collectives = {op.stream for op in machine.operations or () if op.operator == "all_gather"}
    assert 0 not in collectives, "gathers run beside the kernels"


@FACTS
def a_generated_kernel_that_nothing_orders_is_found() -> None:
    inductor.register()
    with Machine("h100") as machine:
        function = torch.compile(lambda x: (x.sin() + 1).cos())
        x, other = torch.ones(8, device="virtual"), torch.Stream("virtual")
        expected = (x.sin() + 1).cos()
        before = machine.seconds
        torch.testing.assert_close(function(x).cpu(), expected.cpu())
        assert machine.seconds > before
        assert not machine.take_races()
        x.zero_()
        with other:
            y = function(x)
        (race,) = machine.take_races()
        assert (race.first.operator, race.second.operator[:9]) == ("aten.zero_", "cpp_fused"), str(race)
        y.sum()
        (race,) = machine.take_races()
        assert race.first.operator.startswith("cpp_fused") and race.second.operator == "aten.sum", str(race)


test_inductor_on_the_virtual_device = FACTS.in_a_fresh_process()
