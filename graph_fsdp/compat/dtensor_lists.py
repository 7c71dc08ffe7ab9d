"""DTensor finds out in linear time how an operator of many tensors is sharded, as that of an optimizer's first step.

For each of a list's tensors torch walks all tensors that the operator is given, four or five lists of them, to see
whether one is sharded in strides (``_StridedShard``): 577 parameters take half a CPU second, twice as many four times
as long. Here they are walked once per operator. Where one is sharded so, torch does what it does.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import _sharding_prop as sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard

WALKS_ALL = "_propagate_use_strided_shard_flag"  # torch 2.13 and later


class _Once:
    """Is torch's ``original`` for a time, and calls it where it does something."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self._schema: Any = None  # the last one, which nobody changes
        self._has_strides = True

    def __call__(self, strategy: Any, schema: Any) -> None:
        if schema is not self._schema:
            placements = (placement for spec in schema.args_spec for placement in spec.placements)
            self._schema, self._has_strides = schema, any(isinstance(p, _StridedShard) for p in placements)
        if self._has_strides:
            self.original(strategy, schema)


def begin_linear_lists() -> None:
    """Have lists of DTensors be looked at once, until ``end_linear_lists``; where both are called again, too."""
    original = getattr(sharding_prop, WALKS_ALL, None)
    if original is not None and not isinstance(original, _Once):
        setattr(sharding_prop, WALKS_ALL, _Once(original))


def end_linear_lists() -> None:
    found = getattr(sharding_prop, WALKS_ALL, None)
    if isinstance(found, _Once):
        setattr(sharding_prop, WALKS_ALL, found.original)
