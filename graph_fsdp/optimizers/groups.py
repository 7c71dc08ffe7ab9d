"""An optimizer's parameters are shards of compiled models, and are others while it steps."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, optim
from torch.autograd.graph import increment_version

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


def count_writes(stepped: Iterable[Any]) -> None:
    """Count a step as a write to those of its parameters that are shards of compiled models and have gradients: torch
    counts none where an operator takes many DTensors (``foreach``), or steps them (``fused``)."""
    if written := [p for p in stepped if p.grad is not None]:
        shards = {id(p.shard) for storage in Storage.installed for p in storage.parameters.values()}
        increment_version([p for p in written if id(p) in shards])


@contextmanager
def restored(optimizer: optim.Optimizer) -> Iterator[list[list[Any]]]:
    """Give groups their parameters back, and the optimizer its state, at the end. Yields the parameters by group."""
    groups, state = optimizer.param_groups, optimizer.state
    params = [group["params"] for group in groups]

    def restore() -> None:
        optimizer.state = state
        for group, members in zip(groups, params, strict=True):
            group["params"] = members

    try:
        yield params
    finally:
        try:
            restore()
        except BaseException:  # [Note: Ctrl-C] in parameters/sharded.py
            restore()
            raise


def values_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group has beside its parameters."""
    return {name: value for name, value in group.items() if name not in _MEMBERS}


@contextmanager
def values_kept(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Give groups the values back, at the end, that they had beside their parameters. Tensors stay the same objects."""
    before = [values_of(group) for group in groups]
    copies = [{name: copied(value) for name, value in values.items()} for values in before]
    try:
        yield
    finally:
        for group, values, kept in zip(groups, before, copies, strict=True):
            for name in group.keys() - values.keys() - _MEMBERS:
                del group[name]
            for name, value in values.items():
                if isinstance(value, Tensor):
                    value.copy_(kept[name])
                group[name] = value if isinstance(value, Tensor) else kept[name]


_MEMBERS = {"params", "param_names"}


def copied(value: Any) -> Any:
    """Return a copy of what a step may change in place."""
    return copy.deepcopy(value) if isinstance(value, (Tensor, list, dict, set)) else value
