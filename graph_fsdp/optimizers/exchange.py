"""An exchange brings sharded matrices whole to the ranks that own them, and shards of what these return back.

[Note: two dimensions]
The ranks of a matrix are a table. A *line* of it are the ranks of the mesh dimension that shards the matrix; an owner
is a place in one of the lines. Lines are replicas of each other, or divide the matrix too (tensor parallelism).
Replicas have what their owners need, and get shards of the results by broadcasts from the line that owns them. Where
lines divide, all that a line owns comes to it by an all-to-all across lines, before the one within the line, and goes
back by another: each element is sent twice, and a rank holds a line's share of what the line owns.
"""

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
from torch.distributed.tensor import DTensor, Placement, Shard

from graph_fsdp import compat
from graph_fsdp.mesh import as_bytes
from graph_fsdp.runtime.comm.streams import UnderWay

# A function of whole tensors, and the DTensors that it is to be given whole, of one dtype and placed as the parameter.
# It returns tensors of the same shapes and dtype, in a list, of which the rule is given its shards as such DTensors.
Work = tuple[Callable[..., Sequence[Tensor]], Sequence[Tensor]]


def is_sharding(placement: Placement) -> bool:
    """Say whether each rank has a part: one that a dimension of the tensor is cut into."""
    return isinstance(placement, (Shard, compat.StridedShard))


@dataclass(frozen=True)
class MatrixRanks:
    """The ranks that a matrix is exchanged among ([Note: two dimensions]): the dimension of ``mesh`` that shards it,
    and the one across lines, which shards it too where it ``divides``; None where there is none of several ranks."""

    mesh: DeviceMesh
    sharding: int | None
    across: int | None
    divides: bool = False

    def place(self, dim: int | None) -> tuple[int, int]:
        """Return the number of ranks of a dimension, and this rank's place among them."""
        return (1, 0) if dim is None else (self.mesh.size(dim), self.mesh.get_local_rank(dim))

    @property
    def everyone(self) -> tuple[int, ...]:
        """Return the global ranks of the mesh."""
        return tuple(self.mesh.mesh.flatten().tolist())


@dataclass(frozen=True)
class _Cut:
    """Ranks divide dimension ``dim`` of a tensor in ``count`` parts, by the rules of ``Shard``: by a rank's place in
    its line, or by its line."""

    dim: int
    count: int
    by_line: bool


@dataclass(eq=False)
class _Part:
    """One tensor of the exchange. ``cuts``: the outer one first. Ranks are a line and a place in it."""

    owner: tuple[int, int]
    tensor: DTensor
    cuts: tuple[_Cut, ...]

    def box(self, line: int, place: int) -> list[tuple[int, int]]:
        """Return where the shard of a rank begins in each dimension, and its size there."""
        found = [(0, size) for size in self.tensor.shape]
        for cut in self.cuts:
            begin, size = found[cut.dim]
            chunk = -(-size // cut.count)
            offset = min((line if cut.by_line else place) * chunk, size)
            found[cut.dim] = begin + offset, min(chunk, size - offset)
        return found

    def shape(self, line: int, place: int) -> list[int]:
        return [size for _, size in self.box(line, place)]

    def numel(self, line: int, place: int) -> int:
        return math.prod(self.shape(line, place))

    def shard_of(self, whole: Tensor, line: int, place: int) -> Tensor:
        for dim, bounds in enumerate(self.box(line, place)):
            whole = whole.narrow(dim, *bounds)
        return whole

    def joined(self, shards: dict[tuple[int, int], Tensor]) -> Tensor:
        """Return the whole tensor, a copy, of flat shards by line and place."""

        def join(cuts: Sequence[_Cut], line: int, place: int) -> Tensor:
            if not cuts:
                return shards[line, place].view(self.shape(line, place))
            cut, *inner = cuts
            ranks = [(i, place) if cut.by_line else (line, i) for i in range(cut.count)]
            return torch.cat([join(inner, *rank) for rank in ranks], cut.dim)

        return join(self.cuts, 0, 0)


class Exchange:
    """Exchanges the tensors of ``works``, each of which a rank owns, in the order of these. Its methods are called in
    their order; each waits for what the one before has started."""

    def __init__(self, ranks: MatrixRanks, works: Sequence[tuple[tuple[int, int], Work]]) -> None:
        self._ranks = ranks
        self._functions = [(owner, function, len(values)) for owner, (function, values) in works]
        self._lines, self._line = ranks.place(ranks.across)
        self._size, self._place = ranks.place(ranks.sharding)
        self._parts = [self._part(owner, value) for owner, (_, values) in works for value in values]
        dtypes = {part.tensor.dtype for part in self._parts}
        first = self._parts[0].tensor
        self._dtype, self._device = first.dtype, first.device
        if len(dtypes) > 1:
            raise ValueError(f"a rule yields tensors of one dtype for all parameters of one, and yielded {dtypes}")
        self._of_line = [part for part in self._parts if part.owner[0] == self._line]
        self._mine = [part for part in self._of_line if part.owner[1] == self._place]
        # Lines whose shards a line exchanges: those of replicas are its own.
        self._sources = range(self._lines) if ranks.divides else range(1)
        # Elements that go from here to each owner of the line, and that come from each rank of the line to here.
        self._to = [0] * self._size
        for part in self._of_line:
            self._to[part.owner[1]] += sum(part.numel(line, self._place) for line in self._sources)
        self._from = [sum(self._numels(self._mine, place)) for place in range(self._size)]
        # Elements that go from here to each line, and that come from there.
        self._to_lines = [0] * self._lines
        for part in self._parts:
            self._to_lines[part.owner[0]] += part.numel(self._line, self._place)
        self._from_lines = [sum(p.numel(line, self._place) for p in self._of_line) for line in range(self._lines)]
        self._under_way: list[UnderWay] = []

    def _part(self, owner: tuple[int, int], value: Tensor) -> _Part:
        ranks = self._ranks
        wanted = [d for d in (ranks.sharding, ranks.across if ranks.divides else None) if d is not None]
        placements = value.placements if isinstance(value, DTensor) else None
        if wanted and (placements is None or not all(is_sharding(placements[d]) for d in wanted)):
            raise ValueError(f"a rule yields DTensors placed as the parameter, and yielded one placed {placements}")
        assert isinstance(value, DTensor)
        cuts = [_Cut(value.placements[d].dim, ranks.mesh.size(d), d != ranks.sharding) for d in wanted]  # type: ignore[attr-defined]
        if any(isinstance(value.placements[d], compat.StridedShard) for d in wanted):
            cuts.reverse()  # FSDP divides what tensor parallelism has left
        return _Part(owner, value, tuple(cuts or [_Cut(0, 1, False)]))

    def _numels(self, parts: Sequence[_Part], place: int) -> list[int]:
        """Return how many elements a rank of the line exchanges of each part, and of each line's shard of it."""
        return [part.numel(line, place) for part in parts for line in self._sources]

    @property
    def described(self) -> tuple[str, ...]:
        """Return for each tensor what every rank says of it."""
        return tuple(f"{list(part.tensor.shape)} {part.tensor.dtype} to {part.owner}" for part in self._parts)

    def start_across(self) -> None:
        """Start to send this rank's shards to the lines that own them, where lines divide."""
        sent = self._given(self._parts)
        self._received = sent.new_empty(sum(self._from_lines))
        self._exchange(self._ranks.across, self._received, sent, self._from_lines, self._to_lines)

    def start_to_owners(self) -> None:
        """Start to send to their owners what of the line's parts this rank has."""
        if self._ranks.divides:
            self._wait()
            numels = [[p.numel(line, self._place) for p in self._of_line] for line in self._sources]
            came = [s.split(n) for s, n in zip(self._received.split(self._from_lines), numels, strict=True)]
            sent = self._flat([of_line[i] for i in range(len(self._of_line)) for of_line in came])
        else:
            sent = self._given(self._of_line)
        self._received = sent if self._size == 1 else sent.new_empty(sum(self._from))
        self._exchange(self._ranks.sharding, self._received, sent, self._from, self._to)

    def compute(self) -> list[Tensor]:
        """Call the functions of what this rank owns; return all that they return."""
        self._wait()
        came = [
            iter(values.split(self._numels(self._mine, place)))
            for place, values in enumerate(self._received.split(self._from))
        ]
        del self._received
        wholes = (
            part.joined({(line, place): next(of) for place, of in enumerate(came) for line in self._sources})
            for part in self._mine
        )
        found: list[Tensor] = []
        for owner, function, count in self._functions:
            if owner == (self._line, self._place):
                given = [next(wholes) for _ in range(count)]
                expected = [(t.shape, t.dtype) for t in given]
                results = function(*given)
                if (got := [(t.shape, t.dtype) for t in results]) != expected:
                    raise ValueError(f"a rule's function returns tensors like those it is given, {expected}, not {got}")
                found += results
        return found

    def start_back(self, results: Sequence[Tensor]) -> None:
        """Start to send shards of the results to the ranks of the line."""
        pieces = [
            part.shard_of(result, line, place)
            for place in range(self._size)
            for part, result in zip(self._mine, results, strict=True)
            for line in self._sources
        ]
        sent = self._flat(pieces)
        self._shards = sent.new_empty(sum(part.numel(self._line, self._place) for part in self._parts))
        self._by_owner = self._shards.split(self._to_lines)  # the shards that each line gives
        self._own = sent.new_empty(sum(self._to)) if self._ranks.divides else self._by_owner[self._line]
        if self._size == 1:
            self._own.copy_(sent)
        self._exchange(self._ranks.sharding, self._own, sent, self._to, self._from)

    def start_to_lines(self) -> None:
        """Start to give the ranks of other lines their shards of what this line owns."""
        self._wait()
        if self._ranks.divides:
            came = self._own.split(self._numels(self._of_line, self._place))
            sent = self._flat([piece for line in self._sources for piece in came[line :: self._lines]])
            self._exchange(self._ranks.across, self._shards, sent, self._to_lines, self._from_lines)
            return
        for line, values in enumerate(self._by_owner if self._lines > 1 else ()):
            if values.numel():
                group = self._ranks.mesh.get_group(self._ranks.across)
                broadcast = partial(dist.broadcast, as_bytes(values), group=group, group_src=line)
                self._start(group, [values], broadcast)

    def shards(self) -> Iterator[list[DTensor]]:
        """Return the results' shards, for each of the works."""
        self._wait()
        here = self._line, self._place
        values = zip(self._parts, self._shards.split([p.numel(*here) for p in self._parts]), strict=True)
        made = (compat.make_dtensor(v.view(part.shape(*here)), part.tensor) for part, v in values)
        return iter([[next(made) for _ in range(count)] for _, _, count in self._functions])

    def _given(self, parts: Sequence[_Part]) -> Tensor:
        """Return a copy of this rank's shards of parts, and forget what all were given."""
        sent = self._flat([compat.local_part(part.tensor) for part in parts])
        for part in self._parts:
            part.tensor = compat.make_dtensor(compat.local_part(part.tensor).to("meta"), part.tensor)
        return sent

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return compat.flattened(tensors) if tensors else torch.empty(0, dtype=self._dtype, device=self._device)

    def _exchange(
        self, dim: int | None, received: Tensor, sent: Tensor, numels_in: Sequence[int], numels_out: Sequence[int]
    ) -> None:
        """Start an all-to-all among the ranks of a dimension of the mesh."""
        if dim is None:
            return
        group, itemsize = self._ranks.mesh.get_group(dim), sent.dtype.itemsize
        into, out_of = ([numel * itemsize for numel in numels] for numels in (numels_in, numels_out))
        exchange = partial(dist.all_to_all_single, as_bytes(received), as_bytes(sent), into, out_of, group=group)
        self._start(group, [received, sent], exchange)

    def _start(self, group: dist.ProcessGroup, tensors: Sequence[Tensor], collective: Callable[..., Any]) -> None:
        def start(async_op: bool) -> list[Any]:
            return [collective(async_op=async_op)]

        self._under_way.append(UnderWay("reduce", group, tensors, start))

    def _wait(self) -> None:
        while self._under_way:
            self._under_way.pop(0).wait()
