"""What is copied for collectives: nothing where a parameter has a message of its own, in the printed graph, in bytes,
and in numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from launch import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import graph_fsdp
from graph_fsdp.passes import Role
from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.runtime.comm.collectives import (
    AllGather,
    mean_of,
    pack_gradients,
    start_all_gather,
)
from graph_fsdp.runtime.comm.quantized import start_reduce_scatter
from graph_fsdp.runtime.comm.unpacking import unpack

Compared = Callable[[], dict[str, tuple[Tensor, Tensor]]]
WIDTH, RANKS = 1024, 8
LARGE, SMALL = WIDTH * WIDTH, WIDTH


class Block(nn.Module):
    """One large parameter and two small ones."""

    def __init__(self, rows: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def traced(mp_policy: MixedPrecisionPolicy | None = None, rows: int = WIDTH) -> graph_fsdp.GraphReport:
    policy = mp_policy or MixedPrecisionPolicy()
    model = graph_fsdp.compile(Block(rows), backend="eager", mp_policy=policy, reshard_after_forward=True)
    model(torch.ones(2, WIDTH)).sum().backward()
    return graph_fsdp.inspect(model)


def reduction(report: graph_fsdp.GraphReport) -> str:
    (line,) = (line for line in report.backward.stages["free"].body.splitlines() if "reduce_scatter_start" in line)
    call = line.partition("torch.ops.graph_fsdp.")[2]
    return call.replace(f"'{dist.group.WORLD.group_name}'", "group")


@pytest.mark.usefixtures("fake_group")
def test_a_large_gradient_is_a_message_by_itself() -> None:
    assert_expected_inline(
        reduction(traced()),
        """reduce_scatter_start.default([t_4, getitem_4, getitem_5], torch.float32, 8, group, 1, [1, 2])""",
    )


@pytest.mark.usefixtures("fake_group")
def test_float32_copies_what_shares_a_message_and_nothing_else() -> None:
    report = traced()
    packed = 2 * SMALL * 4  # both parameters of the norm, in bytes
    assert report.forward.copied_nbytes == 2 * packed, "read and written once, to be unpacked"
    assert report.backward.copied_nbytes == 4 * packed, "and to be packed"
    assert f"copied by packing and unpacking: {2 * packed:,} bytes" in str(report)


@pytest.mark.usefixtures("fake_group")
def test_bfloat16_reads_and_writes_the_shard_once_per_gather() -> None:
    report = traced(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    cast = (LARGE + 2 * SMALL) // RANKS * (4 + 2)
    unpacked = 2 * (2 * SMALL * 2)
    assert report.forward.copied_nbytes == cast + unpacked
    reduced = (LARGE + 2 * SMALL) * (2 + 4)  # gradients are cast to float32 for their reduction
    assert report.backward.copied_nbytes == cast + unpacked + reduced


@pytest.mark.usefixtures("fake_group")
def test_a_gradient_with_unequal_chunks_is_padded_in_a_copy() -> None:
    rows = WIDTH - 3
    even, padded = traced(), traced(rows=rows)
    more = padded.backward.copied_nbytes - even.backward.copied_nbytes
    assert more == (rows + WIDTH) * WIDTH * 4, "read, and written with its padding"


@pytest.mark.usefixtures("fake_group")
def test_a_reduction_in_other_messages_is_rejected() -> None:
    class OneMessage(graph_fsdp.passes.GraphPass):
        name = "one_message"
        phases = ("backward",)

        def run(self, graph: graph_fsdp.passes.Graph, context: graph_fsdp.passes.PassContext) -> None:
            (start,) = graph.with_role(Role.REDUCE_START)
            start.args = start.args[:4]

    pipeline = graph_fsdp.passes.default_pipeline().insert_after("free", OneMessage())
    model = graph_fsdp.compile(Block(), backend="eager", passes=pipeline)
    with pytest.raises(graph_fsdp.VerificationError, match="in the same messages on all ranks"):
        model(torch.ones(2, WIDTH)).sum().backward()


# Numbers


def mean_gradients(rows: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Parameter → its gradient, and the mean over ranks of those that each rank computes alone."""
    torch.manual_seed(0)
    alone = Block(rows)
    model = graph_fsdp.compile(_copy(alone, rows), backend="eager")
    batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for each in (alone, model):
        each(batch).square().sum().backward()
    found = {}
    for (name, p), sharded in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert p.grad is not None and isinstance(sharded.grad, DTensor)
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        found[name] = (sharded.grad.full_tensor(), p.grad)
    return found


def _copy(model: Block, rows: int) -> Block:
    other = Block(rows)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.long
def test_gradients_are_the_mean_on_three_ranks() -> None:
    for found in run_ranks(mean_gradients, 3, WIDTH):
        for own, mean in found.values():
            torch.testing.assert_close(own, mean, rtol=1e-5, atol=1e-6)


class Operators(TorchDispatchMode):
    """Names of the operators that run, and elements of the tensors that they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.allocated: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        returns = func._schema.returns
        if isinstance(result, Tensor) and all(value.alias_info is None for value in returns):
            self.allocated.append(result.numel())
        return result


def exchanged() -> dict[str, tuple[Tensor, Tensor]]:
    """What an exchange between two ranks yields, and what the process group's reduce-scatter does."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
        pending = start_reduce_scatter([grad], dtype, dist.group.WORLD, mean_of(dtype, 2))
        pending.finish()
        expected, average = grad.new_empty(3, 5), dtype is not torch.float64
        dist.reduce_scatter_tensor(expected, grad, op=dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        found[str(dtype)] = (pending.buffer.view(3, 5), expected if average else expected / 2)
    return found


def exchanged_in_a_wider_type() -> dict[str, tuple[Tensor, Tensor]]:
    """The same, of bfloat16 gradients that are reduced in float32: alone, with unequal chunks, transposed, together."""
    found = {}
    shapes = {"alone": [(6, 5)], "uneven": [(5, 5)], "transposed": [(6, 5)], "together": [(6, 5), (3,)]}
    for name, sizes in shapes.items():
        generator = torch.Generator().manual_seed(dist.get_rank())
        grads = [torch.randn(size, generator=generator).to(torch.bfloat16) for size in sizes]
        grads = [grad.t().contiguous().t() for grad in grads] if name == "transposed" else grads
        kept = [grad.clone() for grad in grads]
        pending = start_reduce_scatter(grads, torch.float32, dist.group.WORLD, mean_of(torch.float32, 2))
        pending.finish()
        packed = torch.empty(2 * pending.buffer.numel())
        pack_gradients(grads, packed.view(2, -1))
        expected = packed.new_empty(len(packed) // 2)
        dist.reduce_scatter_tensor(expected, packed, op=dist.ReduceOp.AVG)
        found[name] = pending.buffer, expected
        found[f"{name}, read only"] = (
            torch.cat([g.reshape(-1) for g in grads]),
            torch.cat([k.reshape(-1) for k in kept]),
        )
    return found


def gathered_in_another_type() -> dict[str, tuple[Tensor, Tensor]]:
    """A bucket of a message in place and one to be unpacked, gathered in a narrower type, and the cast of the whole."""
    layout = GatherLayout.make([0, 16, 32], [16, 3, 5], 48, 2, [0, 16, 16, 32])
    shards = [torch.randn(48, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    own = shards[dist.get_rank()]
    found = {}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        pending = start_all_gather([own[0:16], own[16:19], own[32:37]], layout, dtype, dist.group.WORLD)
        pending.finish()
        for begin, numel in zip(layout.offsets, layout.numels, strict=True):
            full = torch.cat([shard[begin : begin + numel].to(dtype) for shard in shards])
            found[f"{dtype} at {begin}"] = pending.buffer[2 * begin : 2 * (begin + numel)].float(), full.float()
    return found


def gathered_from_where_shards_are_now() -> dict[str, tuple[Tensor, Tensor]]:
    """Runs of one gather: of shards in one slice, twice, in another slice, apart from each other, and back again."""
    layout = GatherLayout.make([0, 4], [3, 5], 9, 2)

    def memory(seed: int, rank: int) -> Tensor:
        return torch.randn(32, generator=torch.Generator().manual_seed(10 * seed + rank))

    own, found = [memory(seed, dist.get_rank()) for seed in range(2)], {}
    runs = {"one": (0, 8, 12), "again": (0, 8, 12), "behind": (0, 16, 20), "another": (1, 8, 12), "apart": (1, 20, 2)}
    gather = AllGather([own[0][:3], own[0][4:9]], layout, torch.float32, dist.group.WORLD)
    for name, (seed, first, second) in [*runs.items(), ("back", (0, 8, 12))]:
        pending = gather.start([own[seed][first : first + 3], own[seed][second : second + 5]])
        pending.finish()
        for gathered, begin, numel in [(0, first, 3), (8, second, 5)]:
            full = torch.cat([memory(seed, rank)[begin : begin + numel] for rank in range(2)])
            found[f"{name} at {begin}"] = pending.buffer[gathered : gathered + 2 * numel], full
    return found


def gathered_of_a_transposed_shard() -> dict[str, tuple[Tensor, Tensor]]:
    """Runs of one gather of a shard that is no slice: a tensor extension may give such a one."""
    own = torch.arange(12.0).view(4, 3) + 100 * dist.get_rank()
    gather = AllGather([own.t()], GatherLayout.make([0], [12], 12, 2), torch.float32, dist.group.WORLD)
    full, found = torch.cat([(torch.arange(12.0).view(4, 3) + 100 * rank).t().reshape(-1) for rank in range(2)]), {}
    for run in ("first", "second"):
        pending = gather.start([own.t()])
        pending.finish()
        found[run] = pending.buffer, full
    return found


COMPARED: dict[str, Compared] = {
    "gathered of a transposed shard": gathered_of_a_transposed_shard,
    "gathered from where shards are now": gathered_from_where_shards_are_now,
    "exchanged": exchanged,
    "exchanged in a wider type": exchanged_in_a_wider_type,
    "gathered in another type": gathered_in_another_type,
    "gradients": functools.partial(mean_gradients, WIDTH),
    "gradients of unequal chunks": functools.partial(mean_gradients, WIDTH - 3),
}


def all_compared() -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
    """On a rank."""
    return {name: compare() for name, compare in COMPARED.items()}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, dict[str, tuple[Tensor, Tensor]]]]:
    return run_ranks(all_compared, 2)


@pytest.mark.parametrize("name", COMPARED)
def test_two_ranks_have_the_bits_of_the_groups_own_collectives(
    on_two_ranks: list[dict[str, dict[str, tuple[Tensor, Tensor]]]], name: str
) -> None:
    for found in on_two_ranks:
        assert found[name] and all(torch.equal(own, groups) for own, groups in found[name].values()), found[name]


@pytest.mark.usefixtures("fake_group")
def test_shards_are_cast_to_where_they_are_gathered_and_nowhere_else() -> None:
    layout = GatherLayout.make([0, 16], [16, 3], 32, RANKS, [0, 16, 16, 16])
    shard = torch.randn(32)
    with Operators() as ran:
        start_all_gather([shard[0:16], shard[16:19]], layout, torch.bfloat16, dist.group.WORLD)
    assert ran.names.count("aten::_foreach_copy_") == 1
    assert ran.allocated == [RANKS * 32, RANKS * 16], "the bucket and what is to be unpacked"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_what_is_unpacked_is_written_to_its_own_places(dtype: torch.dtype) -> None:
    message = GatherLayout.make([0, 18, 24], [16, 3, 5], 48, RANKS, [0, 16, 16, 16]).messages[1]
    landing = torch.arange(RANKS * 16).to(dtype)
    slot = torch.zeros(1 + RANKS * 48, dtype=dtype)
    buffer = slot[1:]
    unpack(landing, buffer, message, RANKS)
    ranks = landing.view(RANKS, 16)
    for offset, numel in [(18, 3), (24, 5)]:
        parameter = ranks[:, offset - 16 : offset - 16 + numel].reshape(-1)
        assert torch.equal(buffer[RANKS * offset : RANKS * (offset + numel)], parameter)
    assert not slot[: 1 + RANKS * 16].any() and not buffer[RANKS * 32 :].any(), "other messages' are not written"


def test_what_lands_in_a_buffer_that_was_unpacked_to_before_is_read_as_it_lands() -> None:
    """Slots hold what lands, and what is used: one buffer may be both, one after the other, for messages that are
    alike, and several messages land in one buffer."""
    first, second = GatherLayout.make([0, 2, 4, 9, 12], [2, 2, 5, 3, 3], 15, 4, [0, 9, 9, 6]).messages
    buffers = [torch.zeros(60), torch.zeros(60)]
    for run in range(4):
        landing, buffer = buffers if run % 2 else buffers[::-1]
        torch.randn(60, out=landing)
        expected = []
        for message, begin in (first, 0), (second, 36):
            unpack(landing, buffer, message, 4, begin)
            rows = landing[begin : begin + 4 * message.numel].view(4, -1)
            expected += [piece.reshape(-1) for piece in rows.split(message.splits, 1)]
        assert torch.equal(buffer, torch.cat(expected))


@pytest.mark.parametrize(
    ("offsets", "numels", "runs"),
    [
        ([0, 2, 4, 9], [2, 2, 5, 5], [(0, 2, 2, 2), (4, 5, 2, 5)]),
        ([0, 4, 8, 13, 18], [3, 3, 3, 3, 2], [(0, 3, 3, 4), (13, 3, 1, 0), (18, 2, 1, 0)]),
        ([1, 7, 7, 9], [2, 0, 2, 2], [(1, 2, 1, 0), (7, 0, 1, 0), (7, 2, 2, 2)]),
    ],
)
def test_chunks_of_one_size_at_equal_distances_are_unpacked_by_one_copy(
    offsets: list[int], numels: list[int], runs: list[tuple[int, int, int, int]]
) -> None:
    message = GatherLayout.make(offsets, numels, 20, 4).messages[0]
    assert message.runs == runs
    landing, buffer = torch.randn(80), torch.full((80,), -1.0)
    unpack(landing, buffer, message, 4)
    with Operators() as ran:
        unpack(landing, buffer, message, 4)
    assert ran.names == ["aten::_foreach_copy_"] and not ran.allocated
    expected = torch.full((80,), -1.0)  # in gaps
    for offset, numel in zip(offsets, numels, strict=True):
        expected[4 * offset : 4 * (offset + numel)] = landing.view(4, 20)[:, offset : offset + numel].reshape(-1)
    assert torch.equal(buffer, expected)


def test_a_buffer_is_unpacked_as_each_message_says() -> None:
    """A slot's buffer is used again: by messages of equal places on more ranks, and of other places."""
    buffer = torch.zeros(48)
    messages = {  # of a shard of 6 elements for 8 ranks, and of 12 for 4
        (8, 0): GatherLayout.make([0, 1, 3], [1, 2, 3], 6, 8, [0, 3, 3, 3]),
        (4, 0): GatherLayout.make([0, 1, 3], [1, 2, 9], 12, 4, [0, 3, 3, 9]),
        (8, 1): GatherLayout.make([0, 2, 3], [2, 1, 3], 6, 8, [0, 3, 3, 3]),
    }
    for _ in range(2):
        for (world, _), layout in messages.items():
            message = layout.messages[0]
            landing = torch.randn(world * message.numel)
            buffer.zero_()
            unpack(landing, buffer, message, world)
            pieces = landing.view(world, -1).split(message.splits, 1)
            expected = torch.cat([piece.reshape(-1) for piece in pieces])
            assert torch.equal(buffer[: len(expected)], expected) and not buffer[len(expected) :].any()


def test_messages_whose_chunks_and_gaps_have_the_same_places_are_told_apart() -> None:
    """Of equal units, backward reads other parameters where one is checkpointed: what the one skips, the other has."""
    buffer, landing = torch.zeros(24), torch.arange(24.0)
    for offsets, numels in ([0, 3], [2, 3]), ([0, 2], [2, 1]), ([2], [1]):
        buffer.fill_(-1.0)
        unpack(landing, buffer, GatherLayout.make(offsets, numels, 6, 4).messages[0], 4)
        expected = torch.full((24,), -1.0)
        for offset, numel in zip(offsets, numels, strict=True):
            expected[4 * offset : 4 * (offset + numel)] = landing.view(4, 6)[:, offset : offset + numel].reshape(-1)
        assert torch.equal(buffer, expected)
