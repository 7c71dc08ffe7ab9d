"""``torch.func.functional_call`` of a compiled model and of modules in it: values of the caller's, for one call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import MLP
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import graph_fsdp
from graph_fsdp import ParameterChangedError


def compiled() -> Any:
    torch.manual_seed(0)
    return graph_fsdp.compile(MLP(), backend="eager")


def local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def values(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: local(p) for name, p in parameters.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def a_model_is_called_with_other_parameters(model: Any) -> None:
    given = {name: nn.Parameter(p.detach() * 1.5) for name, p in model.named_parameters()}
    before, wanted, x = values(dict(model.named_parameters())), values(given), torch.ones(4, 16)
    plain = model(x).detach().clone()
    for _ in range(2):
        found = functional_call(model, given, (x,))
        found.sum().backward()
        assert_equal(values(dict(model.named_parameters())), before)
        assert not torch.equal(found, plain)
        assert torch.equal(model(x), plain)
        assert_equal(values(given), wanted)
    assert all(p.grad is not None for p in given.values())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_keeps_its_values_and_the_given_ones_get_gradients() -> None:
    a_model_is_called_with_other_parameters(compiled())


@pytest.mark.usefixtures("fake_group")
def test_shards_keep_their_values() -> None:
    a_model_is_called_with_other_parameters(compiled())


@pytest.mark.usefixtures("fake_group")
def test_what_is_no_parameter_is_refused_and_changes_nothing() -> None:
    model = compiled()
    before = values(dict(model.named_parameters()))
    given = {name: p.detach() * 2 for name, p in model.named_parameters()}
    with pytest.raises(ParameterChangedError, match=r"replaced by DTensor .*functional_call of a compiled model takes"):
        functional_call(model, given, (torch.ones(4, 16),))
    assert_equal(values(dict(model.named_parameters())), before)
    model(torch.ones(4, 16))


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_module_in_no_unit_runs_with_whole_values(is_parameter: bool) -> None:
    model, x = compiled(), torch.ones(4, 16)
    plain = copy.deepcopy(MLP().head)
    given = {name: p.detach() * 2 for name, p in plain.named_parameters()}
    given = {name: nn.Parameter(p) if is_parameter else p.requires_grad_() for name, p in given.items()}
    for _ in range(2):
        found = functional_call(model.head, given, (x,))
        assert torch.equal(found, functional_call(plain, given, (x,)))
        found.sum().backward()
        model(x).sum().backward()
        model.head(x)
    assert all(p.grad is not None for p in given.values())


@pytest.mark.usefixtures("fake_group")
def test_parameters_that_were_replaced_keep_their_values() -> None:
    model = compiled()
    held = dict(model.named_parameters())
    before = values(held)
    model.load_state_dict({name: p.detach() * 2 for name, p in held.items()}, assign=True)
    model(torch.ones(4, 16))
    assert_equal(values(held), before)
    assert_equal(values(dict(model.named_parameters())), {name: 2 * value for name, value in before.items()})
