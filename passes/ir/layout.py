"""How the chunks of a bucket lie in what is gathered, and what of it must be unpacked."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Graph, nbytes


@dataclass(frozen=True)
class Message:
    """A part of a bucket's shard that is gathered by one collective: ``numel`` elements from ``begin`` on, which hold
    the chunks at ``offsets`` (from the shard's start) of ``numels`` elements."""

    begin: int
    numel: int
    offsets: tuple[int, ...]
    numels: tuple[int, ...]

    @property
    def lands_in_place(self) -> bool:
        """One chunk that fills the message, or none that is used: rank-major and parameter-major are the same."""
        return not self.offsets or (self.offsets == (self.begin,) and self.numels == (self.numel,))

    @functools.cached_property
    def splits(self) -> list[int]:
        """Sizes of the message's pieces: chunks and the gaps between them, in order."""
        sizes, end = [], self.begin
        for offset, numel in zip(self.offsets, self.numels, strict=True):
            sizes += [offset - end, numel]
            end = offset + numel
        return [size for size in [*sizes, self.begin + self.numel - end] if size]


@dataclass(frozen=True)
class GatherLayout:
    """Where the chunks lie: in elements, from the start of the bucket's slice of the shard storage."""

    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    length: int
    world_size: int
    messages: tuple[Message, ...]

    @classmethod
    def make(
        cls, offsets: Sequence[int], numels: Sequence[int], length: int, world_size: int, messages: Sequence[int] = ()
    ) -> GatherLayout:
        """``messages`` as in the dialect: begin and number of elements of each, one pair behind the other."""
        pairs = list(zip(messages[::2], messages[1::2], strict=True)) or [(0, length)]
        chunks = list(zip(offsets, numels, strict=True))
        made = []
        for begin, numel in pairs:
            inside = [(o, n) for o, n in chunks if begin <= o < begin + numel]
            made.append(Message(begin, numel, tuple(o for o, _ in inside), tuple(n for _, n in inside)))
        return cls(tuple(offsets), tuple(numels), length, world_size, tuple(made))

    @functools.cached_property
    def landing_numel(self) -> int:
        """Elements of the buffer for what is gathered first and unpacked then."""
        return self.world_size * sum(m.numel for m in self.messages if not m.lands_in_place)


def landing_nbytes(start: fx.Node) -> int:
    """Bytes that an ``all_gather_start`` receives outside of the bucket's buffer, to be unpacked from there."""
    if dialect.argument(start, "custom"):
        return nbytes(start.meta["val"])
    return layout_of(start).landing_numel * int(start.meta["val"].dtype.itemsize)


def scattered_nbytes(start: fx.Node) -> int:
    """Bytes of the copy that an ``all_gather_start`` makes of shards which do not lie as they are sent: those of a
    parameter that is sharded on another dimension than the first, and with it the rest of its bucket."""
    shards = [shard.meta["val"] for shard in dialect.argument(start, "shards")]
    if all(shard.is_contiguous() for shard in shards):
        return 0
    return int(layout_of(start).length * shards[0].dtype.itemsize)


def layout_of(start: fx.Node) -> GatherLayout:
    """The layout that an ``all_gather_start`` describes."""
    shards, offsets, length, world_size = (
        dialect.argument(start, name) for name in ("shards", "offsets", "length", "world_size")
    )
    # A kept shard is one tensor that holds all chunks; their sizes are then an argument.
    numels = dialect.argument(start, "numels") or [shard.meta["val"].numel() for shard in shards]
    return GatherLayout.make(offsets, numels, length, world_size, dialect.argument(start, "messages"))


def messages_of(start: fx.Node) -> list[list[fx.Node]]:
    """The gradients of a ``reduce_scatter_start``, message by message."""
    grads = iter(dialect.argument(start, "grads"))
    counts = dialect.argument(start, "messages") or [len(dialect.argument(start, "grads"))]
    return [list(itertools.islice(grads, count)) for count in counts]


def reduced_begins(start: fx.Node) -> list[int]:
    """Element at which the result of each message of a ``reduce_scatter_start`` begins."""
    values = [grad.meta["val"] for grad in dialect.argument(start, "grads")]
    arguments = (dialect.argument(start, name) for name in ("dtype", "world_size", "messages"))
    offsets = dialect.reduced_offsets(values, *arguments)
    firsts = itertools.accumulate((len(message) for message in messages_of(start)[:-1]), initial=0)
    return [offsets[first] for first in firsts]


def gradients_sent(start: fx.Node) -> list[fx.Node]:
    """The gradients that a ``reduce_scatter_start`` sends from where they lie."""
    dtype, world_size = dialect.argument(start, "dtype"), dialect.argument(start, "world_size")
    if dialect.argument(start, "custom"):
        return []
    alone = [message[0] for message in messages_of(start) if len(message) == 1]
    return [grad for grad in alone if dialect.is_sent_as_it_is(grad.meta["val"], dtype, world_size)]


def packed_nbytes(start: fx.Node) -> int:
    """Bytes of the copies that a ``reduce_scatter_start`` sends: packed, padded or cast."""
    dtype, world_size = dialect.argument(start, "dtype"), dialect.argument(start, "world_size")
    sent = set(gradients_sent(start))
    copied = [grad.meta["val"] for grad in dialect.argument(start, "grads") if grad not in sent]
    elements = sum(dialect.chunk_numels(copied, world_size))
    return int(world_size * elements * dtype.itemsize)


def copies(graph: Graph) -> tuple[int, int]:
    """Bytes that packing and unpacking for collectives reads and writes in one run of the graph. Packing: casts of
    shards, packed gradients, shards that are kept. Unpacking: landing buffers. What the process group copies itself is
    not among them."""
    found = [copies_by(node) for node in graph.fx_graph.nodes]
    return sum(packed for packed, _ in found), sum(unpacked for _, unpacked in found)


def copies_by(node: fx.Node) -> tuple[int, int]:
    """The same, of one node."""
    if node.target is dialect.all_gather_start:
        shard, full = dialect.argument(node, "shards")[0].meta["val"], node.meta["val"]
        numel = full.numel() // dialect.argument(node, "world_size") if shard.dtype is not full.dtype else 0
        return numel * (shard.dtype.itemsize + full.dtype.itemsize), 2 * landing_nbytes(node)
    if node.target is dialect.keep_shard:
        return 2 * nbytes(node.meta["val"]), 0
    if node.target is dialect.reduce_scatter_start:
        sent = set(gradients_sent(node))
        read = sum(nbytes(grad.meta["val"]) for grad in dialect.argument(node, "grads") if grad not in sent)
        return read + packed_nbytes(node), 0
    if node.target is dialect.all_reduce_start:
        return nbytes(node.meta["val"]) + sum(nbytes(g.meta["val"]) for g in dialect.argument(node, "grads")), 0
    return 0, 0
