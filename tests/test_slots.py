"""Slots: how intervals are coloured, which buckets share memory, and that a run allocates what was planned.

On a fake process group of 8 ranks; what needs real collectives on two gloo ranks.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from conftest import FAKE_WORLD_SIZE
from expecttest import assert_expected_inline
from facts import Facts
from launch import run_ranks
from marks import mostly_long
from models import MLP, SMALL_CASES, loss_of
from test_memory import profiles
from test_runtime import predicted_bytes
from torch import Tensor, nn
from torch.optim import AdamW

import graph_fsdp
from graph_fsdp.passes import Role, default_pipeline
from graph_fsdp.passes.ir.dialect import ALIGNMENT
from graph_fsdp.report.report import GraphReport, GraphView, engine_of
from graph_fsdp.runtime.slots import GatheredBytes, SlotMemory, SlotPlan, Slots

FACTS = Facts(__name__)


def step(model: nn.Module, prefetch: int = 1, **options: object) -> GraphReport:
    """The report of a model after a step on 4 rows."""
    model = graph_fsdp.compile(model, backend="eager", passes=default_pipeline(prefetch=prefetch), **options)
    model(torch.ones(4, 16)).sum().backward()
    return graph_fsdp.inspect(model)


def printed(report: GraphReport) -> str:
    return f"{report.forward.slots}\n{report.backward.slots}"


def slots_of(view: GraphView) -> dict[str, tuple[int | None, int | None]]:
    """Bucket → slot of its buffer and of its landing buffer."""
    starts = [n for n in view.stages["slots"].graph.nodes if n.meta.get("fsdp") and n.meta["fsdp"].role in STARTS]
    return {r.bucket: (r.slot, r.landing_slot) for r in (start.meta["fsdp"] for start in starts)}


STARTS = (Role.GATHER_START,)


# Assignments


class Layers(nn.Module):
    """Units of 16x16 floats without bias: 1,024 bytes each, and a gather lands in place."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_layers_gathered_one_ahead_run_in_two_slots(fake_group: None) -> None:
    report = step(Layers(), auto_wrap_policy={nn.Linear}, reshard_after_forward=True)
    assert_expected_inline(
        printed(report),
        """\
slots: 2, 2,048 bytes, at most 2,048 at once
  slot 0, 1,024 bytes: layers.0, layers.2
  slot 1, 1,024 bytes: layers.1, layers.3
slots: 2, 2,048 bytes, at most 2,048 at once
  slot 0, 1,024 bytes: layers.3, layers.1
  slot 1, 1,024 bytes: layers.2""",
    )


@pytest.mark.parametrize("prefetch", [0, 3])
def test_as_many_slots_as_layers_are_gathered_at_once(fake_group: None, prefetch: int) -> None:
    report = step(Layers(depth=5), prefetch, auto_wrap_policy={nn.Linear}, reshard_after_forward=True)
    for view in (report.forward, report.backward):
        assert (len(view.slots), view.slots.nbytes, view.slots.peak) == (prefetch + 1, *2 * [1024 * (prefetch + 1)])


def test_landing_buffers_take_turns_with_the_buckets(fake_group: None) -> None:
    report = step(MLP(depth=4), reshard_after_forward=True)
    assert_expected_inline(
        printed(report),
        """\
slots: 5, 17,408 bytes, at most 15,360 at once
  slot 0, 5,120 bytes: blocks.0, blocks.2
  slot 1, 5,120 bytes: landing of blocks.0, blocks.1, blocks.3
  slot 2, 5,120 bytes: landing of blocks.1, landing of blocks.2, landing of blocks.3
  slot 3, 1,024 bytes: root
  slot 4, 1,024 bytes: landing of root
slots: 5, 17,408 bytes, at most 15,360 at once
  slot 0, 1,024 bytes: root
  slot 1, 1,024 bytes: landing of root
  slot 2, 5,120 bytes: blocks.3, blocks.1
  slot 3, 5,120 bytes: landing of blocks.3, blocks.2, blocks.0
  slot 4, 5,120 bytes: landing of blocks.2, landing of blocks.1, landing of blocks.0""",
    )


class Vocabulary(nn.Module):
    """An embedding and a head of 32 times the bytes of each of the four layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(512, 16)
        self.layers = Layers().layers
        self.head = nn.Linear(16, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def test_an_embedding_and_a_head_share_a_slot_that_layers_stay_out_of(fake_group: None) -> None:
    model = graph_fsdp.compile(
        Vocabulary(),
        backend="eager",
        passes=default_pipeline(prefetch=1),
        auto_wrap_policy={nn.Linear, nn.Embedding},
        reshard_after_forward=True,
    )
    model(torch.arange(8).expand(4, 8)).sum().backward()
    assert_expected_inline(
        printed(graph_fsdp.inspect(model)),
        """\
slots: 3, 34,816 bytes, at most 34,816 at once
  slot 0, 32,768 bytes: tokens, head
  slot 1, 1,024 bytes: layers.0, layers.2
  slot 2, 1,024 bytes: layers.1, layers.3
slots: 3, 34,816 bytes, at most 33,792 at once
  slot 0, 32,768 bytes: head
  slot 1, 1,024 bytes: layers.3, layers.1
  slot 2, 1,024 bytes: layers.2, layers.0""",
    )


def test_what_outlives_the_graph_has_memory_of_its_own(fake_group: None) -> None:
    kept_last = step(Layers(2), auto_wrap_policy={nn.Linear})
    kept_all = step(Layers(2), auto_wrap_policy={nn.Linear}, reshard_after_forward=False)
    assert slots_of(kept_last.forward)["layers.1"] == (None, None)
    assert set(slots_of(kept_all.forward).values()) == {(None, None)}
    assert len(kept_all.forward.slots) == len(kept_all.backward.slots) == 0
    assert "slots:" not in str(kept_all)


def test_only_the_landing_buffer_of_a_kept_bucket_has_a_slot(fake_group: None) -> None:
    report = step(MLP(depth=1), reshard_after_forward=False)
    assert all(own is None and landing is not None for own, landing in slots_of(report.forward).values())


def test_slots_are_aligned(fake_group: None) -> None:
    model = graph_fsdp.compile(SMALL_CASES["uneven"].model().to(torch.bfloat16), backend="eager")
    batch = {
        k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in SMALL_CASES["uneven"].batch(4, 0).items()
    }
    loss_of(model, batch).backward()
    table = graph_fsdp.inspect(model).forward.slots
    assert len(table) > 0 and all(slot.nbytes % ALIGNMENT == 0 for slot in table.slots)


def test_buckets_of_different_dtypes_share_slots(fake_group: None) -> None:
    model = MLP(depth=4)
    model.blocks[0].to(torch.float64)
    model.blocks[2].to(torch.float64)
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, args, d=(torch.float64, torch.float32)[index % 2]: (args[0].to(d),))
    report = step(model, reshard_after_forward=True)
    (double,) = {slot.nbytes for slot in report.forward.slots.slots if "blocks.0" in slot.buckets}
    assert report.spec.bucket_of["blocks.0.up.weight"].shard_numel * FAKE_WORLD_SIZE * 8 == double


# The report


def test_the_report_names_the_buckets_of_each_slot(fake_group: None) -> None:
    report = step(MLP(depth=12), reshard_after_forward=True)
    assert str(report.forward.slots).replace("\n", "\n  ") in str(report)
    assert " more\n" in str(report), "of a deep model, the first ones"
    held = [name for slot in report.forward.slots.slots for name in slot.buckets]
    buckets = [bucket.name for bucket in report.spec.buckets]
    assert sorted(held) == sorted([*buckets, *(f"landing of {name}" for name in buckets)])


# Recompilations


def test_a_recompilation_has_the_slots_of_the_first(fake_group: None) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager", dynamic=False)
    for rows in (4, 6):
        model(torch.ones(rows, 16)).sum().backward()
    first, second = graph_fsdp.inspect(model).graphs
    for phase in ("forward", "backward"):
        assert slots_of(first.views[phase]) == slots_of(second.views[phase])


# What a run allocates and gathers


# Each way to reshard with each distance, once.
ALLOCATED = [
    *(("mlp", None, 1), ("mlp", True, 3), ("uneven", False, 0)),
    *(("mlp", None, 0), ("gpt_tied", True, 1), ("mlp", False, 3)),
    *(("frozen", None, 3), ("uneven", True, 0), ("gpt_checkpoint", False, 1)),
]
SHORT = [("mlp", True, 3), ("uneven", False, 0)]


@pytest.mark.parametrize(("case", "reshard", "prefetch"), mostly_long(ALLOCATED, SHORT))
def test_a_run_allocates_each_slot_once_and_gathers_what_the_report_says(
    fake_group: None, case: str, reshard: bool | None, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[int] = []
    model = graph_fsdp.compile(
        SMALL_CASES[case].model(),
        backend="eager",
        passes=default_pipeline(prefetch=prefetch),
        reshard_after_forward=reshard,
    )
    counter = engine_of(model).counter
    add = counter.slots.add

    def recorded(nbytes: int) -> None:
        allocated.append(nbytes)
        add(nbytes)

    monkeypatch.setattr(counter.slots, "add", recorded)
    loss = loss_of(model, SMALL_CASES[case].batch(4, 0))
    found, gathered = [], []
    for run in (lambda: None, loss.backward):
        run()
        found.append((counter.slots.peak, sorted(n for n in allocated if n > 0)))
        gathered.append((counter.peak, counter.current, counter.landing.peak))
        assert (counter.slots.current, sum(allocated)) == (0, 0)
        counter.reset()
        allocated.clear()
    report = graph_fsdp.inspect(model)
    tables = [view.slots for view in (report.forward, report.backward)]
    assert found == [(table.peak, sorted(slot.nbytes for slot in table.slots)) for table in tables]
    assert sum(table.nbytes for table in tables) > 0
    assert [(peak, left) for peak, left, _ in gathered] == list(predicted_bytes(report)), "by the rows of buckets"
    assert [(peak, landing) for peak, _, landing in gathered] == [
        (p.peak_gathered, p.peak_landing) for p in profiles(model)
    ]


def test_slots_in_registered_memory_stay(fake_group: None) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    model.set_allocate_memory_from_process_group_for_comm(True)
    engine = engine_of(model)
    lie: list[list[int]] = []
    for _ in range(2):
        model(torch.ones(4, 16)).sum().backward()
        lie.append([piece.data_ptr() for piece in engine.registered["group"].pieces])
        assert engine.counter.slots.current == engine.registered["group"].nbytes > 0
    assert lie[0] == lie[1]
    model.set_allocate_memory_from_process_group_for_comm(False)
    assert engine.counter.slots.current == 0 and not engine.registered["group"].pieces
    model(torch.ones(4, 16)).sum().backward()
    assert engine.counter.slots.current == 0


def test_a_slots_buffer_is_used_again_and_goes_with_its_last_use() -> None:
    slots = Slots(GatheredBytes(), SlotPlan((64,), (4,)))
    cpu, others = torch.device("cpu"), [(8, torch.float32), (16, torch.bfloat16)]
    first = slots.take(16, torch.float32, cpu, 0)
    slots.give(first)
    assert slots.take(16, torch.float32, cpu, 0) is first
    slots.give(first)
    for numel, dtype in others:
        other = slots.take(numel, dtype, cpu, 0)
        assert other.shape == (numel,) and other.dtype is dtype and other.data_ptr() == first.data_ptr()
        slots.give(other)
    memory = weakref.ref(first.untyped_storage())
    del first, other
    assert memory() is None


def test_a_run_within_a_run_has_slots_of_its_own() -> None:
    memory, plan = SlotMemory(torch.device("cpu"), GatheredBytes()), SlotPlan((64,), (1,))
    with memory.lent_to(plan) as outer, memory.lent_to(plan) as inner:
        assert outer.memory == tuple(memory.pieces) and not inner.memory
    with pytest.raises(ZeroDivisionError), memory.lent_to(plan):
        raise ZeroDivisionError
    with memory.lent_to(plan) as again:
        assert again.memory[0] is outer.memory[0], "also after a run that raised"


def test_a_run_within_a_run_that_ends_leaves_what_the_other_counts() -> None:
    counter = GatheredBytes()
    outer, inner = Slots(counter, SlotPlan()), Slots(counter, SlotPlan())
    buffer = outer.take_landing(16, torch.float32, torch.device("cpu"))
    inner.take_landing(8, torch.float32, torch.device("cpu"))
    inner.close()
    assert counter.landing.current == buffer.nbytes
    outer.give_landing(buffer)
    assert counter.landing.current == 0


def test_a_run_that_raises_leaves_no_slot_behind(fake_group: None) -> None:
    model = graph_fsdp.compile(Vocabulary(), backend="eager", reshard_after_forward=True)
    with pytest.raises(IndexError, match="out of range"):
        model(torch.arange(8).expand(4, 8) + 512)
    counter = engine_of(model).counter
    assert (counter.slots.current, counter.slots.peak > 0) == (0, True)


# Without the pass


def test_without_the_pass_there_are_no_slots(fake_group: None) -> None:
    pipeline = default_pipeline().remove("slots")
    model = graph_fsdp.compile(MLP(depth=1), backend="eager", passes=pipeline)
    model(torch.ones(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert len(report.forward.slots) == len(report.backward.slots) == 0
    assert "slots: " not in str(report) and "slot 0" not in str(report)
    counter = engine_of(model).counter
    assert counter.slots.peak == 0 and counter.current == 0


def trained(case: str, reshard: bool | None, *, slots: bool) -> list[Tensor]:
    """Losses and parameters of two steps."""
    torch.manual_seed(0)
    pipeline = default_pipeline(prefetch=1)
    model = graph_fsdp.compile(
        SMALL_CASES[case].model(),
        backend="eager",
        passes=pipeline if slots else pipeline.remove("slots"),
        reshard_after_forward=reshard,
    )
    optimizer = AdamW(model.parameters(), lr=0.1)
    losses = []
    for index in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, SMALL_CASES[case].batch(4, index))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert (engine_of(model).counter.slots.peak > 0) == slots
    return [*losses, *(p.to_local() for p in model.parameters())]


def compare_with_no_slots(case: str, reshard: bool | None) -> None:
    pairs = zip(trained(case, reshard, slots=True), trained(case, reshard, slots=False), strict=True)
    assert all(torch.equal(with_slots, without) for with_slots, without in pairs), (case, reshard)


@FACTS
def numbers_do_not_depend_on_slots() -> None:
    compare_with_no_slots("uneven", True)


def compare_others_with_no_slots() -> None:
    for case, reshard in [("gpt_of_one_block", True), ("uneven", False)]:
        compare_with_no_slots(case, reshard)


test_on_two_ranks = FACTS.on(2)


@pytest.mark.long
def test_numbers_of_other_cases_do_not_depend_on_slots() -> None:
    run_ranks(compare_others_with_no_slots, 2, timeout=600)
