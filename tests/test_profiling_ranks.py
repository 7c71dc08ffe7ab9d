"""Profiles on two gloo ranks: equal on both, whatever each measured, and nothing of training changes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from facts import Facts
from models import CLASSES, MLP, WIDTH, Case, loss_of, vectors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import graph_fsdp
from graph_fsdp.passes import default_pipeline
from graph_fsdp.profiling.profiling import Ran

FACTS = Facts(__name__)


def of_all_ranks(found: graph_fsdp.Profile) -> list[graph_fsdp.Profile]:
    gathered: list[graph_fsdp.Profile] = [found, found]
    dist.all_gather_object(gathered, found)
    return gathered


@FACTS
def all_ranks_hold_the_same_profile_bit_for_bit_and_each_the_schedule_that_it_has_measured() -> None:
    found = graph_fsdp.profile(graph_fsdp.compile(MLP(), backend="eager"), torch.ones(4, 16), steps=3, warmup=1)
    profiles = of_all_ranks(found)
    first, second = profiles
    assert first == second and first.to_json() == second.to_json()
    assert found.ranks == 2 and len(found.measurements.collectives) >= 4
    assert all(row.seconds > 0 for row in [*found.regions, *found.collectives])
    schedules = [profile.schedule for profile in profiles if profile.schedule is not None]
    assert [measured.title for _, measured in schedules] == ["measured, rank 0 of 2", "measured, rank 1 of 2"]
    names = [[(x.name, x.category, x.lane) for x in measured.slices] for _, measured in schedules]
    assert names[0] == names[1] and schedules[0][0] == schedules[1][0]


@FACTS
def of_each_region_the_slowest_rank_is_named_and_the_mean_is_taken() -> None:
    rank = dist.get_rank()
    ran = Ran()
    ran.means = {"a": 1.0 + rank, "b": 4.0 - 2 * rank, "wait": 3.0 * rank}
    ran.steps = dict.fromkeys(("a", "b"))
    ran.collectives = {"gather": [5.0 - rank, 1.0 + rank]}
    if rank == 1:
        ran.means["on one rank alone"] = 9.0
    ran.share(dist.group.WORLD, rank, first=0)
    if rank == 0:
        assert ran.means == {"a": 1.5, "b": 3.0, "wait": 1.5}
        assert ran.slowest == {"a": (1, 2.0), "b": (0, 4.0)}
        assert ran.collectives == {"gather": [4.0, 1.0]}


@FACTS.long
def all_ranks_of_a_mesh_of_two_dimensions_hold_the_same_profile() -> None:
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape)
        model = graph_fsdp.compile(MLP(), mesh, backend="eager")
        first, second = of_all_ranks(graph_fsdp.profile(model, torch.ones(4, 16), steps=2, warmup=1))
        assert first == second and first.ranks == 2


@FACTS
def ranks_with_other_batch_shapes_get_the_first_ranks_graphs() -> None:
    model = graph_fsdp.compile(MLP(depth=1), backend="eager", dynamic=False)
    rows = [torch.ones(number, WIDTH) for number in ((5, 5, 4), (5, 6, 7))[dist.get_rank()]]
    for x in rows[:2]:
        model(x).sum().backward()  # the second rank has one graph more
    found = graph_fsdp.profile(model, rows[2], steps=2, warmup=1)
    first, second = of_all_ranks(found)
    assert first == second
    shapes = [key for key in found.measurements.compute if key.startswith("aten.addmm.default")]
    assert any("float32[4, 16]" in key for key in shapes) and not any("float32[7, 16]" in key for key in shapes)
    assert {row.graph for row in found.regions} == {1}


@FACTS
def a_model_trains_as_if_it_had_not_been_profiled() -> None:
    """Which is as FSDP2 trains it."""
    plain, profiled = (trained(RANDOM_AND_BUFFERED, profiled=profiled) for profiled in (False, True))
    assert "1.running_mean" in plain
    for (key, a), b in zip(plain.items(), profiled.values(), strict=True):
        assert torch.equal(local(a), local(b)), key


def with_dropout_and_statistics() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, CLASSES))


RANDOM_AND_BUFFERED = Case(with_dropout_and_statistics, vectors)


def trained(case: Case, *, profiled: bool) -> dict[str, torch.Tensor]:
    model = graph_fsdp.compile(case.model(), backend="eager") if profiled else fully_shard(case.model())
    optimizer = AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(7 + dist.get_rank())
    for step in range(3):
        batch = case.batch(4, 2 * step + dist.get_rank())
        loss_of(model, batch).backward()
        if profiled and step == 1:
            graph_fsdp.profile(model, batch["x"], steps=2, warmup=1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@FACTS.long
def a_model_scheduled_with_a_profile_trains_to_the_same_values() -> None:
    found = graph_fsdp.profile(graph_fsdp.compile(model_of_seed(), backend="eager"), torch.ones(4, 16), steps=2)
    results = []
    for measured in (None, found):
        model = graph_fsdp.compile(model_of_seed(), backend="eager", passes=default_pipeline(measured=measured))
        model(torch.ones(4, 16)).sum().backward()
        results.append([local(p.grad) for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and results[0]


def model_of_seed() -> nn.Module:
    torch.manual_seed(2)
    return MLP(depth=3)


test_on_two_ranks = FACTS.on(2)
