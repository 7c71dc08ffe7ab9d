"""Layouts say how the chunks of a bucket lie in what is gathered, and what of it must be unpacked."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.operands import argument, arguments

# Types that gradients can be quantized to, in blocks of BLOCK elements that have a float32 scale each.
QUANTIZED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK = 256


def quantized_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def blocks_nbytes(numel: int) -> int:
    """Count the bytes of ``numel`` elements in whole blocks of float32, in which they are quantized and summed."""
    return quantized_blocks(numel) * BLOCK * torch.float32.itemsize


def quantized_nbytes(numel: int) -> int:
    """Count the bytes of ``numel`` quantized elements: the values, and behind them, aligned, the scales of blocks."""
    size = torch.float32.itemsize
    return size * (-(-numel // size) + quantized_blocks(numel))


@dataclass(frozen=True)
class Message:
    """A message is the part of a bucket's shard that one collective gathers: ``numel`` elements from ``begin`` on, with
    the chunks at ``offsets`` (from the shard's start) of ``numels`` elements."""

    begin: int
    numel: int
    offsets: tuple[int, ...]
    numels: tuple[int, ...]

    @property
    def lands_in_place(self) -> bool:
        """Say whether one chunk fills the message, or none is used: it is then parameter-major as it arrives."""
        return not self.offsets or (self.offsets == (self.begin,) and self.numels == (self.numel,))

    @functools.cached_property
    def splits(self) -> list[int]:
        """Return the sizes of the message's pieces, which are chunks and the gaps between them, in order."""
        sizes, end = [], self.begin
        for offset, numel in zip(self.offsets, self.numels, strict=True):
            sizes += [offset - end, numel]
            end = offset + numel
        return [size for size in [*sizes, self.begin + self.numel - end] if size]

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int, int]]:
        """Return the runs of chunks of one size at equal distances: where the first begins, in the bucket, that size,
        how many there are, and their distance."""
        found: list[tuple[int, int, int, int]] = []
        for offset, numel in zip(self.offsets, self.numels, strict=True):
            begin, size, count, distance = found[-1] if found else (0, -1, 0, 0)
            since = offset - begin - (count - 1) * distance
            if size == numel and (count == 1 or distance == since):
                found[-1] = begin, size, count + 1, since
            else:
                found.append((offset, numel, 1, 0))
        return found


@dataclass(frozen=True)
class GatherLayout:
    """Says where the chunks lie, in elements from the start of the bucket's slice of the shard storage."""

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    length: int
    world_size: int
    messages: tuple[Message, ...]

    @classmethod
    def make(
        cls, offsets: Sequence[int], numels: Sequence[int], length: int, world_size: int, messages: Sequence[int] = ()
    ) -> GatherLayout:
        """Make a layout; ``messages`` has begin and number of elements of each, one pair behind the other."""
        pairs = list(zip(messages[::2], messages[1::2], strict=True)) or [(0, length)]
        chunks = list(zip(offsets, numels, strict=True))
        made = []
        for begin, numel in pairs:
            inside = [(o, n) for o, n in chunks if begin <= o < begin + numel]
            made.append(Message(begin, numel, tuple(o for o, _ in inside), tuple(n for _, n in inside)))
        return cls(tuple(offsets), tuple(numels), length, world_size, tuple(made))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> GatherLayout:
        """Return the layout that the arguments of an ``all_gather_start``, or of a ``fetch_start``, describe."""
        # A kept shard is one tensor that holds all chunks; their sizes are then an argument.
        numels = given.get("numels") or [shard.numel() for shard in given["shards"]]
        others = given["length"], given.get("world_size", 1), given.get("messages", ())
        return cls.make(given["offsets"], numels, *others)

    @functools.cached_property
    def landing_numel(self) -> int:
        """Return the elements of the buffer for what is gathered first and unpacked then."""
        return self.world_size * sum(m.numel for m in self.messages if not m.lands_in_place)


def landing_nbytes(start: fx.Node) -> int:
    """Count the bytes that an ``all_gather_start`` receives outside of the bucket's buffer, to be unpacked then."""
    if argument(start, "custom"):
        return nbytes(start.meta["val"])
    return layout_of(start).landing_numel * int(start.meta["val"].dtype.itemsize)


def scattered_nbytes(start: fx.Node) -> int:
    """Count the bytes of the copy that an ``all_gather_start`` makes of a bucket with shards that do not lie as they
    are sent: those of a parameter that is sharded on another dimension than the first."""
    shards = [shard.meta["val"] for shard in argument(start, "shards")]
    if all(shard.is_contiguous() for shard in shards):
        return 0
    return int(layout_of(start).length * shards[0].dtype.itemsize)


def layout_of(start: fx.Node) -> GatherLayout:
    """Return the layout that an ``all_gather_start`` describes."""
    given = vars(arguments(start))
    return GatherLayout.of(given | {"shards": [shard.meta["val"] for shard in given["shards"]]})


def messages_of(start: fx.Node) -> list[tuple[list[fx.Node], int]]:
    """Return the gradients of a ``reduce_scatter_start``, by message, and the element at which its result begins."""
    given, offsets = arguments(start), begins_of(start)
    ends = itertools.accumulate(given.messages or [len(offsets)], initial=0)
    return [(list(given.grads[first:end]), offsets[first]) for first, end in itertools.pairwise(ends)]


def cut_of(node: fx.Node) -> tuple[int, int] | None:
    """Return begin and end of a slice of a flat tensor; None for any other node."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return None
    cut = arguments(node)
    is_flat = (cut.dim, cut.step) == (0, 1) and isinstance(cut.start, int) and isinstance(cut.end, int)
    return (cut.start, cut.end) if is_flat else None


def begins_of(start: fx.Node) -> list[int]:
    """Return the element at which each gradient's shard begins in what a reduction yields."""
    given = arguments(start)
    values = [grad.meta["val"] for grad in given.grads]
    if start.target is dialect.reduce_scatter_start:
        return dialect.reduced_offsets(values, given.dtype, given.world_size, given.messages)[:-1]
    return list(itertools.accumulate((int(value.numel()) for value in values[:-1]), initial=0))


def gradients_sent(start: fx.Node) -> list[fx.Node]:
    """Return the gradients that a ``reduce_scatter_start`` sends from where they lie."""
    given = arguments(start)
    if given.custom or given.sent_as:
        return []
    alone = [message[0] for message, _ in messages_of(start) if len(message) == 1]
    return [grad for grad in alone if dialect.is_sent_as_it_is(grad.meta["val"], given.dtype, given.world_size)]


def _gradients_copied(start: fx.Node) -> list[Tensor]:
    """Return the values of those that are packed, padded or cast to be sent."""
    sent = set(gradients_sent(start))
    return [grad.meta["val"] for grad in argument(start, "grads") if grad not in sent]


def packed_nbytes(start: fx.Node) -> int:
    """Count the bytes of the copies that a ``reduce_scatter_start`` sends: packed, padded, cast or quantized."""
    given = arguments(start)
    if given.sent_as:
        return int(given.world_size * quantized_nbytes(start.meta["val"].numel()))
    elements = sum(dialect.chunk_numels(_gradients_copied(start), given.world_size))
    return int(given.world_size * elements * given.dtype.itemsize)


def quantized_sends(graph: Graph) -> tuple[int, int]:
    """Count the bytes of the gradients that a run of the graph sends quantized, scales among them, and how many these
    gradients have in the type that sums have."""
    starts = [node for node in graph.fx_graph.nodes if node.target is dialect.reduce_scatter_start]
    quantized = [start for start in starts if argument(start, "sent_as")]
    plain = (nbytes(start.meta["val"]) * int(argument(start, "world_size")) for start in quantized)
    return sum(map(packed_nbytes, quantized)), sum(plain)


def copies(graph: Graph) -> tuple[int, int]:
    """Count the bytes that packing (casts of shards, packed gradients, kept shards) and unpacking (landing buffers)
    read and write in one run of the graph. What the process group copies itself is not among them."""
    found = [copies_by(node) for node in graph.fx_graph.nodes]
    return sum(packed for packed, _ in found), sum(unpacked for _, unpacked in found)


def _quantized_copies(start: fx.Node) -> tuple[int, int] | None:
    """Count what quantizing and adding up what was received read and write (``runtime/comm/quantized.py``)."""
    given, value = arguments(start), start.meta["val"]
    if not given.sent_as:
        return None
    rows = given.world_size * blocks_nbytes(value.numel())
    passes = 5 if given.sent_as.is_floating_point else 7  # packed, largest found, scaled, (rounded,) read to be sent
    sent = nbytes(_gradients_copied(start)) + passes * rows + packed_nbytes(start)
    return sent, packed_nbytes(start) + 4 * rows + 2 * given.world_size * nbytes(value)


def copies_by(node: fx.Node) -> tuple[int, int]:
    """Count the bytes that packing and unpacking for one node reads and writes."""
    if node.target is dialect.all_gather_start:
        shard, full = argument(node, "shards")[0].meta["val"], node.meta["val"]
        numel = full.numel() // argument(node, "world_size") if shard.dtype is not full.dtype else 0
        return numel * (shard.dtype.itemsize + full.dtype.itemsize), 2 * landing_nbytes(node)
    if node.target is dialect.keep_shard:
        return 2 * nbytes(node.meta["val"]), 0
    if node.target is dialect.reduce_scatter_start:
        return _quantized_copies(node) or (nbytes(_gradients_copied(node)) + packed_nbytes(node), 0)
    if node.target is dialect.all_reduce_start:
        return nbytes(node.meta["val"]) + sum(nbytes(g.meta["val"]) for g in argument(node, "grads")), 0
    return 0, 0
