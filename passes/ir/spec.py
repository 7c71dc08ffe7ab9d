"""Specifications are what passes know of a model: parameters, how they are sharded, how they lie in a bucket.

All of it follows from shapes, dtypes and the world size, so every rank computes the same.

A parameter of ``n`` rows over ``W`` ranks has chunks of ``ceil(n / W)`` rows (DTensor's ``Shard(0)``), padded in
storage so that all ranks hold equal shapes. A parameter that is sharded on another dimension lies in storage with that
dimension first. The chunks of a bucket's parameters lie one behind the other, each start aligned to ``ALIGNMENT``
bytes. A gathered bucket is parameter-major: the parameter at element ``o`` of the shard lies at element ``W * o``,
whole and contiguous.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby

import torch

from graph_fsdp.passes.ir.dialect import aligned


@dataclass(frozen=True)
class MeshSpec:
    """Names the groups of ranks that hold a parameter. ``group``, of ``world_size`` ranks, shards; ``replicate_group``,
    of ``replicas`` ranks, holds the same shards. A group of one rank communicates nothing. ``name``: "" for the model's
    mesh; of another the same on all ranks, as the groups' need not be."""

    name: str
    group: str
    world_size: int
    replicate_group: str = ""
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.world_size * self.replicas

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(name for name in (self.group, self.replicate_group) if name)


@dataclass(frozen=True)
class ParameterSpec:
    """Describes one parameter, with shapes and sizes in elements of ``dtype`` unless bytes are said."""

    name: str  # canonical fully qualified name
    unit: str  # name of its unit, "" for the root
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the shard
    param_dtype: torch.dtype  # of the gathered parameter
    reduce_dtype: torch.dtype  # of the gradient's reduction
    trainable: bool
    mesh: MeshSpec
    shard_dim: int = 0
    extended: bool = False  # travels as payloads, which a tensor extension computes of it (sources.py)
    sent_as: torch.dtype | None = None  # of 8 bits: its gradient is quantized on the way to the ranks that shard

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def replicated(self) -> bool:
        """Say whether it is a scalar, which has no dimension to shard: every rank holds it."""
        return not self.shape

    @property
    def empty(self) -> bool:
        return math.prod(self.shape) == 0

    @property
    def kind(self) -> Hashable:
        """Return what the parameters of one bucket have in common."""
        return self.dtype, self.param_dtype, self.reduce_dtype, self.extended, self.mesh, self.sent_as

    @property
    def rows(self) -> int:
        """Return the size of the dimension that is sharded."""
        return self.shape[self.shard_dim]

    @property
    def chunk_rows(self) -> int:
        return -(-self.rows // self.world_size)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape with the dimension that is sharded first, as it is stored, gathered and reduced."""
        others = self.shape[: self.shard_dim] + self.shape[self.shard_dim + 1 :]
        return () if self.replicated else (self.rows, *others)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Return the shape of a rank's padded shard, equal on all ranks."""
        return () if self.replicated else (self.chunk_rows, *self.stored_shape[1:])

    @property
    def used_shard_shape(self) -> tuple[int, ...]:
        """Return the ``shard_shape`` in the parameter's order of dimensions, in which a shard lies in memory."""
        return tuple(self.chunk_rows if dim == self.shard_dim else size for dim, size in enumerate(self.shape))

    @property
    def shard_numel(self) -> int:
        return math.prod(self.shard_shape)

    @property
    def gathered_nbytes(self) -> int:
        """Return the bytes that it takes of its gathered bucket, padding included."""
        return aligned(self.shard_numel, self.dtype) * self.world_size * self.param_dtype.itemsize

    def local_rows(self, rank: int) -> int:
        """Count the rows of the parameter that ``rank`` holds, without padding."""
        return max(0, min(self.chunk_rows, self.rows - rank * self.chunk_rows))

    def as_stored(self, value: torch.Tensor) -> torch.Tensor:
        """View a parameter, or a part of one, as it is stored."""
        return value.movedim(self.shard_dim, 0) if self.shard_dim else value

    def as_used(self, stored: torch.Tensor) -> torch.Tensor:
        """View what is stored as the model uses it: the reverse of ``as_stored``."""
        return stored.movedim(0, self.shard_dim) if self.shard_dim else stored


@dataclass(frozen=True)
class BucketSpec:
    """Describes parameters of one dtype that are gathered, freed and reduced together. ``unit`` is the unit's name, or
    those of the first and last one where a bucket holds several."""

    name: str
    unit: str
    parameters: tuple[ParameterSpec, ...]
    # (begin, numel) in the bucket's shard of each message that it is gathered in, in order; () for one of all. A
    # parameter that is a message by itself lands where it is used; what shares a message is unpacked after it.
    messages: tuple[tuple[int, int], ...] = ()

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Return the element at which the chunk of each parameter, by name, starts in the bucket's shard."""
        begins = accumulate((aligned(p.shard_numel, p.dtype) for p in self.parameters), initial=0)
        return {p.name: begin for p, begin in zip(self.parameters, begins, strict=False)}

    @cached_property
    def shard_numel(self) -> int:
        return sum(aligned(p.shard_numel, p.dtype) for p in self.parameters)

    @property
    def gathered_nbytes(self) -> int:
        return sum(p.gathered_nbytes for p in self.parameters)

    def message_arguments(self, scale: int = 1) -> list[int]:
        """Return ``messages`` of the bucket's ``all_gather_start``, in a shard that is ``scale`` times as large."""
        alone = self.parameters[0].shard_numel  # without the padding that follows it
        messages = self.messages or (((0, alone),) if len(self.parameters) == 1 else ())
        return [] if messages == ((0, self.shard_numel),) else [scale * value for pair in messages for value in pair]

    def reduced_in(self, parameters: Sequence[ParameterSpec]) -> list[int]:
        """Return ``messages`` of a reduction of these parameters' gradients, which share them as in a gather."""
        begins = [begin for begin, _ in self.messages]
        shared = Counter(bisect_right(begins, self.offsets[p.name]) for p in parameters)
        return list(shared.values()) if len(shared) > 1 else []

    @property
    def mesh(self) -> MeshSpec:
        return self.parameters[0].mesh

    @property
    def world_size(self) -> int:
        return self.mesh.world_size


HOST = torch.device("cpu")


@dataclass(frozen=True)
class Offload:
    """Says that shards and their gradients are kept on the CPU. ``device``: what they are gathered and reduced on.
    ``pin_memory``: the CPU's memory is page-locked, so that copies run beside compute."""

    device: torch.device
    pin_memory: bool


@dataclass(frozen=True)
class ModelSpec:
    """Describes the parameters of a model, its buckets in storage order, and the groups of ranks.

    The ranks of ``mesh`` share a batch, and gradients are divided by their number. Parameters are on it but for those
    that have another. ``reshard_group``, of ``reshard_size`` consecutive ranks of the group that shards, shards between
    forward and backward; 0 where there is none. ``own_reduce_group``: another group of the ranks that shard, so that
    gathers do not queue with reductions; "" without one. ``offload``: None where shards are kept on the device that
    they are gathered on. ``payloads``: what extended parameters travel as, and copies of their shards on the device, in
    ``buckets`` too.
    """

    parameters: dict[str, ParameterSpec]
    buckets: tuple[BucketSpec, ...]
    mesh: MeshSpec
    reshard_group: str = ""
    reshard_size: int = 0
    own_reduce_group: str = ""
    offload: Offload | None = None
    payloads: dict[str, ParameterSpec] = field(default_factory=dict)

    @cached_property
    def bucket_of(self) -> dict[str, BucketSpec]:
        """Return the bucket of each parameter and payload that is in one, by name."""
        return {p.name: bucket for bucket in self.buckets for p in bucket.parameters}

    def spec_of(self, name: str) -> ParameterSpec:
        """Return the parameter or the payload of this name."""
        return self.payloads[name] if name in self.payloads else self.parameters[name]

    @cached_property
    def own_meshes(self) -> tuple[MeshSpec, ...]:
        """Return the meshes that only some parameters have, in order of registration."""
        return tuple(dict.fromkeys(p.mesh for p in self.parameters.values() if p.mesh != self.mesh))

    def reduce_group(self, mesh: MeshSpec) -> str:
        """Return the group of the ranks that shard over a mesh, for their gradients."""
        return mesh.group if mesh != self.mesh else self.own_reduce_group or mesh.group

    def reduce_groups(self, p: ParameterSpec) -> tuple[str, ...]:
        """Return the groups over which a gradient is reduced, in order."""
        groups = ((self.reduce_group(p.mesh), p.world_size), (p.mesh.replicate_group, p.mesh.replicas))
        return tuple(name for name, size in groups if size > 1)


def make_model_spec(parameters: Iterable[ParameterSpec], mesh: MeshSpec) -> ModelSpec:
    """Describe a model with one bucket per unit, split where dtypes differ."""
    specs = {p.name: p for p in parameters}
    return ModelSpec(specs, unit_buckets(specs.values()), mesh)


def unit_buckets(parameters: Iterable[ParameterSpec]) -> tuple[BucketSpec, ...]:
    """Make a bucket of each run of parameters of one unit and dtype. A root's parameters before its units and those
    after them are two runs. Scalars and empty parameters need no gather: they are in none."""
    return named_buckets((None, run) for run in unit_runs(parameters))


def unit_runs(parameters: Iterable[ParameterSpec]) -> list[list[ParameterSpec]]:
    """Divide parameters into consecutive ones of a unit, each combination of dtypes by itself."""
    kinds: dict[Hashable, list[ParameterSpec]] = {}
    for p in parameters:
        if not p.replicated and not p.empty:
            kinds.setdefault(p.kind, []).append(p)
    return [list(run) for members in kinds.values() for _, run in groupby(members, key=lambda p: p.unit)]


def named_buckets(buckets: Iterable[tuple[str | None, Sequence[ParameterSpec]]]) -> tuple[BucketSpec, ...]:
    """Make buckets of (label, parameters), called as their units where there is no label; labels that come again are
    numbered: ``root``, ``root#1``."""
    seen: Counter[str] = Counter()
    found = []
    for label, members in buckets:
        units = list(dict.fromkeys(p.unit for p in members))
        unit = units[0] if len(units) == 1 else f"{units[0] or 'root'}..{units[-1] or 'root'}"
        label = label or unit or "root"
        found.append(BucketSpec(f"{label}#{seen[label]}" if seen[label] else label, unit, tuple(members)))
        seen[label] += 1
    return tuple(found)
