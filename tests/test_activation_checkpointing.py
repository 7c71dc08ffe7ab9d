"""``activation_checkpointing``: what forward saves and backward computes again, on the printed graphs."""

from __future__ import annotations

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
from graph_fsdp.passes import CheckpointActivations, MemoryProfile, default_pipeline, memory_profile
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
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(F.gelu(x)).square()


def traced(value: Any, model: Any = Net, inputs: Any = None, **options: Any) -> Traced:
    inputs = torch.ones(32, 16, requires_grad=True) if inputs is None else inputs
    options = {"backend": "eager", "reshard_after_forward": True, **options}
    return trace(model, (inputs,), world_size=2, activation_checkpointing=value, **options)


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
    assert_expected_inline(str(saved(found)), """""")
    assert_expected_inline(calls(found, *COMPUTE), """""")


def test_unit_saves_what_goes_into_units_and_what_the_root_reads_of_them() -> None:
    found = traced("unit")
    assert_expected_inline(str(saved(found)), """""")
    assert_expected_inline(calls(found, *COMPUTE), """""")


def test_selective_saves_matrix_multiplications_too() -> None:
    found = traced("selective")
    assert_expected_inline(str(saved(found)), """""")
    assert_expected_inline(calls(found, *COMPUTE), """""")


def test_a_collection_of_operators_saves_their_results() -> None:
    for value in ([torch.ops.aten.gelu], {torch.ops.aten.gelu.default}):
        found = traced(value)
        assert_expected_inline(str(saved(found)), """""")
    assert_expected_inline(calls(found, *COMPUTE), """""")


def test_a_memory_budget_is_the_partitioners() -> None:
    assert_expected_inline(
        "\n".join(f"{budget:g} {saved(traced(budget))}" for budget in (0, 0.5, 1.0)),
        """""",
    )


def test_offload_copies_what_is_saved_of_all_units_but_the_last() -> None:
    with pytest.warns(UserWarning, match="the copies save nothing"):
        found = traced("offload")
    assert_expected_inline(str(saved(found)), """""")
    forward = found.report.forward.stages["free"].body
    assert_expected_inline("\n".join(line for line in forward.splitlines() if "offload" in line), """""")
    assert_expected_inline(calls(found, "load", *COMPUTE), """""")


def test_offload_with_unit_copies_what_goes_into_units() -> None:
    with pytest.warns(UserWarning, match="the copies save nothing"):
        found = traced(ActivationCheckpointing("unit", offload=True))
    assert_expected_inline(str(saved(found)), """""")
    assert_expected_inline(calls(found, "load", *COMPUTE), """""")


# What holds of each


GPT_TOKENS = torch.randint(VOCABULARY, (4, 8))
VALUES = ["unit", "selective", [torch.ops.aten.bmm], 0.5, 0]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_each_bucket_is_gathered_once_in_forward_and_at_most_once_in_backward(value: Any) -> None:
    found = traced(value, lambda: GPT(depth=3, dropout=0.1), GPT_TOKENS)
    buckets = [bucket.name for bucket in found.context.model.buckets]
    for graph in (found.forward, found.backward):
        gathered = [n.meta["fsdp"].bucket for n in graph.with_role(Role.GATHER_START)]
        assert len(set(gathered)) == len(gathered) and set(gathered) <= set(buckets)
    assert [kind for kind in found.forward.collectives] == [("gather_start", bucket) for bucket in buckets]


def test_a_units_recomputation_begins_when_backward_comes_to_it() -> None:
    """Of buckets, no more than two are gathered at once: the one that is used and the one ahead."""
    found = traced("unit", lambda: GPT(depth=4), GPT_TOKENS)
    plain = traced(None, lambda: GPT(depth=4), GPT_TOKENS)
    peaks = [memory_profile(t.backward, t.context).peak_gathered for t in (plain, found)]
    assert peaks[1] == peaks[0]


def profile_of(value: Any, **options: Any) -> MemoryProfile:
    found = traced(value, lambda: GPT(depth=4), torch.randint(VOCABULARY, (64, 8)), **options)
    return memory_profile(found.backward, found.context)


def test_predicted_memory_falls() -> None:
    peaks = {str(v): profile_of(v).peak for v in (None, "selective", 0.5, "unit")}
    assert peaks["unit"] < peaks["0.5"] < peaks["None"]
    assert peaks["unit"] < peaks["selective"] < peaks["None"]


def test_where_activations_are_recomputed_one_reduction_is_under_way() -> None:
    found = [profile_of("unit"), *(profile_of("unit", passes=default_pipeline(reductions_in_flight=n)) for n in (1, 2))]
    assert found[0].peak == found[1].peak < found[2].peak


@pytest.mark.usefixtures("fake_group")
def test_measured_memory_falls_to_what_is_predicted() -> None:
    measured = {}
    for value in (None, "unit"):
        torch._dynamo.reset()
        model = graph_fsdp.compile(
            GPT(depth=4), backend="eager", reshard_after_forward=True, activation_checkpointing=value
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
