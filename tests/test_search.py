"""``graph_fsdp.planning.search``: every choice is planned, and the front is what no other choice beats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from test_plan import WithLoss, X

import graph_fsdp
from graph_fsdp.passes import HARDWARE
from graph_fsdp.planning import Candidate, Choice, Search, search
from graph_fsdp.planning.search import meshes


def searched(**options: Any) -> Search:
    arguments = {"mesh_shapes": [(8,)], "hardware": "h100", "reshards": (True,), "buckets": ("unit",)}
    return search(WithLoss, (X,), **{**arguments, "checkpointings": (None,), **options})


def candidate(step: float, peak: int) -> Candidate:
    return Candidate(Choice((8,)), step, 0.0, peak, 0.5, None)


def test_every_combination_is_planned_with_its_options() -> None:
    shown: list[int] = []

    def progress(choices: Iterable[Choice], count: int) -> Iterable[Choice]:
        shown.append(count)
        return choices

    found = searched(mesh_shapes=[(8,), (2, 8)], reshards=(True, False), checkpointings=("unit",), progress=progress)
    assert len(found.candidates) == 4 and shown == [4] and not found.refused
    one = graph_fsdp.plan(
        WithLoss, (X,), mesh_shape=(8,), hardware="h100", reshard_after_forward=False, activation_checkpointing="unit"
    )
    (same,) = [c for c in found.candidates if c.choice == Choice((8,), False, "unit", "unit")]
    assert (same.step_seconds, same.peak_nbytes, same.mfu) == (one.step_seconds, one.peak_nbytes, one.mfu)
    assert len({c.step_seconds for c in found.candidates}) == 4, "each with its own options"


def test_meshes_have_every_form_that_a_plan_takes() -> None:
    found = searched(mesh_shapes=[(2, 8), {"dp_replicate": 2, "dp_shard": 8}])
    one, other = found.candidates
    assert (one.step_seconds, one.peak_nbytes, str(one.choice)) == (
        other.step_seconds,
        other.peak_nbytes,
        str(other.choice),
    )
    assert found.summary()["candidates"][1]["choice"]["mesh_shape"]["dp_shard"] == 8
    with pytest.raises(ValueError, match="mesh_shape must be"):
        searched(mesh_shapes=[8])


def test_the_front_is_what_no_other_beats_and_the_best_the_fastest_that_fits() -> None:
    fast, slow, small = candidate(1.0, 100), candidate(2.0, 60), candidate(3.0, 20)
    beaten = [candidate(2.5, 60), candidate(2.0, 70), candidate(3.0, 20)]
    every = (small, beaten[0], fast, slow, *beaten[1:])
    assert Search(every, (), 80).front == [fast, slow, small]
    assert [Search(every, (), memory).best for memory in (100, 99, 20, 19)] == [fast, slow, small, None]
    assert "* the fastest in 0.0 GB" in str(Search(every, (), 100)) and "none fits" in str(Search(every, (), 19))


def test_memory_is_the_hardwares_unless_told() -> None:
    assert searched().memory == HARDWARE["h100"].memory and searched(memory=5).memory == 5


def test_a_choice_that_cannot_be_is_told_and_the_others_are_planned() -> None:
    found = searched(mesh_shapes=[(8,), (12,)])
    assert [c.choice.mesh_shape for c in found.candidates] == [(8,)]
    ((choice, reason),) = found.refused
    assert choice.mesh_shape == (12,) and "does not divide into nodes of 8 h100" in reason
    assert found.summary()["refused"][0]["reason"] == reason and "refused: mesh 12" in str(found)


def test_meshes_replicate_over_whole_nodes() -> None:
    assert meshes(8, 8) == [(8,)]
    assert meshes(64, 8) == [(64,), (8, 8)]
    assert meshes(16384, 8) == [(16384,), (2048, 8), (256, 64), (32, 512), (4, 4096)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reshards": ()}, "nothing to search"),
        ({"memory": 0}, "memory must be a number of bytes above 0, got 0"),
        ({"activation_checkpointing": "unit"}, "activation_checkpointing: is what search"),
        ({"hardware": "h9000"}, "hardware: 'h9000' is not known; known are h100"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        searched(**options)
