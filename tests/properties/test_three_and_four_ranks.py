"""Random models, meshes and options on three ranks, which are not all that there are, and on four."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checked import check_cases, seeds
from lasting_ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as processes:
        yield processes


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("number", "seed"), [(number, seed) for number in (3, 4) for seed in seeds(number)])
def test_a_step_equals_that_of_one_process(ranks: Ranks, number: int, seed: int) -> None:
    check_cases(ranks, number, ("shard", "replicate", "hybrid"), seed)
