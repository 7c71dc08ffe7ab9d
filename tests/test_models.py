"""Every kind of model trains sharded as it does alone.

Each model runs one schedule on two ranks with the eager backend: training steps with several batch sizes and
evaluations in ``eval`` mode under ``no_grad`` between them. Losses, predictions, gradients, parameters and
buffers of each rank must be those of the reference, whose ranks have the same rows and the same random state.

All models of a group share one launch; a model that fails does so alone, under its own name. Compiling is what takes
time, so most models have two captures, and those that differ in what another size means have the third.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from marks import mostly_long, selected
from models import CASES, HUGGING_FACE_CASES
from reference import Outcome, Outcomes, Step, check_outcome, outcomes_of, train_all, train_reference
from torch.distributed.tensor import DTensor, Replicate, Shard

import graph_fsdp
from graph_fsdp.units import parameter_names

EAGER = {"backend": "eager"}

# Three captures per model: the first batch size, then any size, for training and for evaluation; and training
# goes on after an evaluation.
SCHEDULE = [
    Step(rows=4),
    Step(rows=4),
    Step(rows=3),
    Step(rows=5, evaluate=True),
    Step(rows=6),
    Step(rows=4, evaluate=True),
]

# Two of the three: one size.
ONE_SIZE = [Step(rows=4), Step(rows=4), Step(rows=4, evaluate=True)]
SMALL_OF_ONE_SIZE = ["one_block", "gpt_tied", "gpt_dropout", "gpt_checkpoint_dropout", "frozen", "lstm"]
OF_ONE_SIZE = [*SMALL_OF_ONE_SIZE, "hf_llama", "hf_bert", "hf_vit"]
OF_MANY_SIZES = ["mlp", "cnn_batchnorm"]  # "uneven" too, on three ranks, and GPT-2, which has dropout

# The eager backend runs the kernels that the model runs by itself, on the same rows: equal bit for bit. One
# model runs other kernels as soon as Dynamo traces it, whatever the backend: transformers passes Llama's causal
# mask as a tensor, not as a flag. With torch's own "aot_eager" on one process the gradients of a step differ by 4e-7.
BOUNDS = {"hf_llama": 1e-5}


def train_small(names: list[str]) -> dict[str, Outcome | str]:
    """On a rank."""
    of_many = train_all([name for name in OF_MANY_SIZES if name in names], SCHEDULE, "sgd", EAGER)
    return {**of_many, **train_all([name for name in SMALL_OF_ONE_SIZE if name in names], ONE_SIZE, "sgd", EAGER)}


@pytest.fixture(scope="module")
def small_outcomes() -> Outcomes:
    return run_ranks(train_small, 2, selected([*OF_MANY_SIZES, *SMALL_OF_ONE_SIZE], __name__, "name"))


def train_hugging_face() -> dict[str, Outcome | str]:
    """On a rank."""
    of_one = [name for name in HUGGING_FACE_CASES if name in OF_ONE_SIZE]
    of_many = [name for name in HUGGING_FACE_CASES if name not in OF_ONE_SIZE]
    return {**train_all(of_many, SCHEDULE, "sgd", EAGER), **train_all(of_one, ONE_SIZE, "sgd", EAGER)}


@pytest.fixture(scope="module")
def hugging_face_outcomes() -> Outcomes:
    return run_ranks(train_hugging_face, 2)


def check_case(outcomes: Outcomes, name: str, bound: float = 0.0) -> None:
    expected = train_reference(name, ONE_SIZE if name in OF_ONE_SIZE else SCHEDULE, world_size=len(outcomes))
    for actual, wanted in zip(outcomes_of(outcomes, name), expected, strict=True):
        check_outcome(actual, wanted, bound)


SHORT = ["gpt_dropout", "cnn_batchnorm", "lstm"]  # test_train.py has tied weights and frozen parameters


@pytest.mark.parametrize("name", mostly_long([*OF_MANY_SIZES, *SMALL_OF_ONE_SIZE], SHORT))
def test_a_model_trains_sharded_as_it_does_alone(small_outcomes: Outcomes, name: str) -> None:
    check_case(small_outcomes, name, BOUNDS.get(name, 0.0))


@pytest.mark.long
@pytest.mark.parametrize("name", HUGGING_FACE_CASES)
def test_a_hugging_face_model_trains_sharded_as_it_does_alone(hugging_face_outcomes: Outcomes, name: str) -> None:
    check_case(hugging_face_outcomes, name, BOUNDS.get(name, 0.0))


@pytest.mark.parametrize("name", ["gpt_dropout"])
def test_each_rank_draws_its_own_masks(small_outcomes: Outcomes, name: str) -> None:
    """The comparison above would be empty if ranks drew equal masks, or the models none."""
    first, second = outcomes_of(small_outcomes, name)
    plain, _ = train_reference("gpt", ONE_SIZE, world_size=2)
    assert len({outcome.losses[0].item() for outcome in (first, second, plain)}) == 3


@pytest.mark.parametrize("name", ["cnn_batchnorm"])
def test_each_rank_has_its_own_statistics(small_outcomes: Outcomes, name: str) -> None:
    first, second = outcomes_of(small_outcomes, name)
    mean = "blocks.0.1.running_mean"
    assert not torch.equal(first.buffers[mean], second.buffers[mean])


def test_uneven_rows_on_three_ranks() -> None:
    """One rank holds no row of several parameters. The mean of three rounds, so this is not bit for bit."""
    steps = [Step(), Step()]
    outcomes = run_ranks(train_all, 3, ["uneven"], steps, "sgd", EAGER)
    for actual, expected in zip(
        outcomes_of(outcomes, "uneven"), train_reference("uneven", steps, world_size=3), strict=True
    ):
        check_outcome(actual, expected, bound=1e-6)


def layout(name: str) -> dict[str, Any]:
    """On a rank: what a user sees of the parameters."""
    model = graph_fsdp.compile(CASES[name].model(), backend="eager")
    placements = {}
    for parameter_name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.is_leaf
        placements[parameter_name] = (parameter.placements, parameter.shape, parameter.to_local().shape)
    state = {key: (type(value), value.requires_grad) for key, value in model.state_dict(keep_vars=True).items()}
    tied = [names for names in parameter_names(model).values() if len(names) > 1]
    values = {key: value.full_tensor() for key, value in model.named_parameters()}
    return {"placements": placements, "state": state, "tied": tied, "values": values, "rank": dist.get_rank()}


def layouts(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: layout(name) for name in names}


def expected_local_shape(parameter: torch.Tensor, rank: int, world_size: int) -> torch.Size:
    if parameter.ndim == 0:
        return parameter.shape
    chunks = parameter.chunk(world_size)
    return torch.Size([len(chunks[rank]) if rank < len(chunks) else 0, *parameter.shape[1:]])


def test_parameters_become_shards_with_the_same_names_and_values() -> None:
    names = ["uneven", "gpt_tied", "frozen", "cnn_batchnorm"]
    for result in run_ranks(layouts, 3, names):
        for name in names:
            model, seen = CASES[name].model(), result[name]
            originals = dict(model.named_parameters())
            assert list(seen["values"]) == list(originals)
            for key, original in originals.items():
                placements, shape, local_shape = seen["placements"][key]
                assert placements == ((Shard(0),) if original.ndim else (Replicate(),)), key
                assert shape == original.shape
                assert local_shape == expected_local_shape(original, seen["rank"], 3), key
                assert torch.equal(seen["values"][key], original)
            assert list(seen["state"]) == list(model.state_dict())
            for key, value in model.state_dict(keep_vars=True).items():
                assert seen["state"][key][1] == value.requires_grad, key
        assert result["gpt_tied"]["tied"] == [["tokens.weight", "head.weight"]]
