"""``distribute_optimizer(gather_ahead=…)``: the next forward's first gathers begin in ``step()``. No bit changes."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import MLP
from reference import fsdp2
from torch import Tensor, nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

import graph_fsdp
from graph_fsdp import RankDisagreement
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)
DEPTH, STEPS = 2, 3
UNITS = {nn.Linear}
Between = Callable[[Any, Any], object]


def compiled(**options: Any) -> Any:
    torch.manual_seed(0)
    return graph_fsdp.compile(MLP(DEPTH), **{"backend": "eager", "auto_wrap_policy": UNITS, **options})


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def batch(step: int) -> Tensor:
    rank = dist.get_rank()
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def gathers_of(model: Any) -> int:
    return int(graph_fsdp.inspect(model).collectives.get("all_gather", 0))


def nothing(model: Any, optimizer: Any) -> None:
    pass


def train(model: Any, optimizer: Any, between: Between = nothing, backwards: int = 1) -> list[Any]:
    """Losses, and at last parameters and states; ``between`` is done behind each step."""
    found: list[Any] = []
    for step in range(STEPS):
        for part in range(backwards):
            loss = model(batch(step + 100 * part)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        between(model, optimizer)
    return [*found, *model.state_dict().values(), *(v for state in optimizer.state.values() for v in state.values())]


def alike(
    make: Callable[[nn.Module], optim.Optimizer] = adamw,
    between: Between = nothing,
    units: int = 2,
    backwards: int = 1,
    **options: Any,
) -> Any:
    """Train with and without, and compare all bits; the model that was trained with. Where nothing is done between
    steps FSDP2 trains without: it compiles nothing."""
    model = compiled(**options)
    optimizer = graph_fsdp.distribute_optimizer(make(model), gather_ahead=units)
    found = train(model, optimizer, between, backwards)
    torch.manual_seed(0)
    shared = {name: value for name, value in options.items() if name in ("mesh", "mp_policy")}
    plain = fsdp2(MLP(DEPTH), **shared) if between is nothing else compiled(**options)
    check_equal(found, train(plain, make(plain), between, backwards))
    return model


def check_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(*(v.to_local() if isinstance(v, DTensor) else torch.as_tensor(v) for v in (ours, theirs)))


def counted(model: Any, optimizer: optim.Optimizer) -> list[int]:
    """Of gathers, before each step and behind it."""
    counts: list[int] = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: counts.append(gathers_of(model)))
    return counts


def alike_whatever_is_between(**options: Any) -> None:
    """``alike`` with each of ``BETWEEN``, on the same two models, which have their first values again."""
    model, plain = compiled(**options), compiled(**options)
    first = [value.clone() for value in shards_of(model)[0]]
    for between in BETWEEN:
        found, counts = [], list[int]()
        for trained in (model, plain):
            with torch.no_grad():
                for value, start in zip(shards_of(trained)[0], first, strict=True):
                    value.copy_(start)
            optimizer = adamw(trained)
            if trained is model:
                optimizer = graph_fsdp.distribute_optimizer(optimizer, gather_ahead=2)
                counts = counted(model, optimizer)
            found.append(train(trained, optimizer, between))
        assert counts[1] - counts[0] == 2, f"{between.__name__}: the first step gathers two units"
        check_equal(*found)


@FACTS
def steps_have_the_bits_of_the_optimizer_alone() -> None:
    alike()
    alike(lambda m: optim.AdamW(m.parameters(), lr=0.01, fused=True), units=1)


@FACTS.long
def steps_of_others_have_them_too() -> None:
    alike(lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    alike(units=100)
    alike(backwards=2)
    alike(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    alike(auto_wrap_policy=None)


@FACTS
def groups_of_parameters_are_divided() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        return optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights, "lr": 0.02}], lr=0.01)

    alike(make)


@FACTS
def gathers_begin_in_the_step_and_the_forward_has_no_others_of_these_units() -> None:
    model = compiled()
    optimizer = graph_fsdp.distribute_optimizer(adamw(model), gather_ahead=2)
    for step in range(STEPS):
        before = gathers_of(model)
        model(batch(step)).sum().backward()
        ran = gathers_of(model) - before
        before = gathers_of(model)
        optimizer.step()
        assert gathers_of(model) - before == 2
    plain = compiled()
    plain(batch(0)).sum().backward()
    print("COUNT", gathers_of(plain), ran, flush=True)
    # Two in forward, and one in backward: the first layer's input needs no gradient.
    assert gathers_of(plain) - ran == 3


def steps_again(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


def writes(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def writes_to_own_rows(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().mul_(0.5)


def writes_to_what_is_frozen(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(0.5)


def with_a_frozen_weight(model: Any) -> optim.Optimizer:
    model.blocks[0].up.weight.requires_grad_(False)
    return adamw(model)


def replaces(model: Any, optimizer: Any) -> None:
    layer = model.blocks[0].up
    before, layer.weight = layer.weight, nn.Parameter(layer.weight.detach() * 0.5)
    for group in optimizer.param_groups:
        group["params"] = [layer.weight if p is before else p for p in group["params"]]
    optimizer.state[layer.weight] = optimizer.state.pop(before)


def loads(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def evaluates(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model(batch(50))
        model(batch(51))


def evaluates_and_writes(model: Any, optimizer: Any) -> None:
    evaluates(model, optimizer)
    writes(model, optimizer)
    evaluates(model, optimizer)


def writes_to_whole_parameters(model: Any, optimizer: Any) -> None:
    with graph_fsdp.unsharded(model), torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def saves(model: Any, optimizer: Any) -> None:
    torch.save(model.state_dict(), io.BytesIO())


def steps_another_optimizer(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optim.SGD(model.parameters(), lr=0.01).step()
    optimizer.zero_grad()


def unshards(model: Any, optimizer: Any) -> None:
    model.unshard()
    model.reshard()


BETWEEN = (
    steps_again, writes, loads, evaluates, evaluates_and_writes, writes_to_whole_parameters, saves,
    steps_another_optimizer, unshards, writes_to_own_rows,
)  # fmt: skip


@FACTS
def a_write_between_step_and_forward_counts() -> None:
    alike(between=evaluates_and_writes)
    torch._dynamo.reset()
    alike(between=replaces)
    torch._dynamo.reset()
    alike(between=writes_to_own_rows)
    torch._dynamo.reset()
    alike(with_a_frozen_weight, between=writes_to_what_is_frozen)


@FACTS.long
def what_is_done_between_step_and_forward_counts() -> None:
    alike_whatever_is_between()


@FACTS
def a_step_that_is_skipped_leaves_the_gathers_to_the_forward() -> None:
    model = compiled()
    optimizer = graph_fsdp.distribute_optimizer(adamw(model), gather_ahead=1)
    first = [model(batch(0)).sum() for _ in range(2)]
    assert torch.equal(*first)
    first[-1].backward()
    optimizer.zero_grad()
    again = model(batch(0)).sum()
    assert torch.equal(again, first[0])
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])


@FACTS
def whole_units_are_given_back_by_forward_and_backward_has_what_it_reads() -> None:
    model = compiled()
    optimizer = graph_fsdp.distribute_optimizer(adamw(model), gather_ahead=2)
    model(batch(0)).sum().backward()
    optimizer.step()
    first, second = model(batch(0)), model(batch(1))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.state_dict()
    before = gathers_of(model)
    (first.sum() + second.sum()).backward()
    per_backward = (gathers_of(model) - before) // 2
    assert per_backward == 2 * DEPTH - 2, "the second layer's weight is saved, and the first's not needed"


@FACTS
def their_memory_is_freed_when_nothing_reads_it_again() -> None:
    model = compiled()
    optimizer = graph_fsdp.distribute_optimizer(adamw(model), gather_ahead=2)
    model(batch(0)).sum().backward()
    units, gathered = engine_of(model).unsharded, dict[str, StorageWeakRef]()

    def put(unit: str, whole: Mapping[str, Tensor]) -> None:
        gathered[unit] = StorageWeakRef(next(iter(whole.values())).untyped_storage())
        type(units).put(units, unit, whole)

    vars(units)["put"] = put
    optimizer.step()
    loss = model(batch(0)).sum()
    assert {unit: memory.expired() for unit, memory in gathered.items()} == {
        "blocks.0.up": True,  # its input needs no gradient
        "blocks.0.down": False,  # backward multiplies by its weight
    }
    loss.backward()
    assert all(memory.expired() for memory in gathered.values())


def gathers_of_a_forward(model: Any) -> int:
    before = gathers_of(model)
    model(batch(0)).sum().backward()
    return gathers_of(model) - before


@FACTS
def another_optimizer_ends_it_when_it_steps_whatever_rank_collects_the_first() -> None:
    model, plain = compiled(), compiled()
    optimizer = graph_fsdp.distribute_optimizer(adamw(model), gather_ahead=2)
    assert gathers_of_a_forward(model) == gathers_of_a_forward(plain) - 1, "the first layer is kept for backward"
    for made in (optimizer, adamw(plain)):
        made.step()
        made.zero_grad()
    if dist.get_rank() == 0:
        del optimizer, made
        gc.collect()
    others = [optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for _ in range(STEPS):
        for m, other in zip((model, plain), others, strict=True):
            m(batch(1)).square().mean().backward()
            other.step()
            other.zero_grad()
    assert all(torch.equal(*(v.to_local() for v in values)) for values in zip(*shards_of(model, plain), strict=True))
    assert gathers_of_a_forward(model) == gathers_of_a_forward(plain)
    assert all(isinstance(p, DTensor) for p in model.parameters())


def shards_of(*models: nn.Module) -> list[list[Any]]:
    return [list(model.state_dict().values()) for model in models]


@FACTS
def distributing_another_optimizer_of_the_parameters_ends_it() -> None:
    model, plain = compiled(), compiled()
    first = graph_fsdp.distribute_optimizer(adamw(model), gather_ahead=2)
    graph_fsdp.distribute_optimizer(optim.SGD([next(model.parameters())], lr=0.1))
    assert gathers_of_a_forward(model) == gathers_of_a_forward(plain)
    first.step()
    assert gathers_of_a_forward(model) < gathers_of_a_forward(plain), "it steps again, and gathers ahead again"


@FACTS
def it_is_switched_off_and_on_under_a_scheduler_and_no_bit_changes() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        optimizer = graph_fsdp.distribute_optimizer(adamw(model), gather_ahead=0 if model is plain else 2)
        vars(optimizer)["scheduler"] = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return optimizer

    model, plain = compiled(), compiled()
    optimizer, expected, gathers = make(model), make(plain), []
    for units in (2, 0, 1):
        if units < 2:
            assert graph_fsdp.distribute_optimizer(optimizer, gather_ahead=units) is optimizer
        for step in range(2):
            for m, made in ((model, optimizer), (plain, expected)):
                before = gathers_of(m)
                m(batch(step)).square().mean().backward()
                made.step()
                made.zero_grad()
                vars(made)["scheduler"].step()
                gathers.append(gathers_of(m) - before)
        for ours, theirs in zip(*(states_of(m, o) for m, o in ((model, optimizer), (plain, expected))), strict=True):
            assert torch.equal(ours, theirs)
    # Of two units, three gathers are left out (none of the first layer is in backward), and two are in ``step()``;
    # of one, one and one. The first forward of each number gathers its units itself, besides.
    more = [ours - theirs for ours, theirs in zip(gathers[::2], gathers[1::2], strict=True)]
    assert more == [-3 + 2 + 2, -3 + 2, 0, 0, -1 + 1 + 1, -1 + 1]


def states_of(model: nn.Module, optimizer: optim.Optimizer) -> list[Tensor]:
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [v.to_local() if isinstance(v, DTensor) else v for v in (*model.state_dict().values(), *states)]


@FACTS
def a_write_on_one_rank_alone_is_an_error_on_all() -> None:
    """The last fact: nothing is compared afterwards."""
    model = compiled()
    optimizer = graph_fsdp.distribute_optimizer(adamw(model), gather_ahead=1)
    model(batch(0)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        writes(model, optimizer)
    with pytest.raises(RankDisagreement, match=r"ranks \[0\] are about to run the unshard\(\) of unit 'blocks.0.up'"):
        model(batch(1))


test_on_two_ranks = FACTS.on(2)
