"""The simulated allocator, by cases worked out by hand from the rules of torch's; and what planned steps reserve."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import pytest
import torch
from models import MLP

from graph_fsdp.planning import Plan, plan
from graph_fsdp.planning.allocator import Block, CachingAllocator, replay

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("nbytes", "reserved", "expandable"),
    [
        (1, 2 * MIB, 2 * MIB),
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 20 * MIB),
        (11 * MIB + 1, 12 * MIB, 20 * MIB),
        (30 * MIB, 30 * MIB, 40 * MIB),
    ],
)
def test_a_segment_is_as_large_as_torch_makes_it(nbytes: int, reserved: int, expandable: int) -> None:
    for is_expandable, expected in ((False, reserved), (True, expandable)):
        allocator = CachingAllocator(expandable_segments=is_expandable)
        block = allocator.allocate(nbytes)
        assert allocator.reserved == expected
        allocator.free(block)
        assert (allocator.reserved, allocator.allocated) == (expected, 0)


def test_sizes_are_rounded_to_512_bytes_and_a_rest_of_up_to_a_mebibyte_stays_with_a_large_block() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(513).nbytes == 1024
    block = allocator.allocate(12 * MIB - 512 * KIB)
    assert block.nbytes == 12 * MIB
    growing = CachingAllocator(expandable_segments=True)
    assert growing.allocate(12 * MIB - 512 * KIB).nbytes == 12 * MIB - 512 * KIB


@pytest.mark.parametrize("expandable", [False, True])
def test_the_smallest_free_block_that_is_large_enough_is_taken(expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    blocks = [allocator.allocate(size * MIB) for size in (60, 20, 40, 20, 100, 20)]
    reserved = allocator.reserved
    for index in (0, 2, 4):
        allocator.free(blocks[index])
    taken = allocator.allocate(35 * MIB)
    assert taken.address == blocks[2].address or taken is blocks[2]
    assert allocator.reserved == reserved


@pytest.mark.parametrize(("expandable", "reserved"), [(False, 300), (True, 220)])
def test_free_neighbours_merge_and_only_a_range_grows(expandable: bool, reserved: int) -> None:
    """Three blocks of 40 are freed. Segments cannot hold 180 together; a range of 120 grows by 100 to hold 220."""
    allocator = CachingAllocator(expandable_segments=expandable)
    blocks = [allocator.allocate(40 * MIB) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    allocator.allocate(180 * MIB if not expandable else 220 * MIB)
    assert allocator.reserved == reserved * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_no_stream_gets_what_another_has_freed(expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    allocator.free(allocator.allocate(40 * MIB, "one"))
    allocator.allocate(40 * MIB, "two")
    assert allocator.reserved == 80 * MIB
    allocator.allocate(40 * MIB, "one")
    assert allocator.reserved == 80 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap_and_nothing_is_lost(expandable: bool) -> None:
    generator = random.Random(0)
    allocator = CachingAllocator(expandable_segments=expandable)
    live: list[Block] = []
    for _ in range(2000):
        if live and generator.random() < 0.5:
            allocator.free(live.pop(generator.randrange(len(live))))
        else:
            live.append(allocator.allocate(2 ** generator.randrange(8, 28) + generator.randrange(1000)))
        assert allocator.allocated == sum(block.nbytes for block in live) <= allocator.reserved
    for small in (False, True):
        spans = sorted((b.address, b.address + b.nbytes) for b in live if b.pool.small is small)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for block in live:
        allocator.free(block)
    whole = CachingAllocator(expandable_segments=expandable)
    assert allocator.allocated == whole.allocated == 0
    if expandable:  # one free block is left of each pool
        before = allocator.reserved
        allocator.allocate(before // 2)
        assert allocator.reserved == before


@functools.cache
def small_plan(optimizer: object = "adamw", **options: object) -> Plan:
    return plan(
        lambda: MLP(depth=2, width=512),
        (torch.ones(4096, 512),),
        mesh_shape=(8,),
        hardware="h100",
        loss=torch.sum,
        optimizer=optimizer,  # type: ignore[arg-type]
        backend="eager",
        **options,
    )


def test_a_planned_step_reserves_what_is_live_and_what_is_kept_between_steps() -> None:
    plans = {optimizer: small_plan(optimizer) for optimizer in (None, "momentum", "adamw", "adamw_foreach")}
    shards = plans[None].memory["shards"]
    for made in plans.values():
        graphs = max(view.memory.peak for view in made._views if view.memory is not None)
        # What is rounded up, in blocks of 512 bytes.
        assert graphs <= made.reserved.allocated - (made.memory.get("optimizer", 0) if made.memory else 0) + 10 * 512
        assert made.reserved.allocated <= made.reserved.nbytes
        assert made.summary()["reserved_nbytes"] == made.reserved.nbytes
    kept = {optimizer: sum(made.step().states) for optimizer, made in plans.items()}
    assert kept[None] == 0 and 2 * kept["momentum"] == kept["adamw"] == kept["adamw_foreach"]
    assert 0 < kept["momentum"] <= shards
    assert sum(plans["adamw_foreach"].step().temporaries) == kept["momentum"]
    assert not plans["adamw"].step().temporaries


def test_steps_end_as_they_begin() -> None:
    """All but shards, gradients and optimizer state is freed, and the steps after the second reserve nothing."""
    made = small_plan()
    step = made.step()
    assert replay(step).steps <= 3
    without = dataclasses.replace(step, states=())
    assert replay(without).nbytes <= replay(step).nbytes
