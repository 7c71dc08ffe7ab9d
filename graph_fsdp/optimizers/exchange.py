"""An exchange brings sharded matrices whole to the ranks that own them, and shards of what these return back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from graph_fsdp import compat
from graph_fsdp.runtime.comm.streams import UnderWay

# A function of whole tensors, and the DTensors that it is to be given whole, of one dtype and placed as the parameter.
# It returns tensors of the same shapes and dtype, in a list, of which the rule is given its shards as such DTensors.
Work = tuple[Callable[..., Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Ranks:
    """The ranks that a matrix is exchanged among: the dimension of ``mesh`` that shards it, and the first one that
    replicates it; None where there is none of several ranks."""

    mesh: DeviceMesh
    sharding: int | None
    replicating: int | None

    def place(self, dim: int | None) -> tuple[int, int]:
        """Return the number of ranks of a dimension, and this rank's place among them."""
        return (1, 0) if dim is None else (self.mesh.size(dim), self.mesh.get_local_rank(dim))

    def group(self, dim: int | None) -> dist.ProcessGroup:
        return self.mesh.get_group(dim)


@dataclass(eq=False)
class _Part:
    """One tensor of the exchange. ``dim``: of the tensor, is sharded over ``size`` ranks, by the rules of ``Shard``."""

    owner: tuple[int, int]  # place of the replica, and of the rank among those that shard
    tensor: DTensor
    dim: int
    size: int

    def rows(self, rank: int) -> tuple[int, int]:
        """Return where the shard of a rank begins, and how many rows it has."""
        total = self.tensor.shape[self.dim]
        chunk = -(-total // self.size)
        begin = min(rank * chunk, total)
        return begin, min(chunk, total - begin)

    def shape(self, rank: int) -> list[int]:
        sizes = list(self.tensor.shape)
        sizes[self.dim] = self.rows(rank)[1]
        return sizes

    def numel(self, rank: int) -> int:
        return math.prod(self.shape(rank))


class Exchange:
    """Exchanges the tensors of ``works``, each of which a rank owns, in the order of these. Its methods are called in
    their order; each waits for what the one before has started."""

    def __init__(self, ranks: Ranks, works: Sequence[tuple[tuple[int, int], Work]]) -> None:
        self._ranks = ranks
        self._functions = [(owner, function, len(values)) for owner, (function, values) in works]
        self._replicas, self._replica = ranks.place(ranks.replicating)
        self._size, self._rank = ranks.place(ranks.sharding)
        self._parts = [self._part(owner, value) for owner, (_, values) in works for value in values]
        dtypes = {part.tensor.dtype for part in self._parts}
        first = self._parts[0].tensor
        self._dtype, self._device = first.dtype, first.device
        if len(dtypes) > 1:
            raise ValueError(f"a rule yields tensors of one dtype for all parameters of one, and yielded {dtypes}")
        self._line = [part for part in self._parts if part.owner[0] == self._replica]  # exchanged by these ranks
        self._mine = [part for part in self._line if part.owner[1] == self._rank]
        # Elements that go from here to each owner, and that come from each rank to here.
        self._to = [0] * self._size
        for part in self._line:
            self._to[part.owner[1]] += part.numel(self._rank)
        self._from = [sum(p.numel(rank) for p in self._mine) for rank in range(self._size)]
        self._under_way: list[UnderWay] = []

    def _part(self, owner: tuple[int, int], value: Tensor) -> _Part:
        dim, ranks = 0, self._ranks
        if ranks.sharding is not None:
            placement = value.placements[ranks.sharding] if isinstance(value, DTensor) else None
            if type(placement) is not Shard:
                raise ValueError(f"a rule yields DTensors placed as the parameter, and yielded one placed {placement}")
            dim = placement.dim
        assert isinstance(value, DTensor)
        return _Part(owner, value, dim, self._size)

    @property
    def described(self) -> tuple[str, ...]:
        """Return for each tensor what every rank says of it."""
        return tuple(f"{list(part.tensor.shape)} {part.tensor.dtype} to {part.owner}" for part in self._parts)

    def start_to_owners(self) -> None:
        """Start to send this rank's shards to their owners."""
        sent = self._flat([compat.local_part(part.tensor) for part in self._line])
        for part in self._parts:  # what is sent is a copy
            part.tensor = compat.make_dtensor(compat.local_part(part.tensor).to("meta"), part.tensor)
        self._received = sent if self._size == 1 else sent.new_empty(sum(self._from))
        self._exchange(self._received, sent, self._from, self._to)

    def compute(self) -> list[Tensor]:
        """Call the functions of what this rank owns; return all that they return."""
        self._wait()
        sources = [
            values.split([part.numel(rank) for part in self._mine])
            for rank, values in enumerate(self._received.split(self._from))
        ]
        del self._received
        wholes = (
            torch.cat([values.view(part.shape(rank)) for rank, values in enumerate(pieces)], part.dim)
            for part, *pieces in zip(self._mine, *sources, strict=True)
        )
        found: list[Tensor] = []
        for owner, function, count in self._functions:
            if owner == (self._replica, self._rank):
                given = [next(wholes) for _ in range(count)]
                expected = [(t.shape, t.dtype) for t in given]
                results = function(*given)
                if (got := [(t.shape, t.dtype) for t in results]) != expected:
                    raise ValueError(f"a rule's function returns tensors like those it is given, {expected}, not {got}")
                found += results
        return found

    def start_back(self, results: Sequence[Tensor]) -> None:
        """Start to send shards of the results to the ranks."""
        pieces = [
            result.narrow(part.dim, *part.rows(rank))
            for rank in range(self._size)
            for part, result in zip(self._mine, results, strict=True)
        ]
        sent = self._flat(pieces)
        numels = [sum(p.numel(self._rank) for p in self._parts if p.owner[0] == r) for r in range(self._replicas)]
        self._shards = sent.new_empty(sum(numels))
        self._lines = self._shards.split(numels)  # by replicas
        own = self._lines[self._replica]
        if self._size == 1:
            own.copy_(sent)
        self._exchange(own, sent, self._to, self._from)

    def start_to_replicas(self) -> None:
        """Start to give replicas the shards of what they do not own."""
        self._wait()
        if self._replicas == 1:
            return
        group = self._ranks.group(self._ranks.replicating)
        for place, line in enumerate(self._lines):
            if line.numel():
                broadcast = partial(dist.broadcast, _bytes(line), group=group, group_src=place)
                self._start(group, [line], broadcast)

    def shards(self) -> Iterator[list[DTensor]]:
        """Return the results' shards, for each of the works."""
        self._wait()
        values = zip(self._parts, self._shards.split([p.numel(self._rank) for p in self._parts]), strict=True)
        made = (compat.make_dtensor(v.view(part.shape(self._rank)), part.tensor) for part, v in values)
        return iter([[next(made) for _ in range(count)] for _, _, count in self._functions])

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return compat.flattened(tensors) if tensors else torch.empty(0, dtype=self._dtype, device=self._device)

    def _exchange(self, received: Tensor, sent: Tensor, numels_in: Sequence[int], numels_out: Sequence[int]) -> None:
        if self._size == 1:
            return
        group, itemsize = self._ranks.group(self._ranks.sharding), sent.dtype.itemsize
        into, out_of = ([numel * itemsize for numel in numels] for numels in (numels_in, numels_out))
        exchange = partial(dist.all_to_all_single, _bytes(received), _bytes(sent), into, out_of, group=group)
        self._start(group, [received, sent], exchange)

    def _start(self, group: dist.ProcessGroup, tensors: Sequence[Tensor], collective: Callable[..., Any]) -> None:
        def start(async_op: bool) -> list[Any]:
            return [collective(async_op=async_op)]

        self._under_way.append(UnderWay("reduce", group, tensors, start))

    def _wait(self) -> None:
        while self._under_way:
            self._under_way.pop(0).wait()


def _bytes(value: Tensor) -> Tensor:
    """View flat memory as bytes, which a process group sends whatever the dtype."""
    return value.view(torch.uint8)
