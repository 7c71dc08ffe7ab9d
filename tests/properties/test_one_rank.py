"""Random models, meshes and options on one rank with gloo: training sharded is training."""

from __future__ import annotations

import pytest
from checked import lasting, training_is_the_same
from lasting_ranks import Ranks
from random_cases import Case, LayerCase, MeshCase, ModelCase, OptionsCase
from run_case import verdict

NORM = (LayerCase("norm"),)
# Was: the partitioner saved the tuple of a layer norm, and not its elements.
TUPLE_SAVED = Case(
    ModelCase(width=2, tokens=True, blocks=(NORM, NORM), registered=(0, 1), calls=(0, 1), residual=False),
    MeshCase("shard", 1),
    OptionsCase({"activation_checkpointing": 0.0}),
    rows=(1,),
)


ranks = lasting(1)
test_a_step_equals_that_of_one_process = training_is_the_same(1)


@pytest.mark.parametrize("case", [TUPLE_SAVED], ids=["tuple saved"])
def test_a_case_that_was_wrong_once(ranks: Ranks, case: Case) -> None:
    assert verdict(ranks, case) == ("", ())
