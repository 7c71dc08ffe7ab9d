"""Arrange parameters in buckets, and a bucket in messages, once before anything is traced.

It follows from the parameters' shapes, the mesh and the hardware's description, which ranks share. The shards lie in
storage as the buckets do, so that a bucket is one slice of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Literal

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.ir import spec
from graph_fsdp.passes.ir.spec import BucketSpec, ModelSpec, ParameterSpec

BucketSize = Literal["unit", "none", "auto"] | int
Messages = Literal["auto", "one"]

_Members = list[ParameterSpec]

_PARTS, _WORTH = 4, 0.75  # see _divide_first


def arrange_buckets(
    model: ModelSpec,
    size: BucketSize,
    cost: CostModel | None = None,
    budget: int | None = None,
    messages: Messages = "auto",
) -> ModelSpec:
    """Return ``model`` with buckets of ``size``:

    - ``"unit"``: one per unit, and see :func:`_divide_first`;
    - ``"none"``: one per parameter;
    - a number of gathered bytes that a bucket of several parameters does not exceed;
    - ``"auto"``: the smallest such number at which an all-gather reaches nine tenths of the link's bandwidth by the
      cost model, at most the largest unit, and at most half of a ``budget`` (one bucket in use, one under way).

    With ``messages="one"`` each bucket is sent in one; with ``"auto"`` see :func:`_in_messages`.

    Raises:
        ValueError: ``"auto"`` without a cost model.
    """
    if size == "unit":
        buckets = spec.unit_buckets(model.parameters.values())
        if cost is not None and cost.hardware.overlaps:
            buckets = _divide_first(buckets, cost)
    elif size == "none":
        sharded = [p for p in model.parameters.values() if not p.replicated and not p.empty]
        buckets = spec.named_buckets((p.name, (p,)) for p in sharded)
    else:
        buckets = _capped_buckets(model, _saturating_size(model, cost, budget) if size == "auto" else int(size))
    if messages == "auto" and cost is not None:
        buckets = tuple(_in_messages(bucket, cost) if bucket.world_size > 1 else bucket for bucket in buckets)
    return dataclasses.replace(model, buckets=buckets)


def _divide_first(buckets: tuple[BucketSpec, ...], cost: CostModel) -> tuple[BucketSpec, ...]:
    """Divide the first unit's bucket in about four, where the first takes at most 3/4 of the whole's time."""
    first = next((index for index, bucket in enumerate(buckets) if bucket.unit), None)
    if first is None or buckets[first].world_size == 1:
        return buckets
    whole = buckets[first]
    parts = _fill([[p] for p in whole.parameters], whole.gathered_nbytes // _PARTS)
    seconds = cost.all_gather_seconds(_nbytes(parts[0]), whole.mesh.group)
    if len(parts) == 1 or seconds > _WORTH * cost.all_gather_seconds(whole.gathered_nbytes, whole.mesh.group):
        return buckets
    runs = [list(bucket.parameters) for bucket in buckets]
    return spec.named_buckets((None, run) for run in (*runs[:first], *parts, *runs[first + 1 :]))


def _saturating_size(model: ModelSpec, cost: CostModel | None, budget: int | None) -> int:
    if cost is None:
        raise ValueError("bucket='auto' needs a cost model; give the pipeline a hardware description")
    # Where nothing is sharded, buckets are those of the all-reduce over the replicas.
    group = model.mesh.group if model.mesh.world_size > 1 else model.mesh.replicate_group
    size = cost.saturating_bytes(group) if model.mesh.ranks > 1 else 0
    units = [_nbytes(run) for run in spec.unit_runs(model.parameters.values())]
    return max(1, min([size, max(units, default=0), *([budget // 2] if budget is not None else [])]))


def _capped_buckets(model: ModelSpec, cap: int) -> tuple[BucketSpec, ...]:
    """Make buckets of parameters in order of registration, each dtype by itself. A unit that exceeds the cap is
    divided, equal units alike; units that do not are put together."""
    units = [_fill([[p] for p in run], cap) for run in spec.unit_runs(model.parameters.values())]
    chosen: list[_Members] = []
    for (is_divided, _), alike in itertools.groupby(units, key=lambda parts: (len(parts) > 1, parts[0][0].kind)):
        parts = [part for unit in alike for part in unit]
        chosen += parts if is_divided else _fill(parts, cap)
    return spec.named_buckets((None, members) for members in chosen)


def _nbytes(parameters: Iterable[ParameterSpec]) -> int:
    return sum(p.gathered_nbytes for p in parameters)


def _fill(parts: Iterable[_Members], cap: int) -> list[_Members]:
    """Put consecutive parts together while they stay within ``cap`` bytes."""
    filled: list[_Members] = []
    room = 0
    for part in parts:
        nbytes = _nbytes(part)
        if filled and nbytes <= room:
            filled[-1] += part
            room -= nbytes
        else:
            filled.append(list(part))
            room = cap - nbytes
    return filled


def _in_messages(bucket: BucketSpec, cost: CostModel) -> BucketSpec:
    """Give a parameter a message of its own where that costs less than unpacking it from a common one. The others come
    last in the bucket and share one, unless unpacking all of them costs more than a message for each."""
    group = bucket.mesh.group
    alone: _Members = []
    shared: _Members = []
    for p in bucket.parameters:
        unpacking = cost.copy_seconds(p.gathered_nbytes)
        (alone if unpacking > cost.message_seconds(group) else shared).append(p)
    unpacking = cost.copy_seconds(_nbytes(shared))
    if shared and unpacking > (len(shared) - 1) * cost.message_seconds(group):
        alone, shared = [*alone, *shared], []
    if not alone or len(bucket.parameters) == 1:
        return bucket
    bucket = dataclasses.replace(bucket, parameters=(*alone, *shared))
    messages = [(bucket.offsets[p.name], p.shard_numel) for p in alone]
    if shared:
        begin, last = bucket.offsets[shared[0].name], shared[-1]
        messages.append((begin, bucket.offsets[last.name] + last.shard_numel - begin))
    return dataclasses.replace(bucket, messages=tuple(messages))
