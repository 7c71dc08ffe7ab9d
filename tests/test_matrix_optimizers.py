"""``graph_fsdp.distribute_optimizer`` of Muon and of optimizers declared ``matrix_wise``: four ranks that own matrices
step as one process that has all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros
from torch.optim.optimizer import Optimizer
from torch.utils.flop_counter import FlopCounterMode

import graph_fsdp
from graph_fsdp import UnsupportedError
from graph_fsdp.optimizers import owners

WORLD_SIZE, STEPS = 4, 3
FACTS = Facts(__name__)
SIZES = ((33, 20), (20, 33), (16, 16), (64, 3), (3, 64), (2, 48), (24, 24), (24, 24), (8, 40), (17, 17))


class Net(nn.Module):
    """Matrices of many shapes: rows that four ranks do not divide evenly, fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(size, generator=generator) for size in SIZES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x[:, : w.shape[1]] @ w.T).square().mean() for w in self.weights]).sum()


def compiled(mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    return graph_fsdp.compile(Net(), mesh, backend="eager", **options)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def set_gradients(model: nn.Module, step: int, without: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, p in enumerate(model.parameters()):
        gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, p.placements)
        p.grad = None if index in without else gradient


Make = Callable[[Iterator[nn.Parameter]], Optimizer]


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(STEPS), without: tuple[int, ...] = ()) -> None:
    for step in steps:
        set_gradients(model, step, without if step == 1 else ())
        optimizer.step()
        optimizer.zero_grad()


def assert_same(model: nn.Module, optimizer: Optimizer, expected: nn.Module, other: Optimizer) -> None:
    """Parameters and states have the same values to 1e-6, and states are DTensors placed as parameters."""
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=1e-6, atol=1e-6)
        state, reference = optimizer.state[p], other.state[q]
        assert state.keys() == reference.keys()
        for key, value in reference.items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                assert isinstance(p, DTensor) and isinstance(state[key], DTensor)
                assert state[key].placements == p.placements
            torch.testing.assert_close(whole(state[key]), value, rtol=1e-6, atol=1e-6)


def agree_with_one_process(model: nn.Module, make: Make, without: tuple[int, ...] = (), **options: Any) -> Optimizer:
    expected = Net().to(next(model.parameters()).dtype)
    optimizer = graph_fsdp.distribute_optimizer(make(model.parameters()), **options)
    other = make(expected.parameters())
    train(model, optimizer, without=without)
    train(expected, other, without=without)
    assert_same(model, optimizer, expected, other)
    return optimizer


def muon(params: Any) -> Optimizer:
    return optim.Muon(params, lr=0.02)


@FACTS
def muon_is_that_of_one_process() -> None:
    optimizer = agree_with_one_process(compiled(), muon)
    assert isinstance(optimizer, optim.Muon)


@FACTS
def settings_of_muon() -> None:
    def make(params: Iterator[nn.Parameter]) -> Optimizer:
        first, *others = params
        groups = [{"params": [first], "lr": 0.1, "nesterov": False, "weight_decay": 0.0}, {"params": others}]
        return optim.Muon(groups, lr=0.02, momentum=0.8, ns_steps=3, adjust_lr_fn="match_rms_adamw")

    agree_with_one_process(compiled(), make)


@FACTS
def parameters_without_gradients() -> None:
    agree_with_one_process(compiled(), muon, without=(0, 4, 7))


@FACTS
def hybrid_sharding_and_replication() -> None:
    for shape, names in (((2, 2), ("replicate", "shard")), ((4,), ("replicate",))):
        agree_with_one_process(compiled(init_device_mesh("cpu", shape, mesh_dim_names=names)), muon)


@FACTS
def shards_of_columns() -> None:
    def place(p: nn.Parameter) -> Shard:
        return Shard(1 if p.shape[1] % WORLD_SIZE == 0 else 0)

    model = compiled(shard_placement_fn=place)
    assert {p.placements for p in model.parameters()} == {(Shard(0),), (Shard(1),)}  # type: ignore[attr-defined]
    agree_with_one_process(model, muon)


@FACTS
def buckets_of_one_matrix_for_each_rank() -> None:
    """Buckets are then exchanged one after the other while others are under way."""
    before, owners.BUCKET_NBYTES = owners.BUCKET_NBYTES, 1
    try:
        agree_with_one_process(compiled(), muon)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        agree_with_one_process(compiled(mesh), muon, without=(3,))
    finally:
        owners.BUCKET_NBYTES = before


@FACTS
def momentum_in_bfloat16_stays_what_it_was() -> None:
    """torch's Muon on one process divides it by its norm where nothing is cast."""
    model = graph_fsdp.compile(Net().bfloat16(), backend="eager")
    optimizer = graph_fsdp.distribute_optimizer(optim.Muon(model.parameters(), nesterov=False, momentum=0.5))
    set_gradients(model, 0)
    optimizer.step()
    for p in model.parameters():
        torch.testing.assert_close(whole(optimizer.state[p]["momentum_buffer"]), 0.5 * whole(p.grad), rtol=0.01, atol=0)


def operations(model: nn.Module, optimizer: Optimizer) -> int:
    set_gradients(model, 0)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops()


@FACTS
def each_matrix_is_computed_with_once() -> None:
    expected = Net()
    total = operations(expected, muon(expected.parameters()))
    for shape, names in (((4,), ("shard",)), ((2, 2), ("replicate", "shard"))):
        model = compiled(init_device_mesh("cpu", shape, mesh_dim_names=names))
        own = operations(model, graph_fsdp.distribute_optimizer(muon(model.parameters())))
        everyones = [0] * WORLD_SIZE
        dist.all_gather_object(everyones, own)
        assert sum(everyones) == total
        assert max(everyones) < 1.2 * total / WORLD_SIZE  # the largest matrix alone has a fifth of all


@FACTS
def a_state_is_loaded_and_goes_on() -> None:
    expected = Net()
    other = muon(expected.parameters())
    train(expected, other, range(4))
    model = compiled()
    first = graph_fsdp.distribute_optimizer(muon(model.parameters()))
    train(model, first, range(2))
    second = graph_fsdp.distribute_optimizer(muon(model.parameters()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(model, second, range(2, 4))
    assert_same(model, second, expected, other)


@FACTS.long
def training_beside_adamw() -> None:
    """Gradients of a backward; vectors and the last layer by AdamW."""

    def train(model: Any, batches: Sequence[Tensor], distribute: Callable[..., Optimizer]) -> list[Tensor]:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        both = [optim.Muon(matrices, lr=1e-3), optim.AdamW(others, lr=1e-3)]
        both = [distribute(optimizer) for optimizer in both]
        for batch in batches:
            model(batch).square().mean().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        return [whole(p) for p in model.parameters()]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 18), nn.Tanh(), nn.Linear(18, 4))

    batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]
    own = [batch.chunk(WORLD_SIZE)[dist.get_rank()] for batch in batches]
    expected = train(make(), batches, lambda optimizer: optimizer)
    found = train(graph_fsdp.compile(make(), backend="eager"), own, graph_fsdp.distribute_optimizer)
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)  # a rounding to bfloat16 may be another one


def root(matrix: Tensor) -> Tensor:
    """The matrix to the power of -1/4."""
    values, vectors = torch.linalg.eigh(matrix + 1e-4 * torch.eye(len(matrix)))
    return vectors @ torch.diag(values**-0.25) @ vectors.T


def preconditioned(gradient: Tensor, left: Tensor, right: Tensor) -> list[Tensor]:
    left, right = left + gradient @ gradient.T, right + gradient.T @ gradient
    return [root(left) @ gradient @ root(right), left, right]


class Shampoo(Optimizer):
    """Shampoo (Gupta et al., 2018, algorithm 1) on one process."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if p.grad is not None:
                    left, right = (
                        state.get(k, torch.zeros(n, n)) for k, n in zip(("left", "right"), p.shape, strict=True)
                    )
                    update, state["left"], state["right"] = preconditioned(p.grad, left, right)
                    p.sub_(update, alpha=group["lr"])


def shampoo(p: Any, gradient: Any, state: Any, group: Any) -> Generator[Any, Any, None]:
    """A step of one parameter on its shards."""
    if not state:
        state["left"], state["right"] = (
            zeros(n, n, device_mesh=p.device_mesh, placements=p.placements) for n in p.shape
        )
    update, left, right = yield preconditioned, [gradient, state["left"], state["right"]]
    state["left"].copy_(left)
    state["right"].copy_(right)
    p.sub_(update, alpha=group["lr"])


@FACTS
def shampoo_by_a_rule() -> None:
    agree_with_one_process(compiled(), Shampoo, without=(2,), matrix_wise=shampoo)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    agree_with_one_process(compiled(mesh), Shampoo, matrix_wise=shampoo)


def rule_that(what: str) -> Any:
    def rule(p: Any, gradient: Any, state: Any, group: Any) -> Generator[Any, Any, None]:
        if what == "does not yield":
            p.sub_(gradient, alpha=group["lr"])
            return
        given = [gradient, gradient.double()] if what == "yields dtypes" else [gradient]
        given = [gradient.full_tensor()] if what == "yields plain tensors" else given
        yield (lambda value, *_: [value[:1]] if what == "returns shapes" else [value]), given
        if what == "yields twice":
            yield (lambda value: [value]), [gradient]

    return rule


@FACTS
def a_rule_may_do_all_by_itself() -> None:
    agree_with_one_process(
        compiled(), lambda params: optim.SGD(params, lr=0.02), matrix_wise=rule_that("does not yield")
    )


test_on_four_ranks = FACTS.on(WORLD_SIZE)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("yields dtypes", "a rule yields tensors of one dtype"),
        ("yields plain tensors", "a rule yields DTensors placed as the parameter"),
        ("returns shapes", "a rule's function returns tensors like those it is given"),
        ("yields twice", "the rule of parameter 'weights.0' yields a second time"),
    ],
)
def test_rules_are_checked(fake_group: None, what: str, error: str) -> None:
    model: Any = compiled(init_device_mesh("cpu", (8,)))
    optimizer = optim.SGD([model.weights[0]])  # the first rank owns it
    graph_fsdp.distribute_optimizer(optimizer, matrix_wise=rule_that(what))
    set_gradients(model, 0)
    with pytest.raises((ValueError, UnsupportedError), match=error):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [model.weights[0]]


def test_bad_input(fake_group: None) -> None:
    model = compiled(init_device_mesh("cpu", (8,)))
    with pytest.raises(ValueError, match=r"element_wise=True and matrix_wise exclude each other"):
        graph_fsdp.distribute_optimizer(optim.SGD(model.parameters()), element_wise=True, matrix_wise=shampoo)
    with pytest.raises(ValueError, match=r"optimizer: none of its parameters is a shard"):
        graph_fsdp.distribute_optimizer(muon(Net().parameters()))
    with pytest.raises(TypeError, match=r"matrix_wise must be a generator function"):
        graph_fsdp.distribute_optimizer(optim.SGD(model.parameters()), matrix_wise=preconditioned)  # type: ignore[arg-type]


def test_on_one_process_it_is_stepped_as_it_is() -> None:
    assert not dist.is_initialized()
    model, expected = compiled(), Net()
    optimizer, other = graph_fsdp.distribute_optimizer(muon(model.parameters())), muon(expected.parameters())
    train(model, optimizer)
    train(expected, other)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


def test_owners_are_balanced(fake_group: None) -> None:
    """Nobody has more to do than a mean share and one matrix; all ranks work in each bucket, and no bucket has much
    more than one matrix for each rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(int(n), int(m), bias=False) for n, m in torch.randint(1, 65, (100, 2))]
    model = graph_fsdp.compile(nn.Sequential(*layers), init_device_mesh("cpu", (8,)), backend="eager")
    stepper = owners.Owners(muon(model.parameters()), owners.muon)
    matrices = [m for p in model.parameters() if (m := given(stepper, p)) is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners, "BUCKET_NBYTES", 1)
        buckets = owners.buckets_of(matrices)
    loads = [sum(m.cost for m in matrices if m.owner == (0, rank)) for rank in range(8)]
    assert max(loads) - min(loads) <= max(m.cost for m in matrices)
    assert [len(bucket) for bucket in buckets] == [8] * 12 + [4]
    assert {m.owner for m in buckets[0]} == {(0, rank) for rank in range(8)}
    assert len(owners.buckets_of(matrices)) == 1  # of 16 MiB for each rank


def given(stepper: owners.Owners, p: nn.Parameter) -> Any:
    p.grad = torch.zeros_like(p)
    return stepper._matrix(p, {p: {}}, {})
