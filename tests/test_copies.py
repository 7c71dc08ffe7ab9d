"""What is copied for collectives: nothing where a parameter has a message of its own, in the printed graph, in bytes,
and in numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from launch import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.passes import Role
from graph_fsdp.runtime.collectives import start_reduce_scatter

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


@pytest.mark.parametrize("rows", [WIDTH, WIDTH - 3])
def test_gradients_are_the_mean_on_two_ranks_bit_for_bit(rows: int) -> None:
    for found in run_ranks(mean_gradients, 2, rows):
        assert all(torch.equal(own, mean) for own, mean in found.values())


def test_gradients_are_the_mean_on_three_ranks() -> None:
    for found in run_ranks(mean_gradients, 3, WIDTH):
        for own, mean in found.values():
            torch.testing.assert_close(own, mean, rtol=1e-5, atol=1e-6)


def exchanged() -> dict[str, tuple[Tensor, Tensor]]:
    """What an exchange between two ranks yields, and what the process group's reduce-scatter does."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
        pending = start_reduce_scatter([grad], dtype, dist.group.WORLD)
        pending.finish()
        expected, average = grad.new_empty(3, 5), dtype is not torch.float64
        dist.reduce_scatter_tensor(expected, grad, op=dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        found[str(dtype)] = (pending.buffer.view(3, 5), expected if average else expected / 2)
    return found


def test_an_exchange_has_the_bits_of_the_groups_own_reduction() -> None:
    for found in run_ranks(exchanged, 2):
        assert all(torch.equal(own, groups) for own, groups in found.values()), found
