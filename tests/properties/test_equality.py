"""The comparison that random cases are judged by sees what is wrong; and there are as many cases as the pages say."""

from __future__ import annotations

import copy

import pytest
from checked import EXAMPLES, WITH_INDUCTOR
from equality import differences
from random_cases import Case, LayerCase, MeshCase, ModelCase
from random_training import train_reference


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


def test_there_are_at_least_300_cases_on_1_to_4_ranks() -> None:
    assert set(EXAMPLES) == {0, 1, 2, 3, 4} and all(map(sum, EXAMPLES.values()))
    assert sum(map(sum, EXAMPLES.values())) + WITH_INDUCTOR >= 300
