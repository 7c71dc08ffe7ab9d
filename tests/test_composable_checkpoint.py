"""torch's composable ``checkpoint(module)`` under a compiled model."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from models import MLP, MLPBlock
from printed import calls
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import graph_fsdp


def step(model: nn.Module) -> list[Tensor | None]:
    model(torch.randn(4, 16, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    return [p.grad for p in model.parameters()]


def checkpointed(**options: Any) -> nn.Module:
    model = MLP()
    for block in model.blocks:
        checkpoint(block, **options)
    return model


def save_products() -> Any:
    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(("options", "products"), [({}, 2), ({"context_fn": save_products}, 0)])
def test_backward_recomputes_what_the_user_has_checkpointed(options: dict[str, Any], products: int) -> None:
    model = graph_fsdp.compile(checkpointed(**options), backend="eager")
    step(model)
    backward = graph_fsdp.inspect(model).backward
    assert len(calls(backward, "gelu", stage="partition").splitlines()) == 2, "one for each block"
    assert len(calls(backward, "addmm", stage="partition").splitlines()) == products


def test_gradients_are_those_of_the_plain_model() -> None:
    torch.manual_seed(0)
    plain = checkpointed()
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    for found, expected in zip(step(model), step(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    model.blocks[0](torch.randn(2, 16)).sum().backward()  # type: ignore[index]


def test_a_forward_that_is_patched_on_the_class_is_checkpointed() -> None:
    torch.manual_seed(0)
    plain = checkpointed()
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    for forward in (MLPBlock.forward, lambda self, x: x - self.down(self.up(x)), MLPBlock.forward):
        with mock.patch.object(MLPBlock, "forward", forward):
            plain.zero_grad()
            model.zero_grad()
            for found, expected in zip(step(model), step(plain), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert len(graph_fsdp.inspect(model).captures) == 2


def test_it_is_applied_before_compile() -> None:
    model: Any = graph_fsdp.compile(MLP(), backend="eager")
    with pytest.raises(graph_fsdp.UnsupportedError, match=r"call it before graph_fsdp\.compile, or pass activation_ch"):
        checkpoint(model.blocks[0])


@pytest.mark.usefixtures("fake_group")
def test_a_model_that_is_refused_keeps_its_checkpoints() -> None:
    model: Any = checkpointed()
    with pytest.raises(graph_fsdp.CheckpointError):
        graph_fsdp.compile(model, backend="eager", checkpoint="no such file")
    assert not any("forward" in vars(block) for block in model.blocks)
    graph_fsdp.compile(model, backend="eager")
    step(model)
    assert len(calls(graph_fsdp.inspect(model).backward, "gelu", stage="partition").splitlines()) == 2
