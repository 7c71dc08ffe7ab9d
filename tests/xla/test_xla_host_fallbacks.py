"""Operators that XLA does not have: named with the module that uses them, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from facts import Failures, check
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from xla_launch import XlaFacts

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


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    def compiler(graph: fx.GraphModule, example: Any) -> Any:
        def call(args: list[Any]) -> Any:
            return run(graph, *args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return torch.compile(Model().to("xla"), backend=aot_autograd(fw_compiler=compiler))


def rows() -> Tensor:
    return torch.arange(8.0).reshape(2, 4).to("xla")


@FACTS
def an_operator_that_runs_on_the_host_is_an_error_that_names_it_and_its_module() -> None:
    from graph_fsdp.runtime.xla.host_fallbacks import HostFallbackError, run_without_host_fallbacks

    with pytest.raises(HostFallbackError) as raised:
        compiled(run_without_host_fallbacks)(rows())
    message = str(raised.value)
    assert "1 of the model's operators" in message
    assert "aten::lgamma, used by module 'blocks.1' (Gamma)" in message
    assert "on_host_fallback='warn'" in message


@FACTS
def it_is_found_again_in_another_graph() -> None:
    from graph_fsdp.runtime.xla.host_fallbacks import HostFallbackError, run_without_host_fallbacks

    torch.lgamma(rows() + 1)  # not the graph's
    for _ in range(2):
        torch._dynamo.reset()
        with pytest.raises(HostFallbackError, match="aten::lgamma"):
            compiled(run_without_host_fallbacks)(rows())


@FACTS
def it_is_a_warning_on_request_and_the_numbers_are_right() -> None:
    from graph_fsdp.runtime.xla.host_fallbacks import run_without_host_fallbacks

    def run(graph: fx.GraphModule, *args: Any) -> Any:
        return run_without_host_fallbacks(graph, *args, on_host_fallback="warn")

    torch.manual_seed(0)
    model = compiled(run)
    x = rows().requires_grad_()
    with pytest.warns(UserWarning, match=r"aten::lgamma, used by module 'blocks.1' \(Gamma\)"):
        loss = model(x)
    with pytest.warns(UserWarning, match=r"aten::digamma, used by module 'blocks.1' \(Gamma\)"):
        loss.backward()
    torch.manual_seed(0)
    expected_x = rows().cpu().requires_grad_()
    expected = Model()(expected_x)
    expected.backward()
    torch.testing.assert_close(loss.detach().cpu(), expected.detach())
    torch.testing.assert_close(x.grad.cpu(), expected_x.grad)


@FACTS
def a_graph_of_what_xla_has_runs_without_a_word() -> None:
    import warnings

    from graph_fsdp.runtime.xla.host_fallbacks import run_without_host_fallbacks

    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.GELU()).to("xla"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run_without_host_fallbacks(graph, rows())
        result.sum().item()  # a read of a value on the host is none
        run_without_host_fallbacks(graph, rows())


@pytest.fixture(scope="module")
def failures() -> Failures:
    return FACTS.check_all()


@pytest.mark.parametrize("name", FACTS.names)
def test_host_fallbacks(failures: Failures, name: str) -> None:
    check(failures, name)
