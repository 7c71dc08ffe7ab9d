"""A rank is killed, torchrun starts all again, and the training goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from pathlib import Path

import pytest
from launch import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import elastic
import train_gpt

pytestmark = pytest.mark.long
STEPS, EVERY = 24, 5


def train_undisturbed(arguments: list[str]) -> elastic.Outcome:
    """On a rank: what the example prints."""
    sys.argv = [str(elastic.EXAMPLE), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_gpt.main()
    outcome = elastic.Outcome()
    for line in printed.getvalue().splitlines():
        elastic.read_line(line, outcome)
    return outcome


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, elastic.Outcome]:
    folder = tmp_path_factory.mktemp("plain") / "runs"
    first, _ = run_ranks(train_undisturbed, 2, elastic.arguments_of(folder, STEPS, EVERY), backend=None)
    return folder, first


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
