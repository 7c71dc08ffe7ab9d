"""An optimizer's parameters are shards of compiled models, and are others while it steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import optim

from graph_fsdp.parameters.sharded import ShardedParameter
from graph_fsdp.parameters.shards import Storage

NOT_COMPILED = (
    "optimizer: none of its parameters is a shard of a model that graph_fsdp.compile was called on (with backend='xla' "
    "it has others); make it of model.parameters() after compile"
)


def parameters_of(optimizer: optim.Optimizer) -> list[Any]:
    """Return the parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def shards_of(parameters: Iterable[Any]) -> list[tuple[Storage, dict[str, ShardedParameter]]]:
    """Return the compiled models that have shards among these parameters, in no order, with those that each has."""
    wanted = set(map(id, parameters))
    for storage in Storage.installed if wanted else ():
        replaced = (p.in_modules for p in storage.parameters.values() if p.in_modules is not p.registered)
        if not storage.is_away and any(id(p) in wanted for p in replaced):
            storage.refresh()  # makes shards of them: ``load_state_dict(assign=True)`` has registered them
    found = (
        (storage, {name: p for name, p in storage.parameters.items() if id(p.shard) in wanted})
        for storage in (Storage.installed if wanted else ())
    )
    return [(storage, held) for storage, held in found if held]


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
