"""What a model leaves in memory when it is gone, without ``torch._dynamo.reset()``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from facts import Facts
from models import MLP
from tracing import forgetting

import graph_fsdp
from graph_fsdp.engine.engine import Engine

CAPTURED = 2  # graphs: of one size, of any size
FACTS = Facts(__name__)


@pytest.fixture(autouse=True)
def as_in_a_users_process(older_objects_frozen: None) -> Iterator[None]:
    with forgetting():
        yield


def train_and_drop() -> weakref.ref[Engine]:
    model = graph_fsdp.compile(MLP(depth=1), backend="eager")
    for rows in (4, 3, 2):
        model(torch.randn(rows, 16)).sum().backward()
    assert len(graph_fsdp.inspect(model).graphs) == CAPTURED
    return weakref.ref(vars(model)["_graph_fsdp"])


def alive(name: str) -> int:
    """Objects whose type has this name."""
    return sum(type(o).__name__ == name for o in gc.get_objects())


def test_neither_engine_nor_fake_values_stay_behind() -> None:
    engine = train_and_drop()
    gc.collect()
    assert engine() is None
    remembered = alive("_DispatchCacheKey")
    for _ in range(2):
        train_and_drop()
    gc.collect()
    assert alive("_DispatchCacheKey") <= remembered


def test_symbols_go_with_their_model() -> None:
    train_and_drop()
    gc.collect()
    environments, fakes = alive("ShapeEnv"), alive("TrackedFake")
    for _ in range(2):
        train_and_drop()
    gc.collect()
    assert alive("ShapeEnv") <= environments
    assert alive("TrackedFake") <= fakes


@FACTS
def no_graph_stays_where_process_groups_remember_the_code_that_ran() -> None:
    with forgetting():
        engine = train_and_drop()
        gc.collect()
    assert engine() is None
    assert not alive("Node") and not alive("GraphModule")


test_on_two_ranks = FACTS.on(2)
