"""No program reads what it has not waited for, or writes or frees what a collective under way still reads: each option
trains to the same bits, whether collectives happen when they start or when they are waited for."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from case_strategies import cases
from checked import may_refuse
from extreme_lanes import EarlyLane, KeepingLateLane, LateLane, bits
from hypothesis import HealthCheck, Phase, given, seed, settings
from lasting_ranks import Raised, make_mesh, outcome_of
from marks import mostly_long
from models import MLP
from random_cases import Case
from random_training import Outcome, Sharded
from reference import fsdp2
from simulated_group import SimulatedGroup, simulated_group
from simulated_link import INSTANT, Message
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import graph_fsdp
from graph_fsdp.compat import all_gather_single, reduce_scatter_single
from graph_fsdp.passes import default_pipeline

RANKS = 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class EitherLane:
    """Of the ``kind`` that there is when a collective starts."""

    kind: ClassVar[type[EarlyLane | LateLane]] = EarlyLane

    def start(self, seconds: float, messages: Sequence[Message], timed: bool) -> tuple[dist.Work, Callable[[], float]]:
        return self.kind().start(seconds, messages, timed)

    def close(self) -> None:
        pass


def late_and_early(make: Callable[[], Callable[[], Any]], late: type[LateLane] = LateLane) -> list[Any]:
    """What a training returns on one of four ranks whose collectives are late, and when it is repeated with early ones.
    ``make`` makes it, and it begins each time from the same values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedGroup, "host_lane", EitherLane)
        with simulated_group(RANKS, INSTANT, rank=1):
            torch._dynamo.reset()
            torch.manual_seed(0)
            train, found = make(), []
            for kind in (late, EarlyLane):
                patch.setattr(EitherLane, "kind", kind)
                found.append(train())
            return found


# The lanes find what they are there for


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(SimulatedGroup, "host_lane", LateLane)
    with simulated_group(RANKS, INSTANT, rank=1):
        yield


def test_a_result_is_not_there_before_its_wait(late: None) -> None:
    full, shard = torch.zeros(8), torch.ones(2)
    work = all_gather_single(full, shard, async_op=True)
    assert full.isnan().all()
    work.wait()
    assert torch.equal(full, torch.ones(8))


def test_a_gather_of_a_part_of_its_output_leaves_that_part(late: None) -> None:
    full = torch.zeros(8)
    full[2:4] = 1
    work = all_gather_single(full, full[2:4], async_op=True)
    assert torch.equal(full.isnan(), torch.tensor([1, 1, 0, 0, 1, 1, 1, 1]).bool())
    work.wait()
    assert torch.equal(full, torch.ones(8))


def test_an_input_that_is_written_under_way_is_found(late: None) -> None:
    full, shard = torch.ones(8), torch.zeros(2)
    work = reduce_scatter_single(shard, full, async_op=True)
    full.zero_()
    with pytest.raises(AssertionError, match="an input of reduce_scatter was written between its start and its wait"):
        work.wait()


@pytest.mark.parametrize("freed", ["input", "output"])
def test_memory_that_is_given_back_under_way_is_found(late: None, freed: str) -> None:
    tensors = {"output": torch.zeros(8), "input": torch.ones(2)}
    work = all_gather_single(tensors["output"], tensors["input"], async_op=True)
    del tensors[freed]
    with pytest.raises(AssertionError, match=f"the memory of an {freed} of all_gather was given back"):
        work.wait()


# Programs


def training(shard: Callable[[nn.Module], nn.Module]) -> Callable[[], list[Tensor]]:
    """Three steps, the first of two micro-batches, and an evaluation; losses and shards."""
    model = shard(MLP(depth=3))
    shards = [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]
    first = [value.clone() for value in shards]

    def train() -> list[Tensor]:
        for value, before in zip(shards, first, strict=True):
            value.copy_(before)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(0)
        seen = []
        for microbatches in (2, 1, 1):
            for _ in range(microbatches):
                loss = model(torch.randn(4, 16, generator=generator)).square().mean()
                loss.backward()
                seen.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model(torch.randn(4, 16, generator=generator)))
        return [*seen, *(value.clone() for value in shards)]

    return train


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "ZeRO-2": {"reshard_after_forward": False},
    "int": {"reshard_after_forward": 2},
    "serial": {"passes": default_pipeline(prefetch=0, reductions_in_flight=1)},
    "three ahead": {"passes": default_pipeline(prefetch=3, reductions_in_flight=4)},
    "post": {"passes": default_pipeline(bucket="none", prefetch=BackwardPrefetch.BACKWARD_POST)},
    "small buckets": {"passes": default_pipeline(bucket=700)},
    "budget": {"passes": default_pipeline(prefetch=2, budget=10_000)},
    "bf16": {"mp_policy": BF16},
    "fp16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "checkpointing": {"activation_checkpointing": "unit"},
    "activation offload": {"activation_checkpointing": "offload"},
    "whole": {"regions": "whole", "backend": "inductor"},
    "HSDP": {},
    "HSDP, bf16": {"mp_policy": BF16},
    "HSDP, int": {"reshard_after_forward": 2},
}
SHORT = ["default", "three ahead", "budget", "fp16", "offload", "HSDP, bf16"]


def compiled(name: str, model: nn.Module) -> nn.Module:
    mesh = None
    if name.startswith("HSDP"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(offload|OffloadPolicy).*")
        return graph_fsdp.compile(model, mesh, **{"backend": "eager", **OPTIONS[name]})


@pytest.mark.parametrize("name", mostly_long(OPTIONS, SHORT))
def test_options(name: str) -> None:
    late, early = late_and_early(functools.partial(training, functools.partial(compiled, name)))
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(early, late, strict=True))


def case_training(case: Case) -> Callable[[], Outcome | Raised]:
    mesh = make_mesh(case.mesh)
    sharded = functools.cache(lambda: Sharded(case, mesh, 1, make_mesh))
    return lambda: outcome_of(lambda: sharded().train())


KINDS = ("shard", "replicate", "hybrid")


@pytest.mark.parametrize("number", mostly_long(range(2, 6), [2]))
def test_random_cases(number: int) -> None:
    @seed(number)
    @settings(
        max_examples=10 if number > 2 else 3,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    # Of the first rank's values only the rank that sends them is simulated.
    @given(cases(RANKS, KINDS).filter(lambda case: not {"sync_module_states", "values"} & set(case.options.compile)))
    def check(case: Case) -> None:
        late, early = late_and_early(functools.partial(case_training, case), KeepingLateLane)
        for seen in (early, late):
            assert not isinstance(seen, Raised) or may_refuse(case, seen.types, seen.message), f"{seen}\n{case!r}"
        assert type(early) is type(late)
        if isinstance(early, Outcome):
            for a, b in zip(values(early), values(late), strict=True):
                assert torch.equal(bits(a), bits(b)), f"{a} {b}\n{case!r}"

    check()


def values(seen: Outcome) -> list[Tensor]:
    leaves = pytree.tree_leaves(vars(seen))
    return [torch.as_tensor(leaf) for leaf in leaves if leaf is not None]


def test_fsdp2() -> None:
    def train() -> list[Tensor]:  # of a new model: the root's parameters stay whole after an evaluation
        torch.manual_seed(0)
        return training(fsdp2)()

    late, early = late_and_early(lambda: train)
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))
