"""A case trained by several implementations beside plain PyTorch, on this rank of a process group."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.units import find_units
from third_party.case import Case, Inputs

STEPS = 2
RATE = 1e-3  # of SGD: Adam's first steps are the signs of gradients, those too that are rounding alone
# Of one rank's sums in another order: compilers write out what PyTorch has one kernel for. Of the largest value of a
# gradient, and of the largest of all gradients.
LOSS_BOUND, GRADIENT_BOUND, ALL_BOUND = 1e-4, 1e-3, 1e-5
FULL, PIECES = "fullgraph", "fullgraph=False"
_LONGEST_REASON = 160


class Differs(Exception):
    """A loss or a gradient is another than plain PyTorch's."""


@dataclass(frozen=True)
class Found:
    """``result``: "fullgraph", "fullgraph=False", "trains" of what has no graphs, or the reason why it does not."""

    result: str
    seconds: float
    trace: str = ""
    warned: str = ""


@dataclass(frozen=True)
class Training:
    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]


@dataclass(frozen=True)
class Place:
    """``device``: type of the device that trains; ``backend``: of ``torch.compile`` and of ours."""

    device: str = "cpu"
    backend: str = "eager"


Build = Callable[[nn.Module, Place], nn.Module]


def compiled(fullgraph: bool) -> Build:
    def build(model: nn.Module, place: Place) -> nn.Module:
        model.compile(fullgraph=fullgraph, backend=place.backend)
        return model

    return build


def fsdp2(model: nn.Module, place: Place) -> nn.Module:
    """Of the same units."""
    mesh = init_device_mesh(place.device, (dist.get_world_size(),))
    for unit in reversed(find_units(model)):
        if unit.name:
            fully_shard(list(unit.modules.values()), mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


def ours(fullgraph: bool) -> Build:
    def build(model: nn.Module, place: Place) -> nn.Module:
        mesh = init_device_mesh(place.device, (dist.get_world_size(),))
        return graph_fsdp.compile(model, mesh, backend=place.backend, fullgraph=fullgraph)

    return build


IMPLEMENTATIONS: dict[str, list[tuple[str, Build]]] = {
    "torch.compile": [(FULL, compiled(True)), (PIECES, compiled(False))],
    "FSDP2": [("trains", fsdp2)],
    "graph_fsdp": [(FULL, ours(True)), (PIECES, ours(False))],
}


def compare(
    case: Case, names: tuple[str, ...] = tuple(IMPLEMENTATIONS), place: Place = Place()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What becomes of a case, by implementation, one after the other.

    Raises:
        Exception: plain PyTorch does not train it.
    """
    torch.manual_seed(0)
    model = case.build().train().to(place.device)
    case = dataclasses.replace(case, inputs=lambda drawn=case.inputs: moved(drawn(), place.device))
    reference = averaged(train(case, copy.deepcopy(model)))
    for name in names:
        if dist.get_world_size() == 1 or name != "torch.compile":
            yield name, asdict(first_that_trains(case, model, reference, name, place))


def first_that_trains(case: Case, model: nn.Module, reference: Training, name: str, place: Place) -> Found:
    """The best that an implementation can do; the last of its reasons if it can do nothing."""
    found = Found("", 0.0)
    for label, build in IMPLEMENTATIONS[name]:
        torch._dynamo.reset()
        began = time.process_time()
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            try:
                check(train(case, build(copy.deepcopy(model), place)), reference)
                result, trace = label, ""
            except Exception as error:
                result, trace = f"{type(error).__name__}: {first_line(error)}", traceback.format_exc()
        texts = [re.sub(r"[^\s(]*/site-packages/", "", str(w.message)) for w in warned]
        said = [text for text in texts if "outside of graphs" in text]
        trace = f"{found.trace}\n{trace}" if trace or found.trace else ""
        found = Found(result, time.process_time() - began, trace, " ".join(said[:1]))
        if result == label:
            break
    return found


def moved(inputs: Inputs, device: str) -> Inputs:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def train(case: Case, model: nn.Module) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, gradients = [], []
    for step in range(STEPS):
        torch.manual_seed(1 + step * 100 + dist.get_rank())
        inputs = case.inputs()
        optimizer.zero_grad()
        loss = case.loss(model(**inputs))
        loss.backward()
        losses.append(loss.detach().clone())
        gradients.append({name: whole(p.grad) for name, p in model.named_parameters()})
        if gradients_are_local(model):
            for p in model.parameters():
                if dist.get_world_size() > 1:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
        optimizer.step()
    return Training(losses, gradients)


def gradients_are_local(model: nn.Module) -> bool:
    return not any(isinstance(p, DTensor) for p in model.parameters())


def whole(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()


def averaged(training: Training) -> Training:
    """With the means of all ranks' gradients; one that a rank does not have is zeros there."""
    size = dist.get_world_size()
    if size == 1:
        return training
    every: list[Any] = [None] * size
    dist.all_gather_object(every, training.gradients)
    means = []
    for step in range(STEPS):
        mean: dict[str, Tensor | None] = {}
        for name in every[0][step]:
            found = [gradients[step][name] for gradients in every if gradients[step][name] is not None]
            mean[name] = torch.stack(found).sum(0) / size if found else None
        means.append(mean)
    return Training(training.losses, means)


def check(found: Training, expected: Training) -> None:
    """
    Raises:
        Differs: names the step, and the parameter that is worst.
    """
    for step, (loss, wanted) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not torch.allclose(loss, wanted, rtol=LOSS_BOUND, atol=0):
            raise Differs(f"the loss of step {step} is {loss:.6g}, not {wanted:.6g}")
        gradients = [grad for grad in expected.gradients[step].values() if grad is not None and grad.numel()]
        largest = max(grad.abs().max().item() for grad in gradients)
        if list(found.gradients[step]) != list(expected.gradients[step]):
            raise Differs("the parameters have other names")
        for name, reference in expected.gradients[step].items():
            grad = found.gradients[step][name]
            if reference is not None and not reference.numel():
                continue  # a parameter of no elements
            if reference is None or grad is None:
                zero = next((g for g in (grad, reference) if g is not None), None)
                if zero is not None and zero.abs().max() > 0:
                    raise Differs(f"in step {step}, {name!r} has {'no' if grad is None else 'a'} gradient")
                continue
            apart = (grad - reference).abs().max().item()
            if not apart <= GRADIENT_BOUND * reference.abs().max().item() + ALL_BOUND * largest:
                raise Differs(f"in step {step}, the gradient of {name!r} is off by {apart:.2g}")


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = re.sub(r"\s+", " ", lines[0]).replace("|", "/")
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…"
