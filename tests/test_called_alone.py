"""Modules that are in no unit, called by themselves: their graphs, on 8 ranks, and what they stay. (Numbers:
test_units_ranks.py.)"""

from __future__ import annotations

import copy
import functools
import io
from abc import ABC
from typing import Any, Generic, TypeVar

import pytest
import torch
from expecttest import assert_expected_inline
from marks import FAKE_GROUPS_REDUCE
from models import MLP
from printed import events
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrizations

import graph_fsdp

pytestmark = pytest.mark.usefixtures("fake_group")


def compiled(make: type[nn.Module] = MLP) -> Any:
    return graph_fsdp.compile(make(), backend="eager")


def test_a_head_is_gathered_and_its_gradient_reduced() -> None:
    model: Any = compiled()
    model.head(torch.randn(4, 16)).sum().backward()
    assert_expected_inline(
        events(graph_fsdp.inspect(model)),
        """\
forward: >root .root
backward: xroot -root""",
    )
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.weight", "head.bias"]


T = TypeVar("T")


class OfABC(ABC, nn.Linear):
    """Begins with a class that objects have no attributes from, which Python lays out otherwise than ``nn.Module``."""


class OfGeneric(Generic[T], nn.Linear): ...


@pytest.mark.parametrize("kind", [OfABC, OfGeneric])
def test_classes_that_begin_with_one_without_attributes(kind: type[nn.Linear]) -> None:
    def build(head: type[nn.Linear], block: type[nn.Linear]) -> Any:
        torch.manual_seed(0)
        layers = [*(block(16, 16) for _ in range(2)), head(16, 16)]
        return nn.Sequential(*layers)

    for head, block in ((kind, nn.Linear), (nn.Linear, kind)):
        found, expected = build(head, block), build(nn.Linear, nn.Linear)
        for model in (found, expected):
            graph_fsdp.compile(model, auto_wrap_policy=[*model[:2]], backend="eager")
            model(torch.ones(2, 16)).sum().backward()
            model[2](torch.ones(2, 16)).sum().backward()
            model[0](torch.ones(2, 16)).sum().backward()
        assert [isinstance(m, FSDPModule) for m in found.modules()] == [True, True, True, False]
        assert all(isinstance(m, nn.Linear) for m in found)
        for p, q in zip(found.parameters(), expected.parameters(), strict=True):
            assert p.grad is not None
            assert not FAKE_GROUPS_REDUCE or torch.equal(p.grad.to_local(), q.grad.to_local())
        assert type(copy.deepcopy(found[2])) is head


def test_a_model_whose_class_begins_with_one_without_attributes() -> None:
    class Model(Generic[T], MLP):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"own": super().state_dict(*args, **kwargs)}

    model: Any = compiled(Model)
    assert isinstance(model, Model) and isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPModel"
    model(torch.randn(4, 16)).sum().backward()
    assert [*model.state_dict()] == ["own"]

    class Later(type(model)):  # type: ignore[misc]
        pass

    assert Later.__mro__[1:] == type(model).__mro__


def test_within_the_model_it_is_traced_with_the_model() -> None:
    model: Any = compiled()
    model(torch.randn(4, 16)).sum().backward()
    model(torch.randn(4, 16)).sum().backward()
    assert len(graph_fsdp.inspect(model).graphs) == 1


def test_it_is_no_unit_and_has_the_name_of_its_class() -> None:
    model: Any = compiled()
    assert isinstance(model.head, nn.Linear)
    assert not isinstance(model.head, FSDPModule)
    assert repr(model.head) == repr(MLP().head)
    assert type(model.blocks[0].up) is nn.Linear, "of a unit"


def test_a_function_that_is_applied_sees_its_own_class() -> None:
    model: Any = compiled()
    seen = []

    def see(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            seen.append(module)

    assert model.apply(see) is model
    assert seen == [module for module in model.modules() if isinstance(module, nn.Linear)]
    with pytest.raises(ValueError, match="no"):
        model.apply(lambda module: (_ for _ in ()).throw(ValueError("no")))
    model.head(torch.randn(4, 16))


def test_what_is_copied_or_saved_is_of_its_own_class() -> None:
    head = compiled().head
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    for module in (copy.copy(head), copy.deepcopy(head), torch.load(file, weights_only=False)):
        assert type(module) is nn.Linear
        assert vars(module).keys() == vars(nn.Linear(1, 1)).keys() | vars(head).keys() - {"_graph_fsdp_called"}
        assert torch.equal(module.weight.to_local(), head.weight.to_local())


def test_a_forward_that_was_set_on_a_module_stays_there() -> None:
    class Doubling(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.head.forward = functools.partial(doubled, self.head)  # type: ignore[method-assign]

    model: Any = compiled(Doubling)
    assert type(model.head) is nn.Linear and "forward" in vars(copy.copy(model.head))
    model(torch.randn(4, 16)).sum().backward()


def doubled(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return 2 * nn.functional.linear(x, module.weight, module.bias)


def test_parametrized_modules_stay_what_they_are() -> None:
    class Normed(MLP):
        def __init__(self) -> None:
            super().__init__()
            parametrizations.weight_norm(self.head)

    model: Any = compiled(Normed)
    assert type(model.head) is not nn.Linear
    assert type(model.head).__bases__ == (nn.Linear,)
    model(torch.randn(4, 16)).sum().backward()
