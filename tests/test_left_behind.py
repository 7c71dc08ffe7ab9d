"""What a model leaves in memory when it is gone, without ``torch._dynamo.reset()``."""

from __future__ import annotations

import gc
import weakref

import torch
from models import MLP

import graph_fsdp
from graph_fsdp.capture import Engine

CAPTURED = 2  # graphs: of one size, of any size


def train_and_drop() -> weakref.ref[Engine]:
    model = graph_fsdp.compile(MLP(), backend="eager")
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
