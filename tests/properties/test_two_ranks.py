"""Random models, meshes and options on two ranks with gloo: training sharded is training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checked import check_cases, seeds
from lasting_ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as processes:
        yield processes


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", seeds(2))
def test_a_step_equals_that_of_one_process(ranks: Ranks, seed: int) -> None:
    check_cases(ranks, 2, ("shard", "replicate", "hybrid"), seed)
