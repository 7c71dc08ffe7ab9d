"""Random models and options on two ranks whose regions Inductor compiles: training sharded is training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checked import MORE, SEED, WITH_INDUCTOR, check_cases, kinds_of
from lasting_ranks import Ranks
from random_cases import Case


@pytest.fixture(scope="module", name="ranks")
def with_inductor() -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch, Ranks(2, seconds=600.0) as processes:
        patch.setenv("GRAPH_FSDP_BACKEND", "inductor")  # the first case starts the processes
        yield processes


def draws_nothing(case: Case) -> bool:
    return all(layer.kind != "dropout" for block in case.model.blocks for layer in block)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_step_with_inductor_equals_that_of_one_process(ranks: Ranks) -> None:
    check_cases(ranks, 2, kinds_of(2), 10_000 * SEED + 250, MORE or WITH_INDUCTOR, draws_nothing)
