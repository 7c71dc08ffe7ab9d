"""NaN and infinite gradients on one rank: they have the values that FSDP2 gives them, and reach all ranks."""

from __future__ import annotations

import copy

import torch
from facts import Facts
from models import MLP
from reference import fsdp2
from struck import rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import SGD

import graph_fsdp

FACTS = Facts(__name__)


def pair(**options: object) -> tuple[nn.Module, nn.Module]:
    """The same model, sharded by us and by FSDP2."""
    plain = MLP()
    ours = graph_fsdp.compile(copy.deepcopy(plain), backend="eager", **options)
    return ours, fsdp2(plain, mesh=init_device_mesh("cpu", (2,)), **options)


def gradients(model: nn.Module, bad: float) -> list[Tensor]:
    """Whole, where rank 1's loss is multiplied by ``bad``."""
    model.zero_grad()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank()))
    loss = model(x).float().square().mean()
    (loss * (bad if rank() == 1 else 1.0)).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


POLICIES = [
    {},
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
]


@FACTS
def nan_and_infinite_gradients_are_those_of_fsdp2() -> None:
    for options in POLICIES:
        torch.manual_seed(0)
        ours, theirs = pair(**options)
        for bad in (float("nan"), float("inf"), float("-inf"), 1.0):
            found, expected = gradients(ours, bad), gradients(theirs, bad)
            assert all(map(same_bits, found, expected)), (options, bad)
            finite = [bool(gradient.isfinite().all()) for gradient in found]
            assert all(finite) if bad == 1.0 else not any(finite), "the whole gradient, on every rank"


@FACTS
def a_scaler_skips_the_step_on_all_ranks() -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    for bad in (float("nan"), float("inf")):
        optimizer, scaler = SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor, moves in ((1.0, True), (bad, False), (1.0, True)):
            before = [p.full_tensor().detach().clone() for p in model.parameters()]
            scale = scaler.get_scale()
            loss = model(torch.ones(4, 16)).square().mean() * (factor if rank() == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = [torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True)]
            assert all(same) is not moves
            assert scaler.get_scale() == (scale if moves else scale / 2)
            assert all(p.full_tensor().isfinite().all() for p in model.parameters())


test_on_two_ranks = FACTS.on(2)
