"""Random forwards that break into graphs train on two ranks as on one. Pieces share what they gather, batches have
other sizes from call to call, and some calls only evaluate. Both ranks have the same batches, so that the mean of their
gradients is plain PyTorch's gradient. A fact's number is its seed."""

from __future__ import annotations

import copy
import functools
import random
import warnings

import torch
from facts import Facts
from random_programs import random_program
from test_random_graph_breaks import CASES, FIRST, compare, evaluate

import graph_fsdp
from graph_fsdp.passes import default_pipeline

FACTS = Facts(__name__)
TURNS = 6
OPTIONS = (
    *({}, {}, {"reshard_after_forward": False}, {"activation_checkpointing": "unit"}, {"dynamic": True}),
    {"passes": default_pipeline(bucket="none")},
)


def trains_as_on_one_rank(seed: int) -> None:
    source, cls = random_program(seed)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    plain = cls().double()
    model = copy.deepcopy(plain)
    policy = {type(plain.get_submodule("layers.0"))} if draw.random() < 0.8 else None
    options = draw.choice(OPTIONS)
    graph_fsdp.compile(model, backend="eager", fullgraph=False, auto_wrap_policy=policy, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="code outside of graphs reads")
        for turn in range(TURNS):
            x = torch.randn(draw.choice([3, 3, 4, 5]), 4, dtype=torch.float64)
            step = draw.choice([compare, compare, evaluate])
            differences = step(model, plain, x, turn)
            assert not differences, f"turn {turn}, {options}: {differences}\n{source}"


for seed in range(FIRST + 5000, FIRST + 5000 + CASES // 2):
    fact = functools.partial(trains_as_on_one_rank, seed)
    fact.__name__ = f"program_{seed}"  # type: ignore[attr-defined]
    (FACTS if seed < FIRST + 5004 else FACTS.long)(fact)
test_on_two_ranks = FACTS.on(2)
