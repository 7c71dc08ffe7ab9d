"""Random models and options in one process without a mesh: training is that of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checked import check_cases, seeds
from lasting_ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(0) as nobody:
        yield nobody


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", seeds(0))
def test_a_step_equals_that_of_plain_pytorch(ranks: Ranks, seed: int) -> None:
    check_cases(ranks, 1, ("none",), seed)
