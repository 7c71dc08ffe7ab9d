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

SEED = int(os.environ.get("GRAPH_FSDP_SEED", "0"))
MORE = int(os.environ.get("GRAPH_FSDP_EXAMPLES", "0"))  # per seed, instead of those of EXAMPLES

# Per number of ranks: how many cases each of its seeds draws. 0 is one process without a mesh. A case costs its tracing
# on every rank, so most are of one process, and more ranks than two have those in which three and four can matter.
EXAMPLES = {0: (*(25,) * 7, 22), 1: (25, 25), 2: (15, 15), 3: (10,), 4: (10,)}
WITH_INDUCTOR = 3  # more on two ranks

_PREFETCH = {"forward_prefetch", "backward_prefetch"}


def seeds(ranks: int) -> list[int]:
    """Of the tests on so many ranks; ``GRAPH_FSDP_SEED`` gives others."""
    return [10_000 * SEED + 100 * ranks + number for number in range(len(EXAMPLES[ranks]))]


def lasting(number: int) -> Callable[..., Iterator[Ranks]]:
    """A file's fixture ``ranks``: so many processes for all of its tests."""

    @pytest.fixture(scope="module", name="ranks")
    def ranks() -> Iterator[Ranks]:
        with Ranks(number) as processes:
            yield processes

    return ranks


def training_is_the_same(*numbers: int) -> Callable[[Ranks, int, int], None]:
    """A test of all cases on these numbers of ranks, 0 for one process without a mesh."""

    @pytest.mark.long
    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize(("number", "seed"), [(number, seed) for number in numbers for seed in seeds(number)])
    def test(ranks: Ranks, number: int, seed: int) -> None:
        examples = MORE or EXAMPLES[number][seed % 100]
        check_cases(ranks, max(number, 1), kinds_of(number), seed, examples)

    return test


def kinds_of(number: int) -> tuple[MeshKind, ...]:
    """Of the meshes of the tests on so many ranks."""
    return ("shard", "replicate", "hybrid") if number else ("none",)


def may_refuse(case: Case, types: tuple[str, ...], text: str) -> bool:
    """Whether the library may refuse a case with an error of this type."""
    if types[:1] == ("BudgetError",):
        return "budget" in case.options.pipeline
    if types[:1] == ("SettingError",):
        return "name units that are used later" in text and bool(_PREFETCH & set(case.options.program))
    return types[:1] == ("ValueError",) and "selects none that holds parameters" in text and selects_nothing(case)


def alone(case: Case) -> str:
    """The command that runs a case."""
    return f'alone:\npython tests/properties/run_case.py "{case!r}"'


def selects_nothing(case: Case) -> bool:
    """Whether the modules that the case's policy chooses are without parameters."""
    model, ignored = make_model(case.model)
    chosen: Any = case.options.compile.get("auto_wrap_policy")
    if chosen == "size":  # of a model of tens of parameters
        return True
    classes = tuple(POLICIES[chosen]) if chosen else ()
    out = {id(p) for p in ignored}
    return not any(id(p) not in out for m in model.modules() if isinstance(m, classes) for p in m.parameters())


def check_cases(
    ranks: Ranks,
    number: int,
    kinds: tuple[MeshKind, ...],
    first_seed: int,
    examples: int,
    among: Callable[[Case], bool] = lambda case: True,
) -> None:
    """``examples`` random cases on meshes of ``number`` ranks of these kinds, ``among`` which they are drawn."""
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
    @given(cases(number, kinds).filter(among))
    def check(case: Case) -> None:
        wrong, types = verdict(ranks, case)
        if wrong and may_refuse(case, types, wrong):
            found[types[0]] += 1
            return
        found["trained"] += 1
        assert not wrong, f"{wrong}\n\nseed {first_seed}; {alone(case)}"

    check()
    print(f"seed {first_seed}: {dict(found)}")
    assert found.total() >= examples
    assert found["trained"] >= 0.5 * found.total(), f"too many cases are refused: {dict(found)}"
