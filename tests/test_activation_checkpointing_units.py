"""``activation_checkpointing``: what holds under each policy, with the user's own checkpoints, and the argument."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocations import SLACK, measure
from checkpointed_models import Block, Net, backward_order, gpt, saved, traced
from models import GPT, MLP, VOCABULARY
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp import ActivationCheckpointing
from graph_fsdp.passes import CheckpointActivations, default_pipeline, memory_profile
from graph_fsdp.passes.ir.dialect import Role

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
        model = graph_fsdp.compile(GPT(), backend="eager", reshard_after_forward=True, activation_checkpointing=value)
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
    assert backward_order(traced(None, Checkpointed)) == backward_order(traced("unit"))


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


@pytest.mark.long
def test_inductor_recomputes_the_same_units() -> None:
    found = traced("unit", backend="inductor")
    assert len(saved(found)) == len(saved(traced("unit")))


@pytest.mark.long
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
    assert saved(traced(value, dynamic=True)) == saved(traced(value))


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


def test_a_unit_called_by_itself_calls_no_units_and_nothing_is_said_of_its_operators() -> None:
    model: Any = graph_fsdp.compile(
        Net(), backend="eager", auto_wrap_policy={Block, nn.Linear}, activation_checkpointing=[torch.ops.aten.gelu]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.head(torch.randn(2, model.head.in_features)).sum().backward()
