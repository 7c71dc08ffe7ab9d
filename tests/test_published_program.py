"""benchmarks/fsdp2_program.py and fsdp2_memory.py: what torchtitan's program does and allocates in a planned step of a
model of two blocks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import plan_published
import pytest
import torch
from fsdp2_memory import GATHERS, REDUCTIONS, fsdp2_step
from fsdp2_program import ROOT, Compiled, forward_begins, fsdp2_seconds, full_nbytes, kept_units, units_of
from plan_published import ROWS, Row
from published_llama import MODELS, PublishedLlama

from graph_fsdp.passes.analysis import simulate
from graph_fsdp.planning import Plan
from graph_fsdp.planning.allocator import replay

EAGER, BLOCKS, ALL = Compiled(False, False), Compiled(True, False), Compiled(True, True)
ROW = dataclasses.replace(ROWS[0], batch=1)


@functools.cache
def planned(row: Row = ROW) -> Plan:
    return plan_published.predict(row, layers=2)


def test_a_row_is_planned_with_its_settings() -> None:
    made = planned()
    assert made.tokens == 8192 and made.mesh_shape == (8,) and made.conditions.contention and made.clips_gradients


def test_compiled_parts_write_and_take_less() -> None:
    made = planned()
    units = units_of(made.traced.context.model)
    forward = made.traced.forward
    in_blocks, in_all = BLOCKS.nodes(forward, units), ALL.nodes(forward, units)
    assert not EAGER.nodes(forward, units) and in_blocks < in_all
    names = {n.target for n in in_all - in_blocks}
    assert torch.ops.aten._log_softmax.default in names and torch.ops.aten.mm.default not in names
    assert torch.ops.aten.embedding.default not in {n.target for n in in_all}
    eager, blocks, everything = (sum(fsdp2_seconds(made, c).values()) for c in (EAGER, BLOCKS, ALL))
    assert everything < blocks < eager


def test_collectives_are_fsdp2s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward gathers the root and both blocks, the last when the root has been copied; backward gathers only the first
    block, and each reduction waits for the one before."""
    ran: list[list[simulate.Task]] = []

    class Recorded(simulate.Simulation):
        def __init__(self, tasks: Sequence[simulate.Task], *given: Any) -> None:
            ran.append(list(tasks))
            super().__init__(tasks, *given)

    monkeypatch.setattr("fsdp2_program.Simulation", Recorded)
    made = planned()
    taken = fsdp2_seconds(made, BLOCKS)
    forward, backward = ran
    starts = [i for i, task in enumerate(forward) if task.lane]
    waits = [i for i, task in enumerate(forward) if task.waits_for]
    assert len(starts) == len(waits) == 3
    assert starts[1] < waits[0] < starts[2] < waits[1] < waits[2]
    gather, *reductions = (task for task in backward if task.lane)
    assert sum(task.waits_for is gather for task in backward) == 1
    model = made.traced.context.model
    wide = [full_nbytes(units_of(model)[unit], reduced=True) for unit in ("layers.1", "layers.0", ROOT)]
    cost = made.traced.backward.cost
    assert cost is not None
    assert [task.seconds for task in reductions] == [cost.all_gather_seconds(n, model.group) for n in wide]
    for before, after in itertools.pairwise(reductions):
        waits = [i for i, task in enumerate(backward) if task.waits_for is before]
        assert backward.index(before) < waits[0] < backward.index(after)
    units = units_of(model)
    computed = sum(BLOCKS.seconds(made.traced.forward, units, cost).values())
    copied = sum(cost.copy_seconds(full_nbytes(parameters)) for parameters in units.values())
    assert sum(task.seconds for task in forward if not task.lane) == pytest.approx(computed + copied)
    assert taken["forward"] > computed + copied


def test_units_lie_on_streams_of_their_own() -> None:
    made = planned()
    ours, step = made.step(), fsdp2_step(made, BLOCKS)
    units = units_of(made.traced.context.model)
    assert list(units) == ["layers.0", "layers.1", ROOT]
    assert kept_units(forward_begins(made.traced.forward, units)) == {"layers.1", ROOT}
    for phase, gathered in (("forward", 3), ("backward", 1)):  # the last block and the root stay
        graph = step.graphs[phase]  # type: ignore[index]
        streams = [graph.stream(storage) for storage in graph.found]
        assert streams.count(GATHERS) == 2 * gathered  # what is sent, and what comes
        assert streams.count(REDUCTIONS) == (3 if phase == "backward" else 0)
    gradients = sum(s.nbytes for s in step.graphs["backward"].left)
    assert gradients == made.memory["shards"]  # in float32, as the shards are
    assert replay(step, expandable_segments=True).nbytes > replay(ours, expandable_segments=True).nbytes


def test_eager_checkpointing_keeps_what_backward_does_not_read() -> None:
    """The result of w2, of 8,192 times 4,096 in bfloat16, of each block."""
    made = planned()
    kept = {c: sum(s.nbytes for s in fsdp2_step(made, c).graphs["forward"].left) for c in (EAGER, BLOCKS)}
    assert kept[EAGER] - kept[BLOCKS] == 2 * 8192 * 4096 * 2


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch 2.9's partitioner knows regions of checkpoints alone")
def test_a_compiled_loss_saves_logits_and_writes_no_float32() -> None:
    """The same plan but for its loss: logits in bfloat16 instead of float32, 8,192 times 128,256."""
    logits = 8192 * 128256
    eager, compiled = planned(), planned(dataclasses.replace(ROW, loss_compiled=True))
    for made, parts, width in ((eager, BLOCKS, 4), (compiled, ALL, 2)):
        for graph in fsdp2_step(made, parts).graphs.values():
            large = [s.nbytes for s in graph.found if s.nbytes >= 2 * logits and s.category != "landing"]
            assert max(n for n in large if n in (2 * logits, 4 * logits)) == width * logits


@pytest.mark.parametrize(("checkpointing", "again"), [("none", 0), ("op", 3), ("full", 6)])
def test_checkpointing_computes_products_of_blocks_again(checkpointing: str, again: int) -> None:
    """None; every other one; all but the last, which backward does not read."""
    made = planned(dataclasses.replace(ROW, checkpointing=checkpointing))
    products = [n for n in made.backward.graph.nodes if n.target is torch.ops.aten.mm.default]  # type: ignore[union-attr]
    assert len(products) == 2 * (2 * 7 + 1) + 2 * again


def test_models_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        blocks = {name: PublishedLlama(dataclasses.replace(sizes, layers=1)) for name, sizes in MODELS.items()}
    counts = {}
    for name, model in blocks.items():
        block = sum(p.numel() for p in model.layers.parameters())
        counts[name] = sum(p.numel() for p in model.parameters()) + (MODELS[name].layers - 1) * block
    assert counts == {
        "Llama-3-8B": 8_030_261_248,
        "Llama-3-70B": 70_553_706_496,
        "Llama-2-13B": 13_015_864_320,
        "Llama-2-70B": 68_976_648_192,
    }


def test_later_programs_have_units_of_the_embedding_and_of_the_head() -> None:
    made = planned(dataclasses.replace(ROW, root_only=False))
    units = units_of(made.traced.context.model)
    begins = forward_begins(made.traced.forward, units)
    assert list(begins) == ["embedding", "layers.0", "layers.1", "head"] and kept_units(begins) == {"head"}
    assert fsdp2_step(made, BLOCKS).graphs["backward"].stream is not None
    assert sum(fsdp2_seconds(made, BLOCKS).values()) > 0


def test_another_row_is_told_by_its_fields() -> None:
    row = plan_published.other_row(["gpus=64", "loss_compiled=true", "hardware=h100", "tokens=7000"])
    assert (row.gpus, row.loss_compiled, row.hardware, row.tokens) == (64, True, "h100", 7000.0)
    with pytest.raises(ValueError, match="--other: 'gpu=8' is no setting of a row; give name=value of name, tokens"):
        plan_published.other_row(["gpu=8"])
    with pytest.raises(ValueError, match="checkpointing: there is no 'selective'; give one of op, full, none"):
        plan_published.other_row(["checkpointing=selective"])
