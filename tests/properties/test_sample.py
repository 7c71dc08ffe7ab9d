"""A few random cases of each kind that is cheap: in one process, on one rank, and on two ranks, which are the same two
for all of them. The other files have many more, of every kind."""

from __future__ import annotations

import pytest
import torch
from case_strategies import cases
from checked import alone, kinds_of, may_refuse, seeds
from hypothesis import HealthCheck, Phase, given, seed, settings
from lasting_ranks import MESHES, Raised, Ranks, Runner, make_mesh
from launch import run_ranks
from random_cases import Case, LayerCase, MeshCase, ModelCase, OptionsCase
from random_training import Outcome
from run_case import judged
from torch import distributed as dist

EACH = 3
HEALTH = list(HealthCheck)
NORM = (LayerCase("norm"),)
# Was: the partitioner saved the tuple of a layer norm, and not its elements.
TUPLE_SAVED = Case(
    ModelCase(width=2, tokens=True, blocks=(NORM, NORM), registered=(0, 1), calls=(0, 1), residual=False),
    MeshCase("shard", 1),
    OptionsCase({"activation_checkpointing": 0.0}),
    rows=(1,),
)

# Was: memory was looked at while gathers stood in front of the copies that they read.
COPIED_LATE = Case(
    ModelCase(width=1, residual=False),
    MeshCase("shard", 2),
    OptionsCase(
        {"activation_checkpointing": "unit", "columns": True, "offload": False},
        {"bucket": "none", "hardware": "h100"},
    ),
    rows=(1,),
)


def is_cheap(case: Case) -> bool:
    """It is captured once, or twice with an evaluation, and is small."""
    same_sizes = len(set(case.rows)) == 1 and not case.skewed and not case.no_sync
    one_call = case.microbatches == case.calls == 1 and not case.model.graph_break
    return same_sizes and one_call and 1 <= len(case.model.calls) <= 2


def drawn(number: int) -> list[Case]:
    """Cases on so many ranks, 0 for one process without a mesh."""
    found: list[Case] = []

    @seed(seeds(number)[0])
    @settings(max_examples=EACH, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=HEALTH)
    @given(cases(max(number, 1), kinds_of(number)).filter(is_cheap))
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


def check(case: Case, outcomes: list[Outcome | Raised]) -> None:
    wrong, types = judged(case, outcomes)
    assert not wrong or may_refuse(case, types, wrong), f"{wrong}\n\n{alone(case)}"


def test_training_in_one_process_is_that_of_plain_pytorch() -> None:
    with Ranks(0) as ranks:
        for case in drawn(0):
            check(case, ranks.run(case))


def run_all(chosen: list[Case]) -> list[Outcome | Raised]:
    """On a rank: the outcomes of the cases that it takes part in."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    meshes = {mesh: make_mesh(mesh) for mesh in MESHES if mesh.ranks <= dist.get_world_size()}
    runner = Runner(meshes.__getitem__)
    return [runner.run(case, meshes[case.mesh], rank) for case in chosen if rank < case.mesh.ranks]


@pytest.fixture(scope="module")
def on_two_ranks() -> list[tuple[Case, list[Outcome | Raised]]]:
    """Cases on one rank and on two, and what each rank of theirs has seen."""
    chosen = [TUPLE_SAVED, COPIED_LATE, *drawn(1), *drawn(2)]
    of_ranks = [iter(outcomes) for outcomes in run_ranks(run_all, 2, chosen)]
    return [(case, [next(outcomes) for outcomes in of_ranks[: case.mesh.ranks]]) for case in chosen]


@pytest.mark.parametrize("number", [1, 2])
def test_training_sharded_is_training(on_two_ranks: list[tuple[Case, list[Outcome | Raised]]], number: int) -> None:
    seen = [(case, outcomes) for case, outcomes in on_two_ranks if case.mesh.ranks == number]
    assert len(seen) >= EACH
    for case, outcomes in seen:
        check(case, outcomes)
