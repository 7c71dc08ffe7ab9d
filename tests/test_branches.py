"""Parameters that a step does not use, and branches on data: mixtures of experts, torch.cond.

Both ranks train each model; what they hold afterwards is what one process has that sees the batches of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import WIDTH
from reference import gradients_of, parameters_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import graph_fsdp
from graph_fsdp import GraphBreakError

FACTS = Facts(__name__)


def batch(of_rank: int, step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + of_rank))


def train(make: type[nn.Module], without: Sequence[str], **options: object) -> nn.Module:
    """Three steps, sharded and in one process. ``without``: parameters that must have no gradient."""
    torch.manual_seed(0)
    model = make()
    reference = make()
    reference.load_state_dict(model.state_dict())
    graph_fsdp.compile(model, backend="eager", **options)  # type: ignore[arg-type]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (model, reference)]
    world = dist.get_world_size()
    for step in range(3):
        model(batch(dist.get_rank(), step)).square().mean().backward()
        for other in range(world):
            (reference(batch(other, step)).square().mean() / world).backward()
        gradients = gradients_of(model)
        assert [name for name, gradient in gradients.items() if gradient is None] == list(without)
        for name, p in reference.named_parameters():
            expected = p.grad if p.grad is not None else torch.zeros_like(p)
            if gradients[name] is not None:
                torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6, msg=name)
            if p.grad is None and name not in without:
                p.grad = torch.zeros_like(p)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in parameters_of(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-5, msg=name)
    return model


# Parameters without use


class Unused(nn.Module):
    """One layer that no forward uses, and one whose result is not returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.never = nn.Linear(WIDTH, 3)
        self.dropped = nn.Linear(WIDTH, 3)
        self.detached = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.dropped(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x + self.detached(x).detach()


UNUSED = [f"{layer}.{leaf}" for layer in ("never", "dropped", "detached") for leaf in ("weight", "bias")]


@FACTS
def a_parameter_without_use_has_no_gradient() -> None:
    for policy in (None, {nn.Linear}):
        train(Unused, UNUSED, auto_wrap_policy=policy)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


@FACTS
def ranks_may_differentiate_different_outputs() -> None:
    torch.manual_seed(0)
    model = TwoOutputs()
    reference = TwoOutputs()
    reference.load_state_dict(model.state_dict())
    graph_fsdp.compile(model, backend="eager", auto_wrap_policy={nn.Linear})
    me = dist.get_rank()
    model(batch(me, 0))[me].sum().backward()
    for other in range(2):
        (reference(batch(other, 0))[other].sum() / 2).backward()
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad)


class HeadsOnAStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = torch.relu(self.stem(x))
        return [head(x) for head in self.heads]


USES = [[0], [0], [1], [0, 1], [1]]  # of outputs by the loss, per step


def train_on_some_outputs(shard: Callable[[nn.Module], nn.Module]) -> list[dict[str, Tensor | None]]:
    """Weight decay moves what has zeros, and leaves alone what has None. The gradients of the last two steps add up."""
    torch.manual_seed(0)
    model = shard(HeadsOnAStem())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    found: list[dict[str, Tensor | None]] = []
    for step, used in enumerate(USES):
        outputs = model(batch(dist.get_rank(), step))
        torch.stack([outputs[index].square().mean() for index in used]).sum().backward()
        found += [gradients_of(model), dict(parameters_of(model))]
        optimizer.step()
        if step < len(USES) - 2:
            optimizer.zero_grad()
    return found


def sharded_by_fsdp2(model: nn.Module) -> nn.Module:
    for module in (model.stem, *model.heads):
        fully_shard(module)
    return fully_shard(model)


@FACTS
def outputs_that_the_loss_leaves_out_give_no_gradients_as_in_fsdp2() -> None:
    def sharded(model: nn.Module) -> nn.Module:
        return graph_fsdp.compile(model, backend="eager", auto_wrap_policy={nn.Linear})

    theirs, own = map(train_on_some_outputs, (sharded_by_fsdp2, sharded))
    assert any(gradient is None for gradient in own[0].values()), "the first step uses one head"
    for a, b in zip(theirs, own, strict=True):
        assert list(a) == list(b)
        for name, value in a.items():
            assert (value is None) == (b[name] is None), name
            assert value is None or torch.equal(value, b[name]), name


@FACTS
def a_parameter_has_a_gradient_where_any_rank_used_it() -> None:
    me = dist.get_rank()
    line = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for mesh in (None, line, hybrid):
        model = graph_fsdp.compile(HeadsOnAStem(), mesh, backend="eager")
        for first, second, missing in ((0, 0, ["heads.1"]), (1, 1, ["heads.0"]), (0, 1, []), (0, 0, ["heads.1"])):
            model.zero_grad()
            model(batch(me, 0))[(first, second)[me]].sum().backward()
            absent = {name.rpartition(".")[0] for name, value in gradients_of(model).items() if value is None}
            assert sorted(absent) == missing


@FACTS
def gradients_that_were_not_reduced_count() -> None:
    me = dist.get_rank()
    model = graph_fsdp.compile(HeadsOnAStem(), backend="eager")
    for first, second, missing in ((0, 1, []), (0, 0, ["heads.1"]), (1, 0, [])):
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        model(batch(me, 0))[first].sum().backward()
        model.set_requires_gradient_sync(True)
        model(batch(me, 0))[second].sum().backward()
        absent = {name.rpartition(".")[0] for name, value in gradients_of(model).items() if value is None}
        assert sorted(absent) == missing


# Mixtures of experts: which rows an expert sees is data, and every expert is used by every rank


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, index = self.router(x).softmax(-1).max(-1)
        return weight, index


class Masked(Experts):
    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.route(x)
        return x + sum((weight * (index == i)).unsqueeze(1) * expert(x) for i, expert in enumerate(self.experts))


class OneHot(Experts):
    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.route(x)
        dispatch = F.one_hot(index, 2).to(x.dtype)
        per_expert = torch.einsum("te,td->etd", dispatch, x)
        results = torch.stack([expert(rows) for expert, rows in zip(self.experts, per_expert, strict=True)])
        return x + torch.einsum("te,etd->td", dispatch * weight.unsqueeze(1), results)


class IndexAdd(Experts):
    """Each expert has room for as many rows as there are; rows are sorted by expert, and added where they were."""

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.route(x)
        order = index.argsort()
        rows, expert_of = x[order], index[order]
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            results = torch.where((expert_of == i).unsqueeze(1), expert(rows), results)
        return x.index_add(0, order, results * weight[order].unsqueeze(1))


class IfAny(Experts):
    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.route(x)
        for i, expert in enumerate(self.experts):
            mask = index == i
            if mask.any():
                x = x + (weight * mask).unsqueeze(1) * expert(x)
        return x


class Nonzero(Experts):
    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.route(x)
        result = x
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(index == i).squeeze(1)
            result = result.index_add(0, rows, weight[rows].unsqueeze(1) * expert(x[rows]))
        return result


@FACTS
def experts_that_every_rank_runs_train_as_in_one_process() -> None:
    for model in (Masked, OneHot, IndexAdd):
        train(model, [])


@FACTS
def rows_that_are_chosen_by_data_train_as_in_one_process() -> None:
    train(Nonzero, [])


@FACTS
def a_branch_on_data_is_refused_under_fullgraph() -> None:
    model = graph_fsdp.compile(IfAny(), backend="eager")
    with pytest.raises(GraphBreakError, match=r"(?s)cannot be traced in one graph.*mask.any.*fullgraph=False"):
        model(batch(0, 0))


# torch.cond: the parameters of both branches are gathered, one branch computes


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.small = nn.Linear(WIDTH, WIDTH)
        self.large = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cond(x.sum() > 0, lambda v: self.small(v), lambda v: self.large(v), (x,))


@FACTS
def ranks_take_different_branches_of_torch_cond() -> None:
    model = train(Conditional, [])
    gathers = graph_fsdp.inspect(model).forward.stages["free"].body.count("all_gather_start")
    assert gathers >= 1


test_on_two_ranks = FACTS.on(2)
