"""Programs with constants, complex numbers and so on are kept, and found for equal ones alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDTH
from programs import ROWS, start
from torch import Tensor, nn, tensor
from torch.fx import Graph, GraphModule
from torch.nn.functional import group_norm

from graph_fsdp import compat
from graph_fsdp.passes.ir.portable import Names
from graph_fsdp.programs.folder import Folder
from graph_fsdp.programs.key import graph_lines
from graph_fsdp.programs.plain import Unknown
from graph_fsdp.programs.program import KeptProgram

pytestmark = pytest.mark.usefixtures("fake_group")

Function = Callable[[Tensor], Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "programs"


class Between(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def scaled(number: float) -> Function:
    return lambda x: x * tensor(number)


def typed(dtype: torch.dtype) -> Function:
    return lambda x: x * tensor([2] * WIDTH, dtype=dtype)


def picked(*columns: int) -> Function:
    return lambda x: x[:, [*columns]].sum(1, keepdim=True) + x


def shaped(*rows: float) -> Function:
    return lambda x: x * tensor([[row] for row in rows])


def turned(factor: complex) -> Function:
    return lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * factor).flatten(-2)


def turned_by_angles(step: float) -> Function:
    """As rotary embeddings do. The backward multiplies by a view that is conjugated when it is read."""

    def turn(x: Tensor) -> Tensor:
        angles = torch.arange(WIDTH // 2) * step
        return torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(WIDTH // 2), angles)
        ).flatten(-2)

    return turn


def part(name: str) -> Function:
    return {"real": lambda x: torch.fft.fft(x).real, "imag": lambda x: torch.fft.fft(x).imag}[name]


VALUES: dict[str, tuple[Function, Function]] = {
    "a number": (scaled(2.0), scaled(3.0)),
    "zeros of two signs": (lambda x: x / tensor(0.0), lambda x: x / tensor(-0.0)),
    "a number that is none": (scaled(float("nan")), scaled(float("inf"))),
    "a dtype": (typed(torch.float32), typed(torch.bfloat16)),
    "truths": (
        lambda x: x.masked_fill(tensor([True, False] * (WIDTH // 2)), 0.5),
        lambda x: x.masked_fill(tensor([False, True] * (WIDTH // 2)), 0.5),
    ),
    "a list of indices": (picked(0, 1), picked(0, 2)),
    "a shape": (shaped(1.0), shaped(*[1.0] * ROWS)),
    "nothing": (lambda x: x + tensor([]).sum(), lambda x: x + tensor([[]]).sum()),
    "a complex number": (turned(1 + 2j), turned(1 - 2j)),
    "a conjugated view": (turned_by_angles(0.5), turned_by_angles(0.25)),
    "a number of groups": (lambda x: group_norm(x, 2), lambda x: group_norm(x, 4)),
    "an attribute": (part("real"), part("imag")),
}


def bits(values: list[Tensor]) -> list[list[int]]:
    return [value.detach().reshape(-1).view(torch.uint8).tolist() for value in values]


@pytest.mark.parametrize("what", VALUES)
def test_a_program_with_a_value_is_found_for_the_same_value_alone(folder: Path, what: str) -> None:
    function, other = VALUES[what]
    batch = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    plain, kept, found, others = (
        start(where, lambda given=given: Between(given), batch)
        for where, given in ((None, function), (folder, function), (folder, function), (folder, other))
    )
    assert [kept.found, found.found, others.found] == [False, True, False]
    assert bits([found.outputs, *found.gradients]) == bits([kept.outputs, *kept.gradients])
    assert bits([kept.outputs, *kept.gradients]) == bits([plain.outputs, *plain.gradients])


def test_a_layer_reads_its_own_constant(folder: Path) -> None:
    """Regions that differ in constants alone have one key in the file."""
    model = lambda: nn.Sequential(*(Between(scaled(number)) for number in (2.0, 3.0, 5.0, 7.0)))  # noqa: E731
    kept, found = (start(folder, model, reshard_after_forward=True) for _ in range(2))
    assert found.found
    assert bits([found.outputs, *found.gradients]) == bits([kept.outputs, *kept.gradients])


def test_a_graph_within_a_program_is_not_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def either(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))

    with caplog.at_level(logging.INFO, "graph_fsdp"):
        start(folder, lambda: Between(either))
    assert "is not kept for later starts: true_graph_0 is a graph within it" in caplog.text


def test_a_large_constant_is_not_kept(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr("graph_fsdp.passes.ir.portable.LARGEST_CONSTANT", 4)
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        start(folder, lambda: Between(typed(torch.float32)))
    assert f"_tensor_constant0 is a constant of {4 * WIDTH} bytes" in caplog.text
    assert not list(folder.glob("*.json"))


# What is read


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "too few bytes": lambda constants: constants["_tensor_constant0"].__setitem__(0, "AAA="),
    "no bytes": lambda constants: constants["_tensor_constant0"].__setitem__(0, "*"),
    "no dtype": lambda constants: constants["_tensor_constant0"].__setitem__(1, "strided"),
    "another shape": lambda constants: constants["_tensor_constant0"].append(7),
    "no device": lambda constants: constants["_tensor_constant0"].__setitem__(2, "nowhere"),
    "a device of others": lambda constants: constants["_tensor_constant0"].__setitem__(2, "meta"),
    "no constant": lambda constants: constants.clear(),
    "code": lambda constants: constants.update({"a; exit()": constants["_tensor_constant0"]}),
    "a word of Python": lambda constants: constants.update({"lambda": constants["_tensor_constant0"]}),
    "a method": lambda constants: constants.update({"forward": constants["_tensor_constant0"]}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_constant_is_not_read(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    start(folder, lambda: Between(scaled(2.0)))
    read = Folder.read

    def broken(self: Folder, key: dict[str, str]) -> Any:
        data = read(self, key)
        assert data is not None
        BROKEN[what](data["graphs"][0]["constants"])
        return json.loads(json.dumps(data))

    monkeypatch.setattr(Folder, "read", broken)
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        assert not start(folder, lambda: Between(scaled(2.0))).found
    assert "cannot be used" in caplog.text


def test_a_constant_has_its_bytes_when_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[KeptProgram] = []
    from_data = KeptProgram.from_data.__func__  # type: ignore[attr-defined]

    def noting(cls: type[KeptProgram], *given: Any) -> KeptProgram:
        read.append(from_data(cls, *given))
        return read[-1]

    monkeypatch.setattr(KeptProgram, "from_data", classmethod(noting))
    for _ in range(2):
        start(folder, lambda: Between(typed(torch.bfloat16)))
    for graph in read[0].graphs:
        constant = dict(graph.module.named_buffers())["_tensor_constant0"]
        assert type(constant) is Tensor and constant.dtype is torch.bfloat16 and constant.tolist() == [2.0] * WIDTH


# Attributes, which Dynamo's graph has by a name alone


class Standing:
    """Takes the place of an attribute, and has no code of a function."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return instance


def lines_with(attribute: str) -> list[str]:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(getattr, (x, attribute)),))
    return list(graph_lines(GraphModule({}, graph), Names({}, torch.device("cpu"))))


def test_an_attribute_is_known_where_it_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_with("mT") != lines_with("mH")
    for made in (Standing(), 2.0, property(lambda x: x)):
        for name in ("mine", "mT"):
            monkeypatch.setattr(torch.Tensor, name, made, raising=False)
            with pytest.raises(Unknown, match=f"the attribute {name}, which is not one of torch.Tensor's own"):
                lines_with(name)
            monkeypatch.undo()


def test_a_function_in_the_place_of_pythons_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def divmod(a: Any, b: Any) -> Any:
        return a, b

    assert compat.name_of_function(max) == "builtins.max"
    divmod.__module__, divmod.__qualname__ = "builtins", "divmod"
    monkeypatch.setattr("builtins.divmod", divmod)
    found = compat.name_of_function(divmod)
    assert found is None or not compat.is_torchs(divmod)
