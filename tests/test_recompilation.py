"""Each captured graph says why it was captured: the guard that failed, or the setting that changed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import mostly_long
from models import MLP
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import register_fsdp_forward_method

import graph_fsdp
from graph_fsdp.engine.recompilation import Cause
from graph_fsdp.passes.ir import fake_values


class Gated(nn.Module):
    """Dropout makes its graph depend on ``training``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(2))

    def forward(self, x: Tensor, *, scale: int = 1, mask: Tensor | None = None) -> Tensor:
        x = x.to(self.layers[0][0].weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return x * scale if mask is None else x * mask


def causes(model: nn.Module) -> list[Cause]:
    return [capture.cause for capture in graph_fsdp.inspect(model).captures]


def compiled(**options: Any) -> Any:
    model = graph_fsdp.compile(Gated(), backend="eager", **options)
    model(torch.ones(4, 16))
    return model


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], tuple[str, ...]]] = {
    "batch size": (
        lambda m: m(torch.ones(6, 16)),
        ("tensor 'x' size mismatch at index 0. expected 4, actual 6", "x is float32[6, 16] now"),
    ),
    "evaluation": (lambda m: m.eval()(torch.ones(4, 16)), ("self.layers.0.1.training == True",)),
    "no gradients": (lambda m: torch.no_grad()(m)(torch.ones(4, 16)), ("grad_mode",)),
    "dtype": (
        lambda m: m(torch.ones(4, 16, dtype=torch.bfloat16)),
        ("tensor 'x' dtype mismatch. expected Float, actual BFloat16", "x is bfloat16[4, 16] now"),
    ),
    "requires_grad": (lambda m: m(torch.ones(4, 16).requires_grad_()), ("tensor 'x' requires_grad mismatch",)),
    "another argument": (lambda m: m(torch.ones(4, 16), scale=3), ("kwargs",)),
}


@pytest.mark.parametrize("change", mostly_long(CHANGES, ("batch size", "evaluation", "another argument")))
def test_a_recompilation_names_the_guard_that_failed(fake_group: None, change: str) -> None:
    act, expected = CHANGES[change]
    with torch.set_grad_enabled(change in ("no gradients", "requires_grad")):
        model = compiled(dynamic=False)
        act(model)
    first, second = causes(model)
    assert (first.kind, str(first), first.guards) == ("first", "first call", ())
    assert second.kind == "guard" and [guard.graph for guard in second.guards] == [0]
    for part in expected:
        assert part in str(second)
    assert "args[" not in str(second) and "L['" not in str(second)


class Counting(nn.Module):
    """Has numbers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.kinds = nn.Linear(16, 16), 0, ""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) / self.calls


class Naming(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.kinds += "a"
        return self.linear(x) * len(self.kinds)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_counter_in_a_module_has_two_graphs(fake_group: None, backend: str) -> None:
    model: Any = graph_fsdp.compile(Counting(), backend=backend)
    x = torch.ones(4, 16)
    first = model(x).detach()
    for calls in range(2, 12):
        found = model(x)
        found.sum().backward()
        torch.testing.assert_close(found * calls, first)
    assert model.calls == 11 and [cause.kind for cause in causes(model)] == ["first", "guard"]
    assert "self.calls == 0" in str(causes(model)[1])
    body = graph_fsdp.inspect(model).forward.stages["partition"].body
    assert "add = primals_1 + 1" in body and "div.Tensor(addmm, add)" in body


class EveryOther(nn.Module):
    """The size of its weight is an expression of the input's size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2] @ self.weight


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_gradients_of_symbolic_sizes_have_those_of_their_parameters(fake_group: None, backend: str) -> None:
    model: Any = graph_fsdp.compile(EveryOther(), backend=backend, dynamic=True)
    for rows in (2, 3):
        model(torch.ones(rows, 16)).sum().backward()
    assert model.weight.grad.shape == (8, 4) and len(causes(model)) == 1
    assert " reduce " in str(graph_fsdp.inspect(model).backward)


def test_a_model_that_is_traced_too_often_says_what_changed(fake_group: None) -> None:
    model = graph_fsdp.compile(Naming(), backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(graph_fsdp.GraphBreakError) as caught:
        for _ in range(3):
            model(torch.ones(4, 16))
    assert "has traced the model 2 times" in str(caught.value)
    assert "The last time: a guard of graph 0 failed: self.kinds == ''" in str(caught.value)


def test_torchs_limit_of_eight_graphs_is_a_warning_and_ends_no_training(fake_group: None) -> None:
    model = graph_fsdp.compile(Naming(), backend="eager")
    with pytest.warns(UserWarning, match="has traced the model 8 times, and compiles one more") as caught:
        for call in range(10):
            model(torch.ones(4, 16)).sum().backward()
            assert len(caught) == (call >= 8)
    assert "The last time: a guard of graph 6 failed: self.kinds == '" in str(caught[0].message)
    assert "raise the limit" not in str(caught[0].message) and len(causes(model)) == 10
    too_often = pytest.raises(graph_fsdp.GraphBreakError, match="has traced the model 10 times and gives up")
    with torch._dynamo.config.patch(accumulated_recompile_limit=10), too_often:
        model(torch.ones(4, 16))


@torch.no_grad()
def test_the_guards_of_all_earlier_graphs_are_named_the_last_that_ran_first(fake_group: None) -> None:
    model = graph_fsdp.compile(Gated(), backend="eager", dynamic=False)
    for rows in (4, 6, 8):
        model(torch.ones(rows, 16))
    third = causes(model)[2]
    assert [(guard.graph, guard.guard.split(". ")[1]) for guard in third.guards] == [
        (1, "expected 6, actual 8"),
        (0, "expected 4, actual 8"),
    ]
    assert str(third).startswith("a guard of graph 1 failed: tensor 'x' size mismatch"), str(third)


@torch.no_grad()
def test_a_guard_says_which_line_wanted_it(fake_group: None) -> None:
    model = compiled()
    model.eval()(torch.ones(4, 16))
    (guard,) = causes(model)[1].guards
    assert guard.where is not None and "dropout.py:" in guard.where and guard.where.endswith(" in forward")


@torch.no_grad()
def test_keyword_inputs_have_their_names(fake_group: None) -> None:
    model = graph_fsdp.compile(Gated(), backend="eager", dynamic=False)
    model(torch.ones(4, 16), mask=torch.ones(4, 16))
    model(torch.ones(4, 16), mask=torch.ones(1, 16))
    cause = causes(model)[1]
    assert "tensor 'mask' size mismatch at index 0. expected 4, actual 1" in str(cause)
    assert "mask is float32[1, 16] now" in str(cause) and "x is" not in str(cause)


class Attributes(nn.Module):
    """Its attributes and inputs have names of Dynamo's words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.args = nn.Linear(16, 16), [1.5]

    def forward(self, x: Tensor, size: float = 2.0) -> Tensor:
        return self.linear(x) * self.args[0] * size


@torch.no_grad()
def test_attributes_and_words_of_dynamo_are_not_taken_for_inputs(fake_group: None) -> None:
    model: Any = graph_fsdp.compile(Attributes(), backend="eager", dynamic=False)
    model(torch.ones(4, 16), 2.0)
    model.args[0] = 2.5
    model(torch.ones(4, 16), 2.0)
    model(torch.ones(6, 16), 2.0)
    _, second, third = causes(model)
    assert str(second).startswith("a guard of graph 0 failed: self.args[0] == 1.5"), str(second)
    assert str(third).endswith("x is float32[6, 16] now") and "size is" not in str(third)


class Exchanging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(7))
        self.active = self.experts[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.active(x)


@torch.no_grad()
def test_programs_for_exchanged_modules_are_no_traces(fake_group: None, recwarn: pytest.WarningsRecorder) -> None:
    model: Any = graph_fsdp.compile(Exchanging(), backend="eager", dynamic=False)
    for expert in model.experts:
        model.active = expert
        model(torch.ones(4, 16))
    for rows in (6, 8):
        model(torch.ones(rows, 16))
    kinds = [cause.kind for cause in causes(model)]
    assert kinds == ["first", *["parameters"] * 6, "guard", "guard"]
    assert [guard.graph for guard in causes(model)[-1].guards] == [7, 0], "graphs that Dynamo has guards of"
    assert not [w for w in recwarn if "has traced the model" in str(w.message)]


def test_a_changed_setting_is_the_cause(fake_group: None) -> None:
    model = compiled()
    model.set_requires_gradient_sync(False)
    model(torch.ones(4, 16))
    cause = causes(model)[1]
    assert cause.kind == "settings" and cause.guards == ()
    assert str(cause).startswith("settings changed: unsynced from [] to ['', ")


class WithMethod(Gated):
    def score(self, x: Tensor) -> Tensor:
        return self.forward(x).mean()


@torch.no_grad()
def test_each_method_has_a_first_call(fake_group: None) -> None:
    model: Any = graph_fsdp.compile(WithMethod(), backend="eager")
    register_fsdp_forward_method(model, "score")
    model(torch.ones(4, 16))
    model.score(torch.ones(4, 16))
    assert list(map(str, causes(model))) == ["first call", "first call of score"]


class Broken(Gated):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1](x)


@torch.no_grad()
def test_the_pieces_of_a_broken_graph(fake_group: None) -> None:
    model = graph_fsdp.compile(Broken(), backend="eager", fullgraph=False)
    model(torch.ones(4, 16))
    model(torch.ones(6, 16))
    found = causes(model)
    assert [cause.kind for cause in found] == ["first", "piece", "guard", "guard"]
    assert [cause.guards[0].graph for cause in found[2:]] == [0, 1], "of the same piece"


@torch.no_grad()
def test_an_emptied_cache_is_the_cause(fake_group: None) -> None:
    model = compiled()
    torch._dynamo.reset()
    model(torch.ones(4, 16))
    assert causes(model)[1].kind == "reset"


@torch.no_grad()
def test_two_models_know_nothing_of_each_other(fake_group: None) -> None:
    model, other = compiled(), compiled()
    other(torch.ones(6, 16))
    assert [[c.kind for c in causes(m)] for m in (model, other)] == [["first"], ["first", "guard"]]


@torch.no_grad()
def test_a_cause_keeps_neither_the_inputs_nor_the_model(fake_group: None) -> None:
    model = compiled()
    x = torch.ones(6, 16)
    model(x)
    found, alive = causes(model), [weakref.ref(x), weakref.ref(model)]
    del model, x
    gc.collect()
    assert [ref() for ref in alive] == [None, None] and len(found) == 2


@torch.no_grad()
def test_the_printed_report_has_the_cause(fake_group: None) -> None:
    model = graph_fsdp.compile(MLP(depth=1), backend="eager")
    for rows in (4, 6):
        model(torch.ones(rows, 16))
    text = str(graph_fsdp.inspect(model))
    assert "graph 1" in text and "expected 4, actual 6" in text


def test_further_lengths_cost_as_many_graphs_as_with_torch_compile(fake_group: None) -> None:
    counter = CompileCounterWithBackend("eager")
    model, plain = graph_fsdp.compile(MLP(depth=1), backend="eager"), torch.compile(MLP(depth=1), backend=counter)
    own, theirs = [], []
    for length in (8, 12, 16, 20):
        model(torch.ones(length, 16)).sum().backward()
        plain(torch.ones(length, 16)).sum().backward()
        own.append(len(causes(model)))
        theirs.append(counter.frame_count)
    assert own == theirs == [1, 2, 2, 2]


def test_sizes_that_change_under_one_setting_are_symbolic_under_others(fake_group: None) -> None:
    model = graph_fsdp.compile(MLP(depth=1), backend="eager")
    for synced in (True, False):
        model.set_requires_gradient_sync(synced)
        for length in (8, 12, 16):
            model(torch.ones(length, 16)).sum().backward()
    assert [cause.kind for cause in causes(model)] == ["first", "guard", "settings"]
    bodies = [capture.stages["forward"]["partition"].body for capture in graph_fsdp.inspect(model).captures]
    assert ["primals_8" in body for body in bodies] == [False, True, True], "the length is an input beside the others"


def test_an_equal_model_runs_no_call_of_its_passes_again_and_times_no_guards(
    fake_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[str] = []
    evaluate, timed = fake_values.evaluate, "profile_guard_manager"
    monkeypatch.setattr(fake_values, "evaluate", lambda node: (run.append(str(node.target)), evaluate(node))[1])
    if hasattr(torch._dynamo.guards, timed):
        monkeypatch.setattr(torch._dynamo.guards, timed, lambda *_: run.append(timed) or 0.0)
    for _ in range(2):
        run.clear()
        graph_fsdp.compile(MLP(depth=1), backend="eager")(torch.ones(4, 16)).sum().backward()
    assert [name for name in run if name.startswith(("aten", "prims")) or name == timed] == []


class Clamped(nn.Module):
    """Its code after the break is compiled once, for whichever of these modules runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, low: float) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(x).clamp(min=low)


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x + 1


class AroundAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = Clamped(), Between(), Clamped()

    def forward(self, x: Tensor, low: float) -> Tensor:
        x = self.first(x, low)
        return x if low > 0 else self.last(self.between(x), low)


def test_code_with_a_float_that_became_constant_runs_with_other_parameters() -> None:
    plain, x = AroundAnother(), torch.randn(2, 4, requires_grad=True)
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager", fullgraph=False)
    for low in (0.5, -0.25, -0.5):
        torch.testing.assert_close(model(x, low), plain(x, low))
