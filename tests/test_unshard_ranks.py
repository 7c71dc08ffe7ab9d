"""Whole parameters, and what FSDP2's methods set: numbers and gathers on two ranks, bit for bit FSDP2's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import MLP, llama
from reference import fsdp2
from test_calls_ranks import check_gradients, pair, rows, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import graph_fsdp

FACTS = Facts(__name__)


def gathers_of(model: nn.Module) -> int:
    return graph_fsdp.inspect(model).collectives.get("all_gather", 0)


def held_by(model: Any) -> int:
    """Bytes of gathered parameters, now."""
    return int(model._graph_fsdp.counter.current)


def generate(model: Any, prompt: Tensor, tokens: int = 2) -> Tensor:
    model.eval()
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=0)


def llamas() -> tuple[Any, Any, Tensor]:
    """A compiled model, the plain one, and this rank's prompt."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model, plain = pair(llama(depth=1), auto_wrap_policy={LlamaDecoderLayer})
    return model, plain, torch.randint(1, 32, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))


@FACTS
def a_write_while_a_unit_is_gathered_makes_it_stale() -> None:
    model: Any = graph_fsdp.compile(MLP(), backend="eager")
    handle = model.unshard(async_op=True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    handle.wait()
    with pytest.raises(graph_fsdp.ParameterChangedError, match=r"changed .* after its unit 'root' was unsharded"):
        model(torch.ones(2, 16))
    model.reshard()
    model(torch.ones(2, 16))


@FACTS
def hugging_face_generation_with_a_cache() -> None:
    model, plain, prompt = llamas()
    register_fsdp_forward_method(model, "generate")  # as transformers' Trainer does
    expected = generate(plain, prompt)
    assert torch.equal(generate(model, prompt), expected)
    with graph_fsdp.unsharded(model):
        assert torch.equal(generate(model, prompt, tokens=1), expected[:, :-1])
    assert all(isinstance(p, DTensor) for p in model.parameters())


class Adapted(nn.Module):
    """Calls what has all of its parameters in its stead, as PEFT's models do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.base.generate(*args, **kwargs)  # type: ignore[operator]


@FACTS
def a_wrapped_model_generates_until_all_ranks_have_stopped_and_trains() -> None:
    model, plain = pair(Adapted(llama(depth=1)))
    prompt = torch.randint(1, 32, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))

    def stop(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((len(ids),), ids.shape[1] > prompt.shape[1] + 2 * dist.get_rank())

    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "stopping_criteria": [stop]}
    found, expected = (each.eval().generate(prompt, **options) for each in (model, plain))
    assert found.shape[1] == 6 + 2 * dist.get_rank() and torch.equal(found, expected)
    for each in (model, plain):
        each.train()(input_ids=prompt, labels=prompt).loss.backward()
    check_gradients(model, plain)


@FACTS.long
def hugging_face_generation_of_more_tokens_on_whole_parameters_and_training_behind_it() -> None:
    model, plain, prompt = llamas()
    expected = generate(plain, prompt, 3)
    assert torch.equal(generate(model, prompt, 3), expected)
    before = gathers_of(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    units = gathers_of(model) - before
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert torch.equal(generate(model, prompt, 3), expected)
    assert gathers_of(model) == before + units
    model.reshard()
    model.reset_iter_state()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.train()
    for m in (model, plain):
        m(input_ids=prompt, labels=prompt).loss.backward()
    check_gradients(model, plain)


def trained(prepare: Any, **options: Any) -> tuple[dict[str, Tensor], int]:
    """Parameters after two steps of two microbatches, and how many gathers they took. ``prepare(model, step, last)``
    is called before each microbatch."""
    torch.manual_seed(0)
    model = graph_fsdp.compile(MLP(depth=3), backend="eager", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for last in (False, True):
            prepare(model, step, last)
            model(rows(4, 16, seed=2 * step + last)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: p.detach().full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return found, gathers_of(model)


def fsdp2_trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = fsdp2(MLP(depth=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for last in (False, True):
            model(rows(4, 16, seed=2 * step + last)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def units_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _unshard_all(model: Any, step: int, last: bool) -> None:
    for unit in units_of(model):
        unit.unshard()


def _unshard_first(model: Any, step: int, last: bool) -> None:
    handles = [model.blocks[0].unshard(async_op=True), model.unshard(async_op=True)]
    if step == 1:
        handles[0].wait()
        assert not isinstance(model.blocks[0].up.weight, DTensor) and isinstance(model.head.weight, DTensor)


def _stay_after_backward(model: Any, step: int, last: bool) -> None:
    model.set_reshard_after_backward(last)


def _stay_one_after_backward(model: Any, step: int, last: bool) -> None:
    model.blocks[1].set_reshard_after_backward(last, recurse=False)


def _evaluate_without_gathers(model: Any, step: int, last: bool) -> None:
    if step == last == 0:
        model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(rows(4, 16))
        gathered = gathers_of(model)
        model(rows(4, 16, seed=1))
        assert gathers_of(model) == gathered


def once(change: Any) -> Any:
    def prepare(model: Any, step: int, last: bool) -> None:
        if step == last == 0:
            change(model)

    return prepare


# What is set → the number of gathers in 2 steps of 2 microbatches. 4 units, and
# the one that is gathered last is kept from forward to backward.
SETTINGS: dict[str, tuple[Any, int]] = {
    "nothing": (lambda *_: None, 4 * 7),
    "unshard() of all units": (_unshard_all, 4 * 4),
    "unshard(async_op=True)": (_unshard_first, 4 * 5),
    "set_reshard_after_backward(False) in accumulation": (_stay_after_backward, 2 * 4),
    "set_reshard_after_backward(False) of one unit": (_stay_one_after_backward, 4 * 5 + 2),
    "set_reshard_after_forward(True)": (once(lambda m: m.set_reshard_after_forward(True)), 4 * 8),
    "set_reshard_after_forward(False)": (once(lambda m: m.set_reshard_after_forward(False)), 4 * 4),
    "set_reshard_after_forward(False) of one": (once(lambda m: m.blocks[0].set_reshard_after_forward(False)), 4 * 6),
    "evaluations in between": (_evaluate_without_gathers, 4 * 4),
    "forward prefetch": (once(lambda m: m.blocks[0].set_modules_to_forward_prefetch([*m.blocks[1:], m])), 4 * 7),
    "backward prefetch": (
        once(lambda m: m.blocks[2].set_modules_to_backward_prefetch([m.blocks[1], m.blocks[0]])),
        4 * 7,
    ),
}


@FACTS.long
def settings_change_gathers_and_not_numbers() -> None:
    """Bit for bit FSDP2's."""
    expected = fsdp2_trained()
    for name, (prepare, gathers) in SETTINGS.items():
        torch._dynamo.reset()
        found, counted = trained(prepare)
        assert counted == gathers, f"{name}: {counted} gathers and not {gathers}"
        for parameter, value in found.items():
            assert torch.equal(value, expected[parameter]), f"{name}: {parameter}"


@FACTS
def whole_parameters_are_plain_and_what_is_written_to_them_is_read() -> None:
    model, plain = pair(MLP())
    x = rows(4, 16)
    model.blocks[0].unshard()
    weight = model.blocks[0].up.weight
    assert type(weight) is nn.Parameter and torch.equal(weight, plain.blocks[0].up.weight)
    assert isinstance(model.head.weight, DTensor), "not recursive, as in FSDP2"
    with torch.no_grad():
        weight.zero_()
        plain.blocks[0].up.weight.zero_()
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-7)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values()), "state_dict() reshards"
    assert whole(model.blocks[0].up.weight).abs().sum() > 0, "what is written is lost"


@FACTS
def a_block_of_unsharded_keeps_what_is_written() -> None:
    model, plain = pair(MLP(), mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    saved = {name: value.clone() for name, value in plain.state_dict().items()}
    with graph_fsdp.unsharded(model):
        found = model.state_dict()
        assert all(torch.equal(found[name], saved[name]) for name in saved), "in full precision"
        model.head.weight.data.mul_(2)
        model.blocks[0].up.bias.requires_grad_(False)
        assert model(rows(4, 16)).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match=r"in a block of graph_fsdp\.unsharded"):
            model.reshard()
    assert torch.equal(whole(model.head.weight), 2 * saved["head.weight"])
    assert torch.equal(whole(model.blocks[1].up.weight), saved["blocks.1.up.weight"])
    assert not model.blocks[0].up.bias.requires_grad
    with graph_fsdp.unsharded(model.blocks[0], writeback=False):
        model.blocks[0].up.weight.data.zero_()
        assert isinstance(model.head.weight, DTensor)
    assert torch.equal(whole(model.blocks[0].up.weight), saved["blocks.0.up.weight"])
    with pytest.raises(KeyError), graph_fsdp.unsharded(model):
        model.head.weight.data.zero_()
        raise KeyError
    assert torch.equal(whole(model.head.weight), 2 * saved["head.weight"]), "nothing is kept of a block that raises"
    with graph_fsdp.unsharded(model):
        model.load_state_dict(saved, assign=True)
    found = model.state_dict()
    assert all(torch.equal(whole(found[name]), saved[name]) for name in saved), "what is put there is kept"
    replaced = pytest.raises(graph_fsdp.ParameterChangedError, match=r"'head\.weight' was replaced")
    with replaced, graph_fsdp.unsharded(model):
        model.head.weight = nn.Parameter(torch.zeros(2, 2))
    assert torch.equal(whole(model.head.weight), saved["head.weight"])


@FACTS
def a_whole_parameter_that_is_out_of_date_is_an_error() -> None:
    model, _ = pair(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_reshard_after_backward(False)
    model(rows(4, 16)).sum().backward()
    optimizer.step()
    with pytest.raises(graph_fsdp.ParameterChangedError, match=r"'blocks.0.up.weight' changed .* call reshard\(\)"):
        model(rows(4, 16))
    model.set_reshard_after_backward(True)
    for unit in units_of(model):
        unit.reshard()
    model(rows(4, 16)).sum().backward()


@FACTS
def resharding_between_forward_and_backward_changes_nothing() -> None:
    model, plain = pair(MLP(depth=1))
    _unshard_all(model, 0, False)
    losses = [m(rows(4, 16)).square().mean() for m in (model, plain)]
    for unit in units_of(model):
        unit.reshard()
    for loss in losses:
        loss.backward()
    check_gradients(model, plain)


@FACTS
def resharding_gives_back_what_is_kept_for_backward() -> None:
    """As FSDP2 does; two forwards, whose backwards come in any order, and one that never comes."""
    torch.manual_seed(0)
    model, plain = pair(MLP(), reshard_after_forward=False)
    fsdp2(plain, reshard_after_forward=False)
    x = rows(4, 16)
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    held, kept = held_by(model), gathers_of(model)
    for seed in (1, 2):
        losses = [[m(rows(4, 16, seed=seed + i)).square().mean() for i in range(2)] for m in (model, plain)]
        dropped = model(x)
        gathered, whole_bytes = gathers_of(model), held_by(model)
        assert whole_bytes > held
        model.blocks[0].reshard()
        assert held < held_by(model) < whole_bytes, "only what the unit has"
        for m in (model, plain):
            for unit in units_of(m):
                unit.reshard()
        assert held_by(model) == held
        del dropped
        for first, second in losses:
            second.backward()
            first.backward()
        assert gathers_of(model) == gathered + 2 * kept, "again, and once for each forward"
        for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(p.grad), whole(expected.grad)), name
        del losses, first, second
        assert held_by(model) == held, "nothing is counted twice"


class Ahead(MLP):
    """Gathers the next block while one runs, as FSDP2's users may."""

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = list(self.blocks)
        handle = blocks[0].unshard(async_op=True)
        for index, block in enumerate(blocks):
            handle.wait()
            if index + 1 < len(blocks):
                handle = blocks[index + 1].unshard(async_op=True)
            x = block(x)
            block.reshard()
        return self.head(x)


@FACTS
def handles_in_a_forward_are_waited_for() -> None:
    """Bit for bit FSDP2's."""
    torch.manual_seed(0)
    plain: Any = Ahead()
    models = [(False, copy.deepcopy(plain)), (True, copy.deepcopy(plain))]
    fsdp2(plain, reshard_after_forward=True)
    plain(rows(4, 16)).square().mean().backward()
    for fullgraph, same in models:
        model = graph_fsdp.compile(same, backend="eager", fullgraph=fullgraph)
        model(rows(4, 16)).square().mean().backward()
        for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(p.grad), whole(expected.grad)), name
        assert len(graph_fsdp.inspect(model).captures) == 1


@FACTS
def ranks_that_do_not_all_reshard_are_found() -> None:
    model, _ = pair(MLP(depth=1), reshard_after_forward=False)
    for _ in range(4):
        model(rows(4, 16)).sum().backward()
    loss = model(rows(4, 16)).sum()
    if dist.get_rank() == 0:
        model.reshard()
    with pytest.raises(graph_fsdp.RankDisagreement, match=r"reshard\(\)"):
        loss.backward()


test_on_two_ranks = FACTS.on(2)


def test_whole_parameters_in_one_process() -> None:
    model, plain = pair(MLP())
    x = torch.randn(4, 16)
    for unit in units_of(model):
        unit.unshard()
        unit.set_reshard_after_forward(False)
    for m in (model, plain):
        m(x).square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    with graph_fsdp.unsharded(model):
        model.head.weight.data.zero_()
    assert not model.head.weight.any()
