"""Masks of attention that say no more than ``is_causal`` are left out; what is known of a mask is what it holds."""

from __future__ import annotations

import copy
import operator
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import SEQUENCE, VOCABULARY, bert, llama
from torch import Tensor, fx, nn

import graph_fsdp
from graph_fsdp.engine import full_masks
from graph_fsdp.passes import default_pipeline
from graph_fsdp.passes.analysis.affine import Affine, Value, is_always_true, is_causal
from graph_fsdp.passes.analysis.positions import positions, written_by_index

# torch 2.9 differentiates it otherwise where it is traced.
_CLOSE: dict[str, float] = {"rtol": 0, "atol": 0} if torch.__version__ >= (2, 11) else {"rtol": 2e-2, "atol": 1e-3}
_ATTENTION = re.compile(r"scaled_dot_product_attention\((.*?)\)[;\s]")


class Attention(nn.Module):
    """Attention of 4 heads of queries and 2 of keys, and a mask that a function makes for so many tokens."""

    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.mask, self.projection = mask, nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.projection(x).view(rows, tokens, 8, 8).transpose(1, 2).split([4, 2, 2], 1)
        k, v = (t[:, :, None, :, :].expand(rows, 2, 2, tokens, 8).reshape(rows, 4, tokens, 8) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, self.mask(tokens))
        return attended.transpose(1, 2).flatten(2)


def compared(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]


def triangle(tokens: int) -> Tensor:
    query, key = compared(tokens)
    return key <= query


def window(size: int) -> Callable[[int], Tensor]:
    def mask(tokens: int) -> Tensor:
        query, key = compared(tokens)
        return (key <= query) & (key > query - size)

    return mask


def written_into(tokens: int) -> Tensor:
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    mask[:, 0] = False
    mask[0, 0] = True
    return mask


def mapped(tokens: int) -> Tensor:
    """As transformers makes masks of several functions, beside code that writes by an index, as Jamba's."""
    indices = torch.arange(tokens)
    mask = torch.vmap(lambda query: torch.vmap(lambda key: key <= query)(indices))(indices)
    written = torch.zeros(1, dtype=torch.bool)
    written[0] = True
    return mask & written


def shifted(tokens: int) -> Tensor:
    query, key = compared(tokens)
    return key <= query + 1


def attention_calls(model: nn.Module, stage: str = "causal_attention") -> list[str]:
    """The arguments of attention in the graph that was captured last, without those of a checkpoint's graph."""
    body = graph_fsdp.inspect(model).captures[-1].views["capture"].stages[stage].body
    return _ATTENTION.findall(body)


def same_bits(plain: nn.Module, model: nn.Module, run: Callable[[nn.Module], Tensor]) -> None:
    """Loss and gradients of a compiled model without ranks are those of a plain one; nearly, with torch 2.9."""
    expected, found = run(plain), run(model)
    expected.backward()
    found.backward()
    assert torch.equal(found, expected)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        torch.testing.assert_close(q.grad, p.grad, **_CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (triangle, "is_causal = True, enable_gqa = True"),
        (lambda tokens: torch.ones(tokens, tokens, dtype=torch.bool).tril(), "is_causal = True, enable_gqa = True"),
        (window(9), "is_causal = True, enable_gqa = True"),
        (lambda tokens: torch.ones(tokens, tokens, dtype=torch.bool), "is_causal = False, enable_gqa = True"),
        (window(4), None),
        (written_into, None),
        (mapped, None),
        (shifted, None),
        (lambda tokens: ~triangle(tokens) | torch.eye(tokens, dtype=torch.bool), None),
        (lambda tokens: triangle(tokens).float().log(), None),
    ],
    ids=["triangle", "tril", "wide-window", "everything", "window", "written", "mapped", "shifted", "upper", "added"],
)
def test_a_mask_is_left_out_where_it_says_nothing_more(mask: Callable[[int], Tensor], said: str | None) -> None:
    torch.manual_seed(0)
    plain = Attention(mask)
    model = graph_fsdp.compile(Attention(mask), backend="eager")
    model.load_state_dict(plain.state_dict())
    x = torch.randn(3, 8, 8)
    torch.testing.assert_close(model(x), plain(x))
    (call,) = attention_calls(model)
    if said is None:
        assert "is_causal = True" not in call and "gqa" not in call
    else:
        assert call.endswith(f", attn_mask = None, {said}")
        stage = graph_fsdp.inspect(model).capture.stages["causal_attention"]
        assert not re.search("tril|<=|reshape\\(3, 4", stage.body)  # nothing makes a mask or repeats keys
    kept = graph_fsdp.compile(Attention(mask), backend="eager", passes=default_pipeline().remove("causal_attention"))
    kept(x)
    assert "is_causal = True" not in attention_calls(kept, "insert_gathers")[0]


def test_a_mask_for_more_rows_than_the_queries_have_stays() -> None:
    model = graph_fsdp.compile(Attention(lambda tokens: triangle(tokens).expand(3, 1, tokens, tokens)), backend="eager")
    assert model(torch.randn(1, 8, 8)).shape == (3, 8, 32)
    assert re.search("attn_mask = [a-z]|expand", attention_calls(model)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_model_has_the_bits_that_it_has_without_compilation(dtype: torch.dtype) -> None:
    """It leaves the mask out there, as it can look for several sequences in one row."""
    torch.manual_seed(0)
    plain = llama().to(dtype)
    model = graph_fsdp.compile(llama().to(dtype), backend="eager")
    model.load_state_dict(plain.state_dict())
    for tokens in (SEQUENCE, SEQUENCE - 3)[: 2 if dtype == torch.float32 else 1]:  # then with a symbolic length
        x = torch.randint(0, VOCABULARY, (4, tokens))
        same_bits(plain, model, lambda m, x=x: m(x, labels=x).loss)
        assert ["enable_gqa = True" in call for call in attention_calls(model)] == [True, True]


def test_transformers_model_has_its_bits_with_checkpoints() -> None:
    torch.manual_seed(0)
    made = [llama(), llama()]
    made[1].load_state_dict(made[0].state_dict())
    for model in made:
        model.train().gradient_checkpointing_enable()  # type: ignore[operator]
    x = torch.randint(0, VOCABULARY, (4, SEQUENCE))
    compiled = graph_fsdp.compile(made[1], backend="eager")
    same_bits(made[0], compiled, lambda m: m(x, labels=x).loss)
    summary = graph_fsdp.inspect(compiled).capture.stages["causal_attention"].summary
    assert summary == "2 masks of attention left out"


def test_a_mask_that_depends_on_the_inputs_stays() -> None:
    model = graph_fsdp.compile(llama(), backend="eager")
    x = torch.randint(0, VOCABULARY, (4, SEQUENCE))
    packed = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(4, -1)
    padding = torch.ones(4, SEQUENCE, dtype=torch.bool)
    padding[0, :3] = False
    plain = llama()
    plain.load_state_dict(model.state_dict())
    for options in ({"position_ids": packed}, {"attention_mask": padding}):
        torch.testing.assert_close(model(x, **options).logits[1:], plain(x, **options).logits[1:])
        assert all(re.search("attn_mask = [a-z]", call) for call in attention_calls(model))


def masked(model: nn.Module, first: int = 0, dtype: torch.dtype = torch.long) -> Tensor:
    """The loss of text whose first row begins with so many tokens of padding."""
    x = torch.arange(4 * SEQUENCE).view(4, SEQUENCE) % VOCABULARY
    mask = torch.ones(4, SEQUENCE, dtype=dtype)
    mask[0, :first] = 0
    loss: Tensor = model(x, attention_mask=mask, labels=x).loss
    return loss


@pytest.mark.parametrize("make", [llama, bert])
def test_an_attention_mask_that_masks_nothing_is_left_out(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    model = graph_fsdp.compile(make().eval(), backend="eager")
    model.load_state_dict(plain.state_dict())
    same_bits(plain, model, masked)
    assert not any(re.search("attn_mask = [a-z]", call) for call in attention_calls(model))
    same_bits(plain, model, lambda m: masked(m, 3))  # gradients add up
    assert all(re.search("attn_mask = [a-z]", call) for call in attention_calls(model))
    same_bits(plain, model, masked)
    same_bits(plain, model, lambda m: masked(m, 0, torch.bool))
    causes = [capture.cause for capture in graph_fsdp.inspect(model).captures]
    assert [cause.kind for cause in causes] == ["first", "inputs", "guard"]
    assert causes[1].text == "attention_mask masks something now" and "bool" in causes[2].text


class Padded(Attention):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        self.mask = lambda tokens: triangle(tokens) & attention_mask.bool()[:, None, None, :]
        return super().forward(x)


@pytest.mark.parametrize(
    ("mask", "is_left_out"),
    [(torch.ones(4, 8, dtype=torch.long), True), (torch.full((4, 8), 2), False), (torch.ones(4, 8), False)],
    ids=["ones", "other-numbers", "floats"],
)
def test_a_mask_is_one_of_ones(mask: Tensor, is_left_out: bool) -> None:
    model = graph_fsdp.compile(Padded(triangle), backend="eager")
    model(torch.randn(4, 8, 8), attention_mask=mask)
    assert ("attn_mask = None" in attention_calls(model)[0]) == is_left_out


def test_graphs_of_both_kinds_of_masks_know_lengths_that_change() -> None:
    plain = Padded(triangle)
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    for padding in (1, 0):
        for tokens in (8, 10, 12):
            x, mask = torch.randn(4, tokens, 8), torch.ones(4, tokens, dtype=torch.long)
            mask[0, tokens - padding :] = 0
            assert torch.equal(model(x, attention_mask=mask), plain(x, mask))
    assert [capture.cause.kind for capture in graph_fsdp.inspect(model).captures] == ["first", "guard", "inputs"]


def test_nobody_looks_at_masks_without_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(full_masks, "full_masks", lambda kwargs: looked.append(kwargs) or frozenset())
    for passes in (default_pipeline(), default_pipeline().remove("causal_attention")):
        model = graph_fsdp.compile(Padded(triangle), backend="eager", passes=passes)
        model(torch.randn(4, 8, 8), attention_mask=torch.ones(4, 8, dtype=torch.long))
    assert len(looked) == 1


class Random:
    """Makes a graph of operators on positions, with real values in the place of fake ones."""

    def __init__(self, seed: int) -> None:
        self.draw, self.graph = random.Random(seed), fx.Graph()
        self.rows, self.columns = self.draw.choice([(5, 5), (4, 6), (6, 4), (1, 5), (5, 1)])
        self.integers, self.booleans = list[fx.Node](), list[fx.Node]()
        for size, index in ((self.rows, (slice(None), None)), (self.columns, (None, slice(None)))):
            begin = self.draw.choice([0, 0, 0, 2, -1])
            line = self.call(torch.arange, (begin, begin + size) if begin else (size,))
            self.call(operator.getitem, (line, index))
        self.booleans = [self.call(torch.ones, ((self.rows, self.columns),), dtype=torch.bool)]
        for _ in range(16):
            self.step()

    def call(self, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        given, named = fx.node.map_arg((args, kwargs), lambda node: node.meta["example_value"])
        if isinstance(target, str):
            node, value = self.graph.call_method(target, args, kwargs), getattr(given[0], target)(*given[1:], **named)
        else:
            node, value = self.graph.call_function(target, args, kwargs), target(*given, **named)
        node.meta["example_value"] = value
        (self.booleans if value.dtype == torch.bool else self.integers).append(node)
        return node

    def step(self) -> None:
        draw = self.draw
        others = ["arithmetic", "triangle", "shape", "along", "write", "pick"]
        kind = draw.choice(["compare"] * 3 + ["logic"] * 3 + others)
        a, b = draw.choice(self.integers), draw.choice([*self.integers, draw.randint(-3, 7)])
        p, q = draw.choice(self.booleans), draw.choice(self.booleans)
        try:
            match kind:
                case "compare":
                    if draw.random() < 0.5:  # the row and the column of an element
                        a, b = self.integers[1], self.integers[3]
                    self.call(getattr(operator, draw.choice(["le", "lt", "ge", "gt", "eq", "ne"])), (a, b))
                case "logic":
                    self.call(*draw.choice([(operator.and_, (p, q)), (operator.or_, (p, q)), (operator.invert, (p,))]))
                case "arithmetic":
                    self.call(getattr(operator, draw.choice(["add", "sub", "mul"])), (a, b))
                case "triangle":
                    self.call(draw.choice(["tril", "triu"]), (p, draw.randint(-2, 2)))
                case "shape":
                    moves = [("unsqueeze", (a, draw.randint(-1, 2))), ("expand", (p, 2, 3, self.rows, self.columns))]
                    cuts = [(slice(1, None), slice(None, None, 2)), (Ellipsis, None, 0), (0,), slice(None, 1)]
                    cuts += [(Ellipsis, slice(0, 1)), slice(-2, None), (Ellipsis, -1)]
                    self.call(*draw.choice([*moves, (operator.getitem, (a, draw.choice(cuts))), ("clone", (p,))]))
                case "along":
                    dim = draw.choice([0, -1])
                    self.call(*draw.choice([(torch.diff, (a, 1, dim)), ("cumsum", (draw.choice([a, p]), dim))]))
                    first = self.call(operator.getitem, (a, (Ellipsis, slice(0, 1))))
                    self.call(torch.diff, (a,), prepend=self.call(operator.sub, (first, draw.randint(0, 2))))
                case "write":
                    self.call(*draw.choice([("add_", (a, 1)), ("logical_not_", (p,))]))
                case "pick":
                    index = self.call(operator.sub, (draw.choice(self.integers[:4]), draw.randint(0, 4)))
                    self.call(operator.getitem, (self.integers[0], (index,)))
                    self.call(operator.getitem, (p, (index, self.integers[3])))
        except (RuntimeError, IndexError, TypeError):  # of shapes that do not fit
            return


def elements(value: Value, shape: torch.Size) -> Tensor:
    """What a tensor of this shape holds if the value is what is said of it."""
    if isinstance(value, Affine):
        result = torch.full(shape, value.constant)
        for dim, step in enumerate(value.steps):
            result += step * torch.arange(shape[-1 - dim]).view(-1, *[1] * dim)
        return result
    assert value is not None
    return torch.stack([torch.ones(shape, dtype=torch.bool), *(elements(a, shape) >= 0 for a in value)]).all(0)


def test_what_is_known_of_positions_is_what_they_are() -> None:
    causal = known_masks = 0
    for seed in range(300):
        made = Random(seed)
        for node, value in positions(made.graph, written=written_by_index(made.graph)).items():
            sample = node.meta["example_value"]
            assert torch.equal(elements(value, sample.shape), sample), f"seed {seed}: {node} is not {value}"
            if isinstance(value, frozenset) and sample.dim() >= 2:
                known_masks += 1
                if is_causal(value, tuple(sample.shape)):
                    causal += 1
                    assert torch.equal(sample, torch.ones_like(sample).tril()), f"seed {seed}: {node}"
                assert not is_always_true(value, tuple(sample.shape)) or sample.all(), f"seed {seed}: {node}"
    assert known_masks > 1_000 and causal > 25
