"""An optimizer has other parameters in its groups, and another state, while it steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import optim

NOT_COMPILED = (
    "optimizer: none of its parameters is a shard of a model that graph_fsdp.compile was called on (with backend='xla' "
    "it has others); make it of model.parameters() after compile"
)


def parameters_of(optimizer: optim.Optimizer) -> list[Any]:
    """Return the parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def restored(optimizer: optim.Optimizer) -> Iterator[list[list[Any]]]:
    """Give groups their parameters back, and the optimizer its state, at the end. Yields the parameters by group."""
    groups, state = optimizer.param_groups, optimizer.state
    params = [group["params"] for group in groups]
    try:
        yield params
    finally:
        optimizer.state = state
        for group, members in zip(groups, params, strict=True):
            group["params"] = members
