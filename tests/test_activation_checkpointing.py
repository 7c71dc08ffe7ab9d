"""``activation_checkpointing``: what forward saves and backward computes again, on the printed graphs."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocations import SLACK, measure
from expecttest import assert_expected_inline
from models import GPT, MLP, VOCABULARY
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp import ActivationCheckpointing
from graph_fsdp.passes import CheckpointActivations, default_pipeline, dialect, memory_profile
from graph_fsdp.passes.dialect import Role
from graph_fsdp.planning import Traced, trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(16, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(F.gelu(x)).square()


def traced(value: Any, model: Any = Net, inputs: Any = None, **options: Any) -> Traced:
    inputs = torch.ones(32, 16, requires_grad=True) if inputs is None else inputs
    options = {"backend": "eager", "reshard_after_forward": True, **options}
    return trace(model, (inputs,), world_size=2, activation_checkpointing=value, **options)


@functools.cache
def gpt(value: Any) -> Traced:
    return traced(value, lambda: GPT(depth=3, dropout=0.1), torch.zeros(32, 8, dtype=torch.int64))


def saved(found: Traced) -> list[str]:
    """What forward computes for backward, without inputs."""
    values = found.forward.output.args[0][found.context.forward_outputs :]  # type: ignore[index]
    return [str(v) for v in values if v.op == "call_function"]  # type: ignore[union-attr]


def calls(found: Traced, *words: str) -> str:
    """Backward's calls of operators with these words in their names, in order."""
    lines = (line.strip() for line in found.report.backward.stages["free"].body.splitlines())
    return "\n".join(line.split("(")[0] for line in lines if any(word in line.split("(")[0] for word in words))


COMPUTE = ("aten.mm.", "aten.gelu", "aten.add", "all_gather", "reduce_scatter", "dialect.free", "graph_fsdp.free")


def test_without_it_what_the_partitioner_chooses_is_saved() -> None:
    found = traced(None)
    assert_expected_inline(str(saved(found)), """['mm', 'gelu', 'add', 'mm_2', 'gelu_1', 'add_1', 'gelu_2', 'mm_4']""")
    assert_expected_inline(
        calls(found, *COMPUTE),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default
mm_5 = torch.ops.aten.mm.default
full_root = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default
mm_6 = torch.ops.aten.mm.default
gelu_backward = torch.ops.aten.gelu_backward.default
free_root = torch.ops.graph_fsdp.free.default
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default
mm_7 = torch.ops.aten.mm.default
full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default
mm_8 = torch.ops.aten.mm.default
gelu_backward_1 = torch.ops.aten.gelu_backward.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
add_2 = torch.ops.aten.add.Tensor
free_blocks_1 = torch.ops.graph_fsdp.free.default
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default
mm_11 = torch.ops.aten.mm.default
full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default
mm_12 = torch.ops.aten.mm.default
gelu_backward_2 = torch.ops.aten.gelu_backward.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor
free_blocks_0 = torch.ops.graph_fsdp.free.default
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default""",
    )


def test_unit_saves_what_goes_into_units_and_what_the_root_reads_of_them() -> None:
    found = traced("unit")
    assert_expected_inline(str(saved(found)), """['add', 'add_1', 'gelu_2', 'mm_4']""")
    assert_expected_inline(
        calls(found, *COMPUTE),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default
mm_5 = torch.ops.aten.mm.default
full_root = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default
mm_6 = torch.ops.aten.mm.default
gelu_backward = torch.ops.aten.gelu_backward.default
free_root = torch.ops.graph_fsdp.free.default
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default
full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default
mm_2 = torch.ops.aten.mm.default
gelu_1 = torch.ops.aten.gelu.default
mm_7 = torch.ops.aten.mm.default
mm_8 = torch.ops.aten.mm.default
gelu_backward_1 = torch.ops.aten.gelu_backward.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
add_2 = torch.ops.aten.add.Tensor
free_blocks_1 = torch.ops.graph_fsdp.free.default
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default
full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default
mm = torch.ops.aten.mm.default
gelu = torch.ops.aten.gelu.default
mm_11 = torch.ops.aten.mm.default
mm_12 = torch.ops.aten.mm.default
gelu_backward_2 = torch.ops.aten.gelu_backward.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor
free_blocks_0 = torch.ops.graph_fsdp.free.default
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default""",
    )


def test_selective_saves_matrix_multiplications_too() -> None:
    found = traced("selective")
    assert_expected_inline(str(saved(found)), """['mm', 'add', 'mm_2', 'add_1', 'gelu_2', 'mm_4']""")
    assert_expected_inline(
        calls(found, *COMPUTE),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default
mm_5 = torch.ops.aten.mm.default
full_root = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default
mm_6 = torch.ops.aten.mm.default
gelu_backward = torch.ops.aten.gelu_backward.default
free_root = torch.ops.graph_fsdp.free.default
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default
gelu_1 = torch.ops.aten.gelu.default
mm_7 = torch.ops.aten.mm.default
full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default
mm_8 = torch.ops.aten.mm.default
gelu_backward_1 = torch.ops.aten.gelu_backward.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
add_2 = torch.ops.aten.add.Tensor
free_blocks_1 = torch.ops.graph_fsdp.free.default
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default
gelu = torch.ops.aten.gelu.default
mm_11 = torch.ops.aten.mm.default
full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default
mm_12 = torch.ops.aten.mm.default
gelu_backward_2 = torch.ops.aten.gelu_backward.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor
free_blocks_0 = torch.ops.graph_fsdp.free.default
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default""",
    )


def test_a_collection_of_operators_saves_their_results() -> None:
    found = traced([torch.ops.aten.gelu])
    assert_expected_inline(str(saved(found)), """['gelu', 'add', 'gelu_1', 'add_1', 'gelu_2', 'mm_4']""")
    assert_expected_inline(
        calls(found, "aten.mm.", "aten.gelu.", "aten.add"),
        """\
mm_5 = torch.ops.aten.mm.default
mm_6 = torch.ops.aten.mm.default
mm_7 = torch.ops.aten.mm.default
mm_8 = torch.ops.aten.mm.default
mm_2 = torch.ops.aten.mm.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
add_2 = torch.ops.aten.add.Tensor
mm_11 = torch.ops.aten.mm.default
mm_12 = torch.ops.aten.mm.default
mm = torch.ops.aten.mm.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor""",
    )
    assert saved(traced({torch.ops.aten.gelu.default})) == saved(found)


def test_a_memory_budget_is_the_partitioners() -> None:
    assert_expected_inline(
        "\n".join(f"{budget:g} {saved(traced(budget))}" for budget in (0, 0.5, 1.0)),
        """\
0 ['add', 'add_1']
0.5 ['mm', 'add', 'mm_2', 'add_1', 'mm_4']
1 ['mm', 'gelu', 'add', 'mm_2', 'gelu_1', 'add_1', 'gelu_2', 'mm_4']""",
    )


def test_offload_copies_what_is_saved_of_all_units_but_the_last() -> None:
    with pytest.warns(UserWarning, match="the copies save nothing"):
        found = traced("offload")
    assert_expected_inline(
        str(saved(found)), """['offloaded_mm', 'offloaded_gelu', 'add', 'mm_2', 'gelu_1', 'add_1', 'gelu_2', 'mm_4']"""
    )
    forward = found.report.forward.stages["free"].body
    assert_expected_inline(
        "\n".join(line for line in forward.splitlines() if "offload" in line),
        """\
    offload_mm = torch.ops.graph_fsdp.offload_activation.default(mm)
    offload_gelu = torch.ops.graph_fsdp.offload_activation.default(gelu)
    offloaded_mm = torch.ops.graph_fsdp.activation_offloaded.default(offload_mm, mm)
    offloaded_gelu = torch.ops.graph_fsdp.activation_offloaded.default(offload_gelu, gelu)
    return (pow_1, primals_1, primals_2, primals_3, primals_4, primals_5, primals_6, offloaded_mm, offloaded_gelu, add, mm_2, gelu_1, add_1, gelu_2, mm_4)""",
    )
    assert_expected_inline(
        calls(found, "load", *COMPUTE),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default
mm_5 = torch.ops.aten.mm.default
full_root = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default
mm_6 = torch.ops.aten.mm.default
gelu_backward = torch.ops.aten.gelu_backward.default
free_root = torch.ops.graph_fsdp.free.default
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default
mm_7 = torch.ops.aten.mm.default
full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default
reload_gelu = torch.ops.graph_fsdp.reload_activation.default
mm_8 = torch.ops.aten.mm.default
gelu_backward_1 = torch.ops.aten.gelu_backward.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
add_2 = torch.ops.aten.add.Tensor
free_blocks_1 = torch.ops.graph_fsdp.free.default
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default
reload_mm = torch.ops.graph_fsdp.reload_activation.default
reloaded_gelu = torch.ops.graph_fsdp.activation_reloaded.default
mm_11 = torch.ops.aten.mm.default
full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default
reloaded_mm = torch.ops.graph_fsdp.activation_reloaded.default
mm_12 = torch.ops.aten.mm.default
gelu_backward_2 = torch.ops.aten.gelu_backward.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor
free_blocks_0 = torch.ops.graph_fsdp.free.default
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default""",
    )


@pytest.mark.filterwarnings("ignore:activation_checkpointing")
def test_offload_with_unit_copies_what_goes_into_units() -> None:
    found = traced(ActivationCheckpointing("unit", offload=True), lambda: Net(3))
    assert_expected_inline(str(saved(found)), """['offloaded_add', 'add_1', 'add_2', 'gelu_3', 'mm_6']""")
    assert_expected_inline(
        calls(found, "load", *COMPUTE),
        """\
gather_root = torch.ops.graph_fsdp.all_gather_start.default
mm_7 = torch.ops.aten.mm.default
full_root = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_2 = torch.ops.graph_fsdp.all_gather_start.default
mm_8 = torch.ops.aten.mm.default
gelu_backward = torch.ops.aten.gelu_backward.default
free_root = torch.ops.graph_fsdp.free.default
reduce_root = torch.ops.graph_fsdp.reduce_scatter_start.default
full_blocks_2 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_1 = torch.ops.graph_fsdp.all_gather_start.default
mm_4 = torch.ops.aten.mm.default
gelu_2 = torch.ops.aten.gelu.default
mm_9 = torch.ops.aten.mm.default
mm_10 = torch.ops.aten.mm.default
gelu_backward_1 = torch.ops.aten.gelu_backward.default
mm_11 = torch.ops.aten.mm.default
mm_12 = torch.ops.aten.mm.default
add_3 = torch.ops.aten.add.Tensor
free_blocks_2 = torch.ops.graph_fsdp.free.default
reload_add = torch.ops.graph_fsdp.reload_activation.default
reduce_blocks_2 = torch.ops.graph_fsdp.reduce_scatter_start.default
full_blocks_1 = torch.ops.graph_fsdp.all_gather_wait.default
gather_blocks_0 = torch.ops.graph_fsdp.all_gather_start.default
reloaded_add = torch.ops.graph_fsdp.activation_reloaded.default
mm_2 = torch.ops.aten.mm.default
gelu_1 = torch.ops.aten.gelu.default
mm_13 = torch.ops.aten.mm.default
mm_14 = torch.ops.aten.mm.default
gelu_backward_2 = torch.ops.aten.gelu_backward.default
mm_15 = torch.ops.aten.mm.default
mm_16 = torch.ops.aten.mm.default
add_4 = torch.ops.aten.add.Tensor
free_blocks_1 = torch.ops.graph_fsdp.free.default
reduce_blocks_1 = torch.ops.graph_fsdp.reduce_scatter_start.default
full_blocks_0 = torch.ops.graph_fsdp.all_gather_wait.default
mm = torch.ops.aten.mm.default
gelu = torch.ops.aten.gelu.default
mm_17 = torch.ops.aten.mm.default
mm_18 = torch.ops.aten.mm.default
gelu_backward_3 = torch.ops.aten.gelu_backward.default
mm_19 = torch.ops.aten.mm.default
mm_20 = torch.ops.aten.mm.default
add_5 = torch.ops.aten.add.Tensor
free_blocks_0 = torch.ops.graph_fsdp.free.default
reduce_blocks_0 = torch.ops.graph_fsdp.reduce_scatter_start.default""",
    )


@pytest.mark.filterwarnings("ignore:activation_checkpointing")
def test_copies_that_come_back_are_started_one_region_ahead() -> None:
    found = traced("offload", lambda: Net(4))
    positions = found.backward.positions()
    seen = 0
    for start in found.backward.with_role(Role.RELOAD):
        if start.target is not dialect.reload_activation:
            continue
        (wait,) = start.users
        between = found.backward.nodes[positions[start] + 1 : positions[wait]]
        communicates = [node.target in dialect.STARTS | dialect.WAITS for node in between]
        groups = sum(now and not before for before, now in zip([False, *communicates], communicates, strict=False))
        assert groups == 1, "a region lies between, and what is communicated behind it"
        seen += 1
    assert seen == 8  # two of each unit but the last, and what goes from one to the next


# What holds of each


BMM = (torch.ops.aten.bmm,)


@pytest.mark.parametrize("value", ["unit", "selective", BMM, 0.5, 0], ids=str)
def test_each_bucket_is_gathered_once_in_forward_and_at_most_once_in_backward(value: Any) -> None:
    found = gpt(value)
    buckets = [bucket.name for bucket in found.context.model.buckets]
    assert found.forward.collectives == [("gather_start", bucket) for bucket in buckets]
    gathered = [n.meta["fsdp"].bucket for n in found.backward.with_role(Role.GATHER_START)]
    assert gathered == buckets[:0:-1]  # backward reads no embedding


def test_a_units_recomputation_begins_when_backward_comes_to_it() -> None:
    """No more is gathered at once than without: the unit that is used and the one ahead."""
    peaks = [memory_profile(t.backward, t.context).peak_gathered for t in (gpt(None), gpt("unit"), gpt(0))]
    assert peaks[0] == peaks[1] == peaks[2]


def test_predicted_memory_falls() -> None:
    def peaks(phase: str) -> dict[Any, int]:
        values = (None, "selective", 0.5, BMM, "unit", 0)
        return {v: memory_profile(getattr(gpt(v), phase), gpt(v).context).peak for v in values}

    forward, backward = peaks("forward"), peaks("backward")
    assert forward["unit"] < forward[BMM] < forward["selective"] < forward[None]
    assert backward["unit"] < backward["selective"] < backward[None]
    assert backward[BMM] < backward[None]
    assert backward[0] < backward[0.5] < backward[None]


def test_where_activations_are_recomputed_one_reduction_is_under_way() -> None:
    def peak(**options: Any) -> int:
        found = traced("unit", lambda: Net(4), torch.ones(2, 16), **options)
        return memory_profile(found.backward, found.context).peak

    one, two = (peak(passes=default_pipeline(reductions_in_flight=n)) for n in (1, 2))
    assert peak() == one < two


@pytest.mark.usefixtures("fake_group")
def test_measured_memory_falls_to_what_is_predicted() -> None:
    measured = {}
    for value in (None, "unit"):
        torch._dynamo.reset()
        model = graph_fsdp.compile(
            GPT(depth=3), backend="eager", reshard_after_forward=True, activation_checkpointing=value
        )
        x = torch.randint(VOCABULARY, (256, 8))

        def step(model: nn.Module = model, x: Tensor = x) -> None:
            model(x).sum().backward()

        step()
        forward, _ = measure(step)
        report = graph_fsdp.inspect(model).forward.memory
        assert report is not None
        held_before = report.timeline["shards"][0] + report.timeline["inputs"][0]
        assert abs(forward.peak - (report.peak - held_before)) < 2 * SLACK
        measured[value] = forward.peak
    assert measured["unit"] < measured[None] / 2


# The user's own checkpoints


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(F.gelu(x)).square()


def test_the_users_own_checkpoint_saves_what_it_gives_to_others() -> None:
    """The last block is not computed again before the head's backward has begun."""
    assert saved(traced(None, Checkpointed)) == saved(traced("unit"))
    assert calls(traced(None, Checkpointed), *COMPUTE) == calls(traced("unit"), *COMPUTE)


def test_with_the_users_own_checkpoint_units_are_what_is_recomputed() -> None:
    assert saved(traced("unit", Checkpointed)) == saved(traced("unit"))


# Units


class Twice(nn.Module):
    """A unit that is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(block(x))
        return x.square()


def test_each_call_of_a_unit_is_recomputed_by_itself() -> None:
    found = traced("unit", Twice)
    assert len(saved(found)) == 8  # of each call's result the next call reads, and of the last the root
    assert found.report.joint is not None
    assert "of 8 calls of units" in str(found.report.joint.stages["activation_checkpointing"].summary)


def test_inductor_recomputes_the_same_units() -> None:
    found = traced("unit", backend="inductor")
    assert len(saved(found)) == len(saved(traced("unit")))


def test_inductor_replays_dropout() -> None:
    gradients = []
    for value in (None, "unit"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        for block in model.blocks:
            block.forward = lambda x, block=block: x + F.dropout(block.down(F.gelu(block.up(x))), 0.5)
        graph_fsdp.compile(model, backend="inductor", activation_checkpointing=value)
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(1))).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:activation_checkpointing")
@pytest.mark.parametrize("value", ["unit", "offload", 0.5])
def test_symbolic_sizes_change_nothing(value: Any) -> None:
    operators = [[re.sub(r"_\d+$", "", name) for name in saved(traced(value, dynamic=d))] for d in (True, False)]
    assert operators[0] == operators[1]


def test_a_forward_that_was_set_on_the_instance() -> None:
    def make() -> nn.Module:
        model = Net()
        model.forward = functools.partial(Net.forward, model)  # type: ignore[method-assign]
        return model

    assert len(saved(traced("unit", make))) == len(saved(traced("unit")))


# The argument


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("full", ValueError, "there is no 'full'"),
        (1.5, ValueError, "a memory budget lies between 0 and 1, got 1.5"),
        (float("nan"), ValueError, "a memory budget lies between 0 and 1, got nan"),
        ([], ValueError, "the collection of operators is empty"),
        (["aten.mm"], TypeError, "holds 'aten.mm', which is no operator"),
        (True, TypeError, "got True"),
        (object, TypeError, "got <class 'object'>"),
    ],
    ids=str,
)
def test_a_wrong_value_is_an_error_before_anything_is_changed(value: Any, error: type, words: str) -> None:
    model = MLP()
    parameters = list(model.parameters())
    with pytest.raises(error, match="activation_checkpointing") as raised:
        graph_fsdp.compile(model, backend="eager", activation_checkpointing=value)
    assert words in str(raised.value) and "'unit'" in str(raised.value)
    assert type(model) is MLP and all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_what_cannot_go_together_is_an_error() -> None:
    with pytest.raises(TypeError, match="offload must be True or False"):
        ActivationCheckpointing("unit", offload="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="regions='whole'"):
        graph_fsdp.compile(MLP(), activation_checkpointing="offload", regions="whole")
    own = default_pipeline().insert_after("recompute", CheckpointActivations("unit"))
    with pytest.raises(ValueError, match="has a pass 'activation_checkpointing' already"):
        graph_fsdp.compile(MLP(), backend="eager", activation_checkpointing="unit", passes=own)
    assert saved(traced(None, passes=own)) == saved(traced("unit"))


def test_operators_that_no_unit_calls_are_said() -> None:
    with pytest.warns(UserWarning, match=r"no unit calls any of aten.bmm.*aten.gelu.default"):
        traced([torch.ops.aten.bmm])
