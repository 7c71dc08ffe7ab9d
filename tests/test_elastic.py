"""A rank is killed, torchrun starts all again, and the training goes on as if nothing had been."""

from __future__ import annotations

import math
from pathlib import Path

import elastic
import pytest

pytestmark = pytest.mark.long
STEPS, EVERY = 24, 5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, elastic.Outcome]:
    folder = tmp_path_factory.mktemp("plain") / "runs"
    return folder, elastic.train(folder, steps=STEPS, every=EVERY)


@pytest.mark.parametrize("seed", [1])
def test_a_killed_rank_changes_no_bit(undisturbed: tuple[Path, elastic.Outcome], tmp_path: Path, seed: int) -> None:
    result = elastic.restarted(tmp_path / "runs", undisturbed[0], seed=seed, steps=STEPS, every=EVERY)
    assert result.differences == 0, result


def test_one_rank_goes_on_where_two_were_ended(undisturbed: tuple[Path, elastic.Outcome], tmp_path: Path) -> None:
    outcome = elastic.on_another_number(tmp_path / "runs", steps=STEPS, every=EVERY)
    assert outcome.resumed and 0 < outcome.resumed[0] <= STEPS // 2
    expected = undisturbed[1].losses
    assert set(outcome.losses) == set(range(outcome.resumed[0] + 1, STEPS + 1))
    assert all(math.isclose(loss, expected[step], rel_tol=1e-4) for step, loss in outcome.losses.items())
