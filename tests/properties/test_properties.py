"""Random models, meshes and options: training sharded is training.

Each test draws its cases from a seed; the same seed draws the same cases. A failure is shrunk to a small case and says
how to run it alone. Not among the ordinary tests so far: a case takes seconds, and on one rank cases fail that nobody
has looked at. To run them:

    GRAPH_FSDP_EXAMPLES=20 GRAPH_FSDP_SEED=7 python -m pytest -s tests/properties
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterator

import pytest
from case_strategies import cases
from equality import differences
from hypothesis import HealthCheck, Phase, given, seed, settings
from lasting_ranks import Ranks
from random_cases import Case, LayerCase, MeshCase, ModelCase
from random_training import train_reference
from run_case import verdict

SEED = int(os.environ.get("GRAPH_FSDP_SEED", "0"))
EXAMPLES = int(os.environ.get("GRAPH_FSDP_EXAMPLES", "0"))  # per test; 0: those of PER_RANKS

pytestmark = pytest.mark.skipif("GRAPH_FSDP_EXAMPLES" not in os.environ, reason="GRAPH_FSDP_EXAMPLES says how many")

PER_RANKS = {1: 90, 2: 120, 3: 40, 4: 50}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as processes:
        yield processes


def may_refuse(case: Case, types: tuple[str, ...]) -> bool:
    """Whether the library may refuse a case with an error of this type."""
    return types[:1] == ("BudgetError",) and "budget" in case.options.pipeline


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", PER_RANKS)
def test_a_step_equals_that_of_one_process(ranks: Ranks, number: int) -> None:
    found: Counter[str] = Counter()
    first_seed = SEED * 100 + number

    @seed(first_seed)
    @settings(
        max_examples=EXAMPLES or PER_RANKS[number],
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(cases(number))
    def check(case: Case) -> None:
        wrong, types = verdict(ranks, case)
        if wrong and may_refuse(case, types):
            found[types[0]] += 1
            return
        found["trained"] += 1
        assert not wrong, f'{wrong}\n\nseed {first_seed}; alone:\npython tests/properties/run_case.py "{case!r}"'

    check()
    print(f"seed {first_seed}: {dict(found)}")
    assert found.total() >= (EXAMPLES or PER_RANKS[number])
    assert found["trained"] >= 0.9 * found.total(), f"too many cases are refused: {dict(found)}"


@pytest.mark.parametrize("wrong", ["a gradient twice", "a gradient of one rank", "a buffer", "no gradient", "a loss"])
def test_another_result_is_seen(wrong: str) -> None:
    case = Case(ModelCase(blocks=((LayerCase("counter"), LayerCase("affine")),)), MeshCase("shard", 2), rows=(2, 2))
    expected = train_reference(case)
    outcomes = [copy.deepcopy(expected[0]) for _ in range(case.mesh.ranks)]
    for rank, outcome in enumerate(outcomes):
        outcome.inputs = [x.chunk(2)[rank] for x in outcome.inputs]
    assert differences(case, outcomes, expected) == []
    found, gradients = outcomes[1], outcomes[1].gradients[1]
    match wrong:
        case "a gradient twice":
            gradients["head.weight"] = 2 * expected[0].gradients[1]["head.weight"]
        case "a gradient of one rank":
            gradients["head.bias"] = expected[0].gradients[1]["head.bias"] + 1e-6
        case "a buffer":
            found.buffers["blocks.0.layers.0.count"] += 1
        case "no gradient":
            gradients["head.bias"] = None
        case "a loss":
            found.losses[1] *= 1 + 1e-6
    assert len(differences(case, outcomes, expected)) == 1
