"""FSDP2's own program of a published row on the virtual device, with two blocks, and our plan of it."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any
from unittest import mock

import plan_published
import pytest
import torch
from facts import Facts
from plan_published import GIB, ROWS, Row, ours
from published_llama import MODELS, PublishedLlama
from virtual import library
from virtual.machine import Machine

pytestmark = pytest.mark.skipif(library.COMPILER is None, reason="needs a C++ compiler")
FACTS = Facts(__name__)
COMPILED = ROWS[4]
LAYERS = 2
LOGITS = 8192 * 128256


@functools.cache
def ran(row: Row) -> tuple[dict[str, Any], Counter[str]]:
    """What is found of a row, and how often each operator ran in its last step."""
    made: list[Machine] = []

    class Kept(Machine):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            made.append(self)

    with mock.patch.object(plan_published, "Machine", Kept):
        found = plan_published.fsdp2(row, LAYERS)
    return found, Counter(operation.operator for operation in made[0].operations or ())


def eager(checkpointing: str) -> Row:
    return dataclasses.replace(COMPILED, blocks_compiled=False, checkpointing=checkpointing)


@FACTS
def blocks_are_compiled_one_by_one_between_fsdp2s_collectives() -> None:
    """Both blocks and the root are gathered in forward, the first block in backward too; three reductions."""
    found, operators = ran(COMPILED)
    assert operators["compiled forward"] == operators["compiled backward"] == LAYERS
    assert (operators["all_gather"], operators["reduce_scatter"]) == (LAYERS + 2, LAYERS + 1)
    assert operators["aten.mm"] == 3, "of the output, which is not compiled"
    assert found["seconds"] > found["undisturbed_seconds"] > found["compute_seconds"]


@FACTS
def eager_checkpointing_computes_products_of_blocks_again() -> None:
    """None; every other one; all but the last, as torch stops when backward has what it needs."""
    again = {"none": 0, "op": 3, "full": 6}
    counts = {kind: ran(eager(kind))[1] for kind in again}
    assert {kind: counts[kind]["aten.mm"] - (3 * 7 * LAYERS + 3) for kind in again} == {
        kind: LAYERS * number for kind, number in again.items()
    }
    held = [ran(eager(kind))[0]["allocated_gib"] for kind in ("full", "op", "none")]
    assert held == sorted(held) and held[0] < held[1] < held[2]


@FACTS.long
def compiled_checkpointing_saves_less_and_takes_longer() -> None:
    found = [ran(dataclasses.replace(COMPILED, checkpointing=kind))[0] for kind in ("full", "op", "none")]
    assert found[0]["allocated_gib"] < found[1]["allocated_gib"] < found[2]["allocated_gib"]
    assert found[0]["compute_seconds"] > found[1]["compute_seconds"] > found[2]["compute_seconds"]


@FACTS
def a_compiled_loss_holds_no_logits_in_float32() -> None:
    found, _ = ran(COMPILED)
    other, operators = ran(dataclasses.replace(COMPILED, loss_compiled=True))
    assert operators["aten._log_softmax"] == 0 and operators["compiled forward"] == LAYERS + 1
    assert 4 * LOGITS < (found["allocated_gib"] - other["allocated_gib"]) * GIB < 12 * LOGITS


@FACTS
def memory_grows_by_adamws_state_after_the_first_step() -> None:
    found, _ = ran(COMPILED)
    first, second, third = found["reserved_gib_after_steps"]
    with torch.device("meta"):
        count = sum(p.numel() for p in PublishedLlama(COMPILED.sizes(LAYERS)).parameters())
    state = 2 * 4 * count / COMPILED.gpus / GIB
    assert abs(second - first - state) < 0.05 * state and third == second == found["reserved_gib"]
    assert found["allocated_gib"] < found["reserved_gib"]


@FACTS
def later_programs_have_units_of_the_embedding_and_of_the_head() -> None:
    """The head stays gathered, the last block does not."""
    _, operators = ran(dataclasses.replace(COMPILED, root_only=False))
    assert (operators["all_gather"], operators["reduce_scatter"]) == (2 * LAYERS + 3, LAYERS + 2)


@FACTS
def our_plan_is_of_the_same_model_and_conditions() -> None:
    made = ours(COMPILED, LAYERS)
    assert made.tokens == 8192 and made.mesh_shape == (8,) and made.clips_gradients
    assert made.conditions == plan_published.CONDITIONS
    products = [n for n in made.traced.backward.fx_graph.nodes if n.target is torch.ops.aten.mm.default]
    assert len(products) == 2 * (LAYERS * 7 + 1) + LAYERS * 3


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


def test_another_row_is_told_by_its_fields() -> None:
    row = plan_published.other_row(["gpus=64", "loss_compiled=true", "hardware=h100", "tokens=7000"])
    assert (row.gpus, row.loss_compiled, row.hardware, row.tokens) == (64, True, "h100", 7000.0)
    with pytest.raises(ValueError, match="--other: 'gpu=8' is no setting of a row; give name=value of name, tokens"):
        plan_published.other_row(["gpu=8"])
    with pytest.raises(ValueError, match="checkpointing: there is no 'selective'; give one of op, full, none"):
        plan_published.other_row(["checkpointing=selective"])


test_on_the_virtual_device = FACTS.in_a_fresh_process()
