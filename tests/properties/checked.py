"""Cases drawn from a seed, each trained and compared. A failure is shrunk, and says how to run it alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from case_strategies import cases
from hypothesis import HealthCheck, Phase, given, seed, settings
from lasting_ranks import Ranks
from random_cases import Case, MeshKind
from random_models import make_model
from random_training import POLICIES
from run_case import verdict

EXAMPLES = 25
SEED = int(os.environ.get("GRAPH_FSDP_SEED", "0"))
MORE = int(os.environ.get("GRAPH_FSDP_EXAMPLES", "0"))  # per seed, instead of EXAMPLES

# Per number of ranks: how many seeds. 0 is one process without a mesh.
SEEDS = {0: 4, 1: 3, 2: 3, 3: 1, 4: 1}


def seeds(ranks: int) -> list[int]:
    """Of the tests on so many ranks; ``GRAPH_FSDP_SEED`` gives others."""
    return [10_000 * SEED + 100 * ranks + number for number in range(SEEDS[ranks])]


def lasting(number: int) -> Callable[..., Iterator[Ranks]]:
    """A file's fixture ``ranks``: so many processes for all of its tests."""

    @pytest.fixture(scope="module", name="ranks")
    def ranks() -> Iterator[Ranks]:
        with Ranks(number) as processes:
            yield processes

    return ranks


def training_is_the_same(*numbers: int) -> Callable[[Ranks, int, int], None]:
    """A test of all cases on these numbers of ranks, 0 for one process without a mesh."""

    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize(("number", "seed"), [(number, seed) for number in numbers for seed in seeds(number)])
    def test(ranks: Ranks, number: int, seed: int) -> None:
        check_cases(ranks, max(number, 1), ("shard", "replicate", "hybrid") if number else ("none",), seed)

    return test


def may_refuse(case: Case, types: tuple[str, ...], text: str) -> bool:
    """Whether the library may refuse a case with an error of this type."""
    if types[:1] == ("BudgetError",):
        return "budget" in case.options.pipeline
    return types[:1] == ("ValueError",) and "selects none that holds parameters" in text and selects_nothing(case)


def selects_nothing(case: Case) -> bool:
    """Whether the modules that the case's policy chooses are without parameters."""
    model, ignored = make_model(case.model)
    chosen: Any = case.options.compile.get("auto_wrap_policy")
    if chosen == "size":  # of a model of tens of parameters
        return True
    classes = tuple(POLICIES[chosen]) if chosen else ()
    out = {id(p) for p in ignored}
    return not any(id(p) not in out for m in model.modules() if isinstance(m, classes) for p in m.parameters())


def check_cases(ranks: Ranks, number: int, kinds: tuple[MeshKind, ...], first_seed: int) -> None:
    """Random cases on meshes of ``number`` ranks of these kinds."""
    examples = MORE or EXAMPLES
    found: Counter[str] = Counter()

    @seed(first_seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(cases(number, kinds))
    def check(case: Case) -> None:
        wrong, types = verdict(ranks, case)
        if wrong and may_refuse(case, types, wrong):
            found[types[0]] += 1
            return
        found["trained"] += 1
        assert not wrong, f'{wrong}\n\nseed {first_seed}; alone:\npython tests/properties/run_case.py "{case!r}"'

    check()
    print(f"seed {first_seed}: {dict(found)}")
    assert found.total() >= examples
    assert found["trained"] >= 0.9 * found.total(), f"too many cases are refused: {dict(found)}"
