"""Part A, too: the host of a warm step, which launches and does not wait."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from implementations import Setup, ours
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from workloads import loss_of

from device_checks import VIRTUAL, Figures, check, one_of, schedule_of
from device_checks.correctness import RANKS, llama_of
from device_checks.model import Llama

CASES = ["plain", "accumulated, evaluated and clipped", "of two outputs"]


@check("A", 120, cases=CASES, needs=["cuda", VIRTUAL], reason="who waits is seen there alone")
def a_warm_step_does_not_wait_for_the_device(device: torch.device, case: str) -> Figures:
    """No operation of a warm step makes the host wait (``torch.cuda.set_sync_debug_mode("error")``)."""
    workload, backend = llama_of(device), "eager" if device.type == VIRTUAL else "inductor"
    workload = dataclasses.replace(workload, layers=max(workload.layers, 2))  # a block after a block, too
    with one_of(device, RANKS):
        setup = Setup(workload.blocks, init_device_mesh(device.type, (RANKS,)))
        model: Any = workload.make(device)
        if case == "of two outputs":
            model.__class__ = OfTwoOutputs
        model = ours(backend=backend, **schedule_of(device))(model, setup)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batches = [workload.tokens(step, 0, device) for step in range(4)]
        for batch in batches[:3]:
            step_of(case, model, optimizer, batch)
        with host_that_must_not_wait(device):
            step_of(case, model, optimizer, batches[3])
    return {}


class OfTwoOutputs(Llama):
    """With a second output, which not all parameters are in: a loss might be of it alone."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(input_ids, labels), self.model.embed_tokens(input_ids).mean()


def step_of(case: str, model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    if case == "of two outputs":
        sum(model(**batch)).backward()
    elif case == "plain":
        loss_of(model(**batch)).backward()
    else:
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            loss_of(model(**batch)).backward()
            with torch.no_grad():
                model(**batch)
        model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def host_that_must_not_wait(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")
        return
    from virtual.machine import Machine

    machine = Machine.current
    assert machine is not None
    torch.accelerator.synchronize()
    before = machine.clocks.host.seconds
    yield
    waited = machine.clocks.host.seconds - before  # launching takes no time there
    assert not waited, f"the host waited until {waited * 1e6:.0f} µs of the step were over"
