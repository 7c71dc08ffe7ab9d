"""Changes to a model's parameters between two calls that cannot be taken over raise one error each.

[Note: data of a DTensor]
``parameter.data = …`` exchanges what the DTensor itself has, and its local tensor stays: no shard changes, in FSDP2
neither, and torch says nothing. What was assigned cannot be found any more. That something was, shows the storage of
the DTensor itself, which has no bytes, and is another one then.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import ParameterChangedError

if TYPE_CHECKING:
    from graph_fsdp.parameters.sharded import ShardedParameter

_storage = torch.Tensor.untyped_storage


class AssignedData:
    """Finds shards whose ``data`` was assigned: see [Note: data of a DTensor]. Asked before each forward, so it is one
    loop in C."""

    def __init__(self, parameters: Collection[ShardedParameter]) -> None:
        self._parameters = [p for p in parameters if isinstance(p.shard, DTensor)]
        self.look()

    def look(self) -> None:
        """What the shards are now, is right."""
        self._shards = [p.shard for p in self._parameters]
        self._storages = [*map(_storage, self._shards)]
        self._locals = [compat.local_part(shard) for shard in self._shards]

    def check(self) -> None:
        """
        Raises:
            ParameterChangedError: ``data`` of a shard was assigned; once.
        """
        if all(map(operator.is_, map(_storage, self._shards), self._storages)):
            return
        assigned = []
        for p, storage, local in zip(self._parameters, self._storages, self._locals, strict=True):
            # What ``model.to(…)`` does exchanges the local tensor too.
            if _storage(p.shard) is not storage and compat.local_part(p.shard) is local:
                p.shard.data = compat.make_dtensor(local, p.shard)
                assigned.append(p.spec.name)
        self.look()
        if assigned:
            names = ", ".join(map(repr, assigned))
            raise ParameterChangedError(
                f".data of parameter {names} was assigned, which does not change values of a DTensor: they are what "
                "they were. Write to the parameter in torch.no_grad() (parameter.copy_ of a DTensor, "
                "parameter.to_local().copy_ of this rank's rows), use load_state_dict, or write in a block of "
                "graph_fsdp.unsharded(model)"
            )


def check_tied(p: ShardedParameter) -> None:
    """One parameter under several names is registered under all of them, or equal ones (``load_state_dict`` with
    ``assign=True`` registers one for each name)."""
    first, *others = (module._parameters.get(leaf) for module, leaf in p.owners)
    for (module, leaf), found in zip(p.owners[1:], others, strict=True):
        if found is not first and not _are_equal(first, found):
            raise ParameterChangedError(
                f"parameter {p.spec.name!r} is tied to {leaf!r} of a {type(module).__name__}, where another parameter "
                "stands now: untie parameters before graph_fsdp.compile, and write values to the parameter that is "
                "there"
            )


def _are_equal(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or first is None:
        return False
    one, other = compat.local_part(first.detach()), compat.local_part(second.detach())
    return one.shape == other.shape and one.dtype is other.dtype and torch.equal(one, other)


def checked_replacement(p: ShardedParameter, found: Any) -> nn.Parameter:
    if found is None:
        raise ParameterChangedError(
            f"parameter {p.spec.name!r} was removed from its module, which has been compiled with it; remove it before "
            "graph_fsdp.compile, or exchange the whole module"
        )
    same_kind = isinstance(found, nn.Parameter) and isinstance(found, DTensor) == isinstance(p.shard, DTensor)
    if not same_kind or found.shape != p.shard.shape:
        raise ParameterChangedError(
            f"parameter {p.spec.name!r} was replaced by {type(found).__name__} that is not a sharded parameter "
            f"of shape {tuple(p.spec.shape)}; copy into the parameter, or load with load_state_dict on DTensors"
        )
    replacement: nn.Parameter = found
    return replacement
