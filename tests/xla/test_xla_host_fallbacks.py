"""Operators that XLA does not have: named with the module that uses them, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from xla_compare import mesh
from xla_launch import DEVICES, XlaFacts, run_xla

FACTS = XlaFacts(__name__)


class Gamma(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.lgamma(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Gamma()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x) ** 2 + 1).sum()


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.xla_host_fallbacks.square(x)


def found_in(model: nn.Module) -> list[list[str]]:
    """In the graphs of a model, in the order in which they run."""
    from graph_fsdp.runtime.xla.host_fallbacks import find_host_fallbacks

    found = []

    def compiler(graph: fx.GraphModule, example: Any) -> Any:
        def run(*args: Any) -> Any:
            found.append([str(fallback) for fallback in find_host_fallbacks(graph.graph)])
            return graph(*args)

        return make_boxed_func(run)

    x = torch.rand(2, 4).to("xla").requires_grad_()
    torch.compile(model.to("xla"), backend=aot_autograd(fw_compiler=compiler))(x).sum().backward()
    return found


@FACTS
def an_operator_that_runs_on_the_host_is_named_with_its_module_in_forward_and_in_backward() -> None:
    torch.lgamma(torch.rand(2, device="xla"))  # by the user: counted, and not the graph's
    expected = [
        ["aten::lgamma, used by module 'blocks.1' (Gamma)"],
        ["aten::digamma, used by module 'blocks.1' (Gamma)"],
    ]
    assert found_in(Model()) == expected
    torch._dynamo.reset()
    assert found_in(Model()) == expected


@FACTS
def operators_of_other_libraries_are_found_too() -> None:
    library = torch.library.Library("xla_host_fallbacks", "DEF")
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: x * x, "CPU")
    torch.library.register_fake("xla_host_fallbacks::square", torch.empty_like, lib=library)
    assert found_in(nn.Sequential(nn.Linear(4, 4), Squared()).requires_grad_(False))[0] == [
        "xla_host_fallbacks::square, used by module '1' (Squared)"
    ]


@FACTS
def of_operators_that_xla_has_none_is_found() -> None:
    norm = nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(), nn.Softmax(1))
    assert found_in(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(0, (1, 2)), norm[0], nn.Flatten(0, 1), *norm[1:])) == [
        [],
        [],
    ]


def train_gamma(on_host_fallback: str) -> str:
    from xla_models import fsdp_mesh

    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    mesh = fsdp_mesh()
    model = graph_fsdp.compile(Model(), mesh, backend="xla", on_host_fallback=on_host_fallback)
    try:
        model(shard_batch(torch.rand(8, 4), mesh))
    except graph_fsdp.HostFallbackError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("on_host_fallback", ["error", "warn"])
def test_what_each_device_runs_by_itself_cannot_fall_back(on_host_fallback: str) -> None:
    error = run_xla(train_gamma, on_host_fallback)
    assert "1 of the model's operators: aten::lgamma, used by module 'blocks.1' (Gamma)" in error
    assert "pass sharding='auto', on_host_fallback='warn'" in error


def losses_of(model: nn.Module, put: Callable[[Tensor], Tensor], steps: int = 6) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        loss = model(put(torch.rand(8, 4, generator=torch.Generator().manual_seed(step))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_gamma_on_the_host() -> tuple[list[float], list[str]]:
    import warnings

    from xla_models import fsdp_mesh

    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    mesh = fsdp_mesh()
    torch.manual_seed(0)
    model = graph_fsdp.compile(Model(), mesh, backend="xla", sharding="auto", on_host_fallback="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = losses_of(model, lambda x: shard_batch(x, mesh))
    return losses, [str(warning.message) for warning in caught]


def test_what_the_partitioner_divides_runs_them_on_request_with_a_warning() -> None:
    losses, messages = run_xla(train_gamma_on_the_host)
    user = "used by module 'blocks.1' (Gamma)"
    for operator in ("aten::lgamma", "aten::digamma"):
        assert sum(f"1 of the model's operators: {operator}, {user}" in message for message in messages) == 1
    torch.manual_seed(0)
    expected = losses_of(Model(), lambda x: x)
    assert losses == pytest.approx(expected, rel=1e-5)


@FACTS
def numbers_that_are_drawn_otherwise_are_refused_by_name() -> None:
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    model = graph_fsdp.compile(nn.Sequential(nn.Linear(4, 4), nn.RReLU()), axes, backend="xla")
    with pytest.raises(NotImplementedError, match=r"rrelu_with_noise.* draws random numbers"):
        model(shard_batch(torch.ones(8, 4), axes))  # it returns its noise, too


test_host_fallbacks = FACTS.on_devices()
