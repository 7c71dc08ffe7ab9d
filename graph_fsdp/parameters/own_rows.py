"""A state dict of whole tensors becomes one of each rank's own rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.parameters.shards import Storage


def own_rows(module: nn.Module, storage: Any, state_dict: Mapping[str, Any]) -> Any:
    """Return ``state_dict`` with a DTensor of this rank's rows for each whole tensor of a parameter that is sharded."""
    if not isinstance(storage, Storage) or not isinstance(state_dict, Mapping):
        return state_dict
    held = {id(p.shard): p for p in storage.parameters.values()}
    rows: OrderedDict[str, Any] = OrderedDict(state_dict)
    vars(rows).update(getattr(state_dict, "__dict__", {}))  # versions of modules
    for name, registered in module.named_parameters(remove_duplicate=False):
        p = held.get(id(registered))
        value: Any = state_dict.get(name)
        whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta
        if p is not None and isinstance(registered, DTensor) and whole and value.shape == registered.shape:
            if isinstance(p.placeholder, DTensor):  # the part of this tensor-parallel rank
                shape, first = compat.local_shape_and_offset(p.placeholder)
                value = value[tuple(slice(at, at + size) for at, size in zip(first, shape, strict=True))]
            rows[name] = storage.shard_of(p, value)
    return rows
