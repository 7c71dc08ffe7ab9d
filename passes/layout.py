"""How the chunks of a bucket lie in what is gathered, and what of it must be unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes import dialect


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

    @property
    def landing_numel(self) -> int:
        """Elements of the buffer for what is gathered first and unpacked then."""
        return self.world_size * sum(m.numel for m in self.messages if not m.lands_in_place)


def landing_nbytes(start: fx.Node) -> int:
    """Bytes that an ``all_gather_start`` receives outside of the bucket's buffer, to be unpacked from there."""
    return layout_of(start).landing_numel * int(start.meta["val"].dtype.itemsize)


def layout_of(start: fx.Node) -> GatherLayout:
    """The layout that an ``all_gather_start`` describes."""
    shards, offsets, length, world_size = (
        dialect.argument(start, name) for name in ("shards", "offsets", "length", "world_size")
    )
    # A kept shard is one tensor that holds all chunks; their sizes are then an argument.
    numels = dialect.argument(start, "numels") or [shard.meta["val"].numel() for shard in shards]
    return GatherLayout.make(offsets, numels, length, world_size, dialect.argument(start, "messages"))
