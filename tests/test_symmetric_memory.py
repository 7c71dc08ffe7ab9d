"""Slots in symmetric memory, with stand-ins for torch's: what is allocated, when, by which ranks; what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import MLP
from symmetric import Asked, standing_in
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import graph_fsdp
from graph_fsdp import UnsupportedError, compat
from graph_fsdp.passes.transforms import slots
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime.ranks.agreement import RankDisagreement

FACTS = Facts(__name__)
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def compiled(**options: Any) -> Any:
    torch.manual_seed(0)
    return graph_fsdp.compile(MLP(depth=3), backend="eager", **options)


def step(model: nn.Module) -> None:
    model(torch.ones(4, 16)).sum().backward()


@pytest.mark.usefixtures("fake_group")
def test_each_slot_is_allocated_and_exchanged_once() -> None:
    model = compiled()
    with standing_in() as asked:
        model.set_symm_mem_for_comm()
        assert (asked.backends, asked.exchanged) == (["NCCL"], [])
        step(model)
        memory = engine_of(model).registered["symmetric"]
        pieces = [piece.nbytes for piece in memory.pieces]
        report = graph_fsdp.inspect(model)
        assert len(pieces) == max(len(report.forward.slots), len(report.backward.slots)) > 1
        assert asked.exchanged == [(8, nbytes) for nbytes in pieces] and asked.pools == ["cpu"] * len(pieces)
        step(model)
        assert len(asked.exchanged) == len(pieces), "they stay"


@pytest.mark.usefixtures("fake_group")
def test_symmetric_memory_is_freed_with_the_slots() -> None:
    model = compiled()
    with standing_in() as asked:
        model.set_symm_mem_for_comm()
        step(model)
        memory = engine_of(model).registered["symmetric"]
        alive = [weakref.ref(piece.untyped_storage()) for piece in memory.pieces]
        exchanged = len(asked.exchanged)
        model.set_allocate_memory_from_process_group_for_comm(False)
        gc.collect()
        assert not memory.pieces and engine_of(model).counter.slots.current == 0
        assert alive and not any(storage() for storage in alive)
        step(model)
        assert len(asked.exchanged) == exchanged, "slots are those of each run again"


@pytest.mark.usefixtures("fake_group")
def test_with_a_number_of_ranks_to_reshard_to_both_groups_exchange_a_slot() -> None:
    model = compiled(reshard_after_forward=2)
    with standing_in() as asked:
        model.set_symm_mem_for_comm()
        step(model)
    sizes = [size for size, _ in asked.exchanged]
    assert sizes == [8, 2] * len(engine_of(model).registered["symmetric"].pieces)


@pytest.mark.usefixtures("fake_group")
def test_what_outlives_a_run_and_what_is_reduced_has_ordinary_memory() -> None:
    model = compiled(reshard_after_forward=False)
    with standing_in() as asked, mock.patch.object(compat, "allocate_from_group") as of_group:
        model.set_symm_mem_for_comm()
        step(model)
    landings = {row.nbytes for row in graph_fsdp.inspect(model).forward.slots.slots}
    assert {nbytes for _, nbytes in asked.exchanged} == landings, "kept buckets are not among them"
    of_group.assert_not_called()


def refused(model: Any, error: type[Exception], match: str, *given: str, **instead: Any) -> None:
    settings = engine_of(model).settings
    with standing_in(**instead) as asked, pytest.raises(error, match=match):
        model.set_symm_mem_for_comm(*given)
    assert engine_of(model).settings is settings and not engine_of(model).registered and asked == Asked()


@pytest.mark.usefixtures("fake_group")
def test_where_there_is_none_nothing_is_changed() -> None:
    model = compiled()
    with pytest.raises(UnsupportedError, match=r"'NCCL' and gather parameters on cpu, which '.*' does; leave it out"):
        model.set_symm_mem_for_comm()
    assert not engine_of(model).settings.registered_memory and not engine_of(model).registered
    refused(model, UnsupportedError, r"set_symm_mem_for_comm\('CUDA'\): backend must be 'NCCL'", "CUDA")
    refused(model, UnsupportedError, r"torch 2\.\S+ has no pool of such memory", get_mem_pool=None)
    model.set_custom_all_gather(DefaultAllGather())
    refused(model, ValueError, "set_custom_all_gather was called, and that object allocates")


@pytest.mark.usefixtures("fake_group")
def test_slots_of_cuda_graphs_are_not_symmetric() -> None:
    model = compiled()
    engine_of(model).cuda_graphs = object()
    refused(model, UnsupportedError, "slots are those of CUDA graphs")


def trained(model: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() for p in model.parameters()]


@FACTS
def ranks_exchange_the_same_slots_in_the_same_order_and_train_the_same_numbers() -> None:
    for policy in (MixedPrecisionPolicy(), BFLOAT16):
        expected = trained(compiled(mp_policy=policy))
        model = compiled(mp_policy=policy)
        with standing_in() as asked:
            model.set_symm_mem_for_comm()
            found = trained(model)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        of_ranks: list[Any] = [None, None]
        dist.all_gather_object(of_ranks, asked.exchanged)
        assert of_ranks[0] == of_ranks[1] and of_ranks[0]


@FACTS
def a_shard_is_sent_from_the_rank_s_own_part_of_a_symmetric_slot() -> None:
    model, sent = compiled(), []

    def gather(pairs: Any, *args: Any, of_torch: Any = compat.grouped, **given: Any) -> Any:
        sent.extend(compat.is_symmetric(part) for _, part in pairs)
        return of_torch(pairs, *args, **given)

    with standing_in(), mock.patch.object(compat, "grouped", gather):
        model.set_symm_mem_for_comm()
        with torch.no_grad():
            model(torch.ones(4, 16))
    assert sent and all(sent)


@FACTS
def ranks_whose_slots_differ_are_told() -> None:
    def larger(*args: Any, assign: Any = slots.assign) -> Any:
        taken, sizes = assign(*args)
        return taken, [size * 2 for size in sizes] if dist.get_rank() else sizes

    model = compiled()
    with standing_in() as asked, mock.patch.object(slots, "assign", larger):
        model.set_symm_mem_for_comm()
        with pytest.raises(RankDisagreement, match="slots of"):
            step(model)
    assert not asked.exchanged


test_on_two_ranks = FACTS.on(2)
