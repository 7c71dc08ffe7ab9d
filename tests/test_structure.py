"""What changes in a model after ``compile``: modules, parameters, hooks. All of it counts, or is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import fake_process_group
from facts import Facts
from marks import mostly_long
from reference import fsdp2
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp.errors import GraphBreakError, ParameterChangedError

FACTS = Facts(__name__)


class Model(nn.Module):
    """A unit for each block; the head, tied to the input, in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.inner.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def compiled(**options: Any) -> Any:
    torch.manual_seed(0)
    return graph_fsdp.compile(Model(), backend="eager", **options)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


Change = Callable[[Any], Any]
REFUSED: dict[str, tuple[Change, str]] = {
    "a module": (
        lambda m: setattr(m, "head", nn.Linear(4, 4)),
        "'head.weight', 'head.bias' (the first of module 'head'",
    ),
    "in a container": (lambda m: m.blocks.append(nn.Linear(4, 4)), "'blocks.2.weight', 'blocks.2.bias'"),
    "before others": (lambda m: m.blocks.insert(0, nn.Linear(4, 4)), "'blocks.0.weight'"),
    "in a unit": (lambda m: m.blocks[0].__setitem__(0, nn.Linear(4, 4)), "of module 'blocks.0.0' (Linear)"),
    "in a leaf": (lambda m: setattr(m.head, "adapter", nn.Linear(4, 4)), "'head.adapter.weight'"),
    "a parameter": (
        lambda m: setattr(m, "gain", nn.Parameter(torch.ones(1))),
        "parameter 'gain' of the model itself was",
    ),
    "register_parameter": (lambda m: m.blocks[1].register_parameter("b", nn.Parameter(torch.ones(1))), "'blocks.1.b'"),
    "a bias that was none": (lambda m: setattr(m.inner, "bias", nn.Parameter(torch.ones(4))), "'inner.bias'"),
    "a parameter that is tied": (lambda m: setattr(m, "more", m.blocks[0][0].weight), "other modules: tie parameters"),
    "a plain parameter": (lambda m: setattr(m.head, "bias", nn.Parameter(torch.ones(4))), "'head.bias' was replaced"),
    "an untied one": (
        lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(4, 4))),
        "tied to 'weight' of a Linear",
    ),
    "no parameter": (lambda m: setattr(m.head, "bias", None), "'head.bias' was removed from its module"),
    "data": (lambda m: setattr(m.head.bias, "data", torch.ones(4)), ".data of parameter 'head.bias' was assigned"),
    "data of a DTensor": (lambda m: setattr(m.head.bias, "data", m.head.bias.data + 1), "parameter.copy_ of a DTensor"),
    "no memory": (lambda m: m.to_empty(device="meta"), "on meta now"),
}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_train_as_the_rest_is_an_error_at_the_next_call(name: str) -> None:
    change, words = REFUSED[name]
    model = compiled()
    change(model)
    with pytest.raises(ParameterChangedError) as raised:
        model(torch.ones(2, 4))
    assert words in str(raised.value)


@pytest.mark.usefixtures("fake_group")
def test_a_model_goes_on_where_the_change_was_taken_back() -> None:
    model = compiled()
    head, before = model.head, model.blocks[0][0].weight.to_local().clone()
    model.head = nn.Linear(4, 4)
    with pytest.raises(ParameterChangedError):
        model(torch.ones(2, 4))
    model.head = head
    model.blocks[0][0].weight.data = torch.zeros(4, 4)
    with pytest.raises(ParameterChangedError):
        model(torch.ones(2, 4))
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert torch.equal(model.blocks[0][0].weight.to_local(), before)


def test_what_is_not_trained_may_come_go_and_move() -> None:
    model, x = compiled(), torch.randn(2, 4)
    changes: list[Change] = [
        lambda m: (m.blocks.insert(1, frozen(nn.Linear(4, 4))), setattr(m, "scale", torch.tensor(3.0))),
        lambda m: (setattr(m, "blocks", nn.ModuleList(reversed(m.blocks))), setattr(m, "head", nn.Identity())),
        lambda m: m.eval().blocks.requires_grad_(False),
    ]
    reference = Model()
    reference.load_state_dict(model.state_dict())
    for change in changes:
        for each in (model, reference):
            torch.manual_seed(1)
            change(each)
            each.zero_grad()
            each(x).sum().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or torch.equal(p.grad, q.grad), name
    model.blocks.requires_grad_(True)
    with pytest.raises(ParameterChangedError, match=r"'blocks\.1\.weight'"):
        model(x)


# --- hooks


def doubles(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def adds(module: nn.Module, args: Any) -> tuple[Tensor]:
    return (args[0] + 1,)


@pytest.mark.parametrize("fullgraph", mostly_long([True, False], [True]))
def test_hooks_fire_that_were_added_after_the_first_call_until_they_are_removed(fullgraph: bool) -> None:
    model, x = compiled(fullgraph=fullgraph), torch.randn(2, 4)
    reference = Model()
    reference.load_state_dict(model.state_dict())

    def same() -> bool:
        with torch.no_grad():
            return torch.equal(model(x), reference(x))

    assert same()
    handles = [m.blocks[0][0].register_forward_hook(doubles) for m in (model, reference)]
    assert same()
    handles += [m.blocks[1].register_forward_pre_hook(adds) for m in (model, reference)]
    assert same()
    captures = len(graph_fsdp.inspect(model).captures)
    for handle in handles:
        handle.remove()
    assert same() and len(graph_fsdp.inspect(model).captures) == captures, "the graphs from before were kept"
    causes = [capture.cause.kind for capture in graph_fsdp.inspect(model).captures]
    assert causes == ["first", "hooks", "guard"]


def test_a_full_backward_hook_fires_outside_of_graphs_and_is_an_error_in_one() -> None:
    whole, pieces = compiled(), compiled(fullgraph=False)
    x, seen = torch.randn(2, 4), []
    for model in (whole, pieces):
        model(x)
    reference = Model()
    reference.load_state_dict(pieces.state_dict())
    for model in (whole, pieces, reference):
        model.blocks[0][0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    with pytest.raises(GraphBreakError, match=r"a full backward hook of module 'blocks.0.0': .*fullgraph=False"):
        whole(x)
    with pytest.warns(UserWarning, match="code outside of graphs"):
        pieces(x).sum().backward()
    reference(x).sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)


def test_parameters_whose_names_begin_with_a_digit_are_read_outside_of_graphs() -> None:
    inside = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))  # of a unit: else the frame of its forward is a graph
    model = graph_fsdp.compile(inside, auto_wrap_policy={nn.Sequential}, backend="eager", fullgraph=False)
    model[0][0].register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.warns(UserWarning, match="reads parameter '0.0.weight'"):
        model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model[0][0].bias.grad, torch.full((4,), 2.0))


def test_a_hook_that_cannot_be_traced_or_is_traced_anew_in_each_call_is_named() -> None:
    model, kept = compiled(), []
    handle = model.head.register_forward_hook(lambda module, args, output: print(output.sum().tolist()))
    with pytest.raises(GraphBreakError, match="Traced with the model: a forward hook of module 'head'"):
        model(torch.ones(2, 4))
    handle.remove()
    model.head.register_forward_hook(lambda module, args, output: kept.append(output.shape))
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        model(torch.ones(2, 4))
        with pytest.raises(GraphBreakError, match=r"a forward hook of module 'head': .*a key of a dict"):
            model(torch.ones(2, 4))


# --- models that have nothing to shard


def test_a_model_without_parameters_runs_and_reports() -> None:
    with fake_process_group():
        model = graph_fsdp.compile(nn.MSELoss(), backend="eager", auto_wrap_policy={nn.Linear})
        x = torch.ones(2, 4, requires_grad=True)
        model(x, torch.zeros(2, 4)).backward()
        assert torch.equal(x.grad, torch.full((2, 4), 0.25))
        assert "0 parameters in 0 buckets" in str(graph_fsdp.inspect(model))


def test_a_model_without_forward_says_so_as_any_module() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4)

    with pytest.raises(NotImplementedError, match="forward"):
        graph_fsdp.compile(Parts(), backend="eager")(torch.ones(1, 4))


# --- on ranks


def _pair() -> tuple[Any, Any]:
    """Ours and FSDP2's of the same model."""
    model = compiled()
    torch.manual_seed(0)
    return model, fsdp2(Model())


def _equal_steps(model: Any, fsdp2: Any) -> None:
    x = torch.full((2, 4), float(dist.get_rank() + 1))
    for each in (model, fsdp2):
        each.zero_grad()
        each(x).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), fsdp2.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local()), name


@FACTS
def hooks_and_modules_that_go_are_taken_up_as_by_fsdp2() -> None:
    model, fsdp2 = _pair()
    _equal_steps(model, fsdp2)
    handles = [m.blocks[0][0].register_forward_hook(doubles) for m in (model, fsdp2)]
    _equal_steps(model, fsdp2)
    for m, handle in zip((model, fsdp2), handles, strict=True):
        handle.remove()
        m.blocks[1][0] = nn.Identity()
    seen: dict[str, Tensor] = {}
    if dist.get_rank() == 0:  # a hook of one rank changes no collective
        model.blocks[0].register_forward_hook(lambda module, args, output: seen.update(out=output.detach()))
    _equal_steps(model, fsdp2)
    assert len(seen) == (1 if dist.get_rank() == 0 else 0)


@FACTS
def a_forward_that_is_patched_on_a_class_is_followed_as_by_fsdp2() -> None:
    model, fsdp2 = _pair()
    _equal_steps(model, fsdp2)
    for patched in (Model, nn.Linear):  # the model's class, and one of modules in it
        forward = patched.forward
        with mock.patch.object(patched, "forward", lambda self, x, forward=forward: forward(self, x) * 2):
            _equal_steps(model, fsdp2)
        _equal_steps(model, fsdp2)
    assert [capture.cause.kind for capture in graph_fsdp.inspect(model).captures] == ["first", "forward", "forward"]


@FACTS
def a_module_that_comes_is_an_error_on_all_ranks() -> None:
    model = compiled()
    model.head = nn.Linear(4, 4)
    try:
        model(torch.ones(2, 4))
    except ParameterChangedError as error:
        assert "'head.weight'" in str(error)
    else:
        raise AssertionError("it trains")


test_on_two_ranks = FACTS.on(2)
