"""torch's caching allocator, without a device: what it reserves for a sequence of allocations and frees.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``, which XPU's allocator follows:

- sizes are rounded up to 512 bytes; those of 1 MiB and less lie in a pool of their own;
- every stream has its own pools: what one stream has freed no other one gets;
- a request takes the smallest free block of its pool that is large enough; what it does not need of it stays a free
  block, if that is more than 1 MiB (of a small pool: 512 bytes). Freed blocks merge with free neighbours;
- where no block is large enough a segment is reserved: of 2 MiB for small requests, of 20 MiB for those below 10 MiB,
  of the request in steps of 2 MiB else;
- with ``expandable_segments`` each pool is one range that grows at its end, in pages of 20 MiB (small: 2 MiB); a free
  block at the end grows with it, and counts as the largest of all.

What is reserved is not given back: a device that runs full, where torch gives back what is free and tries again, is not
simulated, nor are private pools (CUDA graphs), ``max_split_size_mb`` and ``garbage_collection_threshold``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

_MIB = 2**20
_SMALLEST, _SMALL = 512, _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT_FROM, _STEP = 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB


@dataclass(eq=False)
class Block:
    """A piece of a segment, in use or free."""

    pool: _Pool
    address: int
    nbytes: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass(eq=False)
class _Pool:
    """Of one stream, small or large. ``blocks``: the free ones as (bytes, address, block), sorted; ``end``: the last
    block of the range, where segments are expandable."""

    small: bool
    blocks: list[tuple[int, int, Block]] = field(default_factory=list)
    end: Block | None = None
    next_address: int = 0

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.blocks, (block.nbytes, block.address, block))

    def remove(self, block: Block) -> None:
        del self.blocks[bisect_left(self.blocks, (block.nbytes, block.address))]
        block.free = False

    def best_fit(self, nbytes: int) -> Block | None:
        for _, _, block in self.blocks[bisect_left(self.blocks, (nbytes,)) :][:2]:
            if block is not self.end:
                return block
        return None


class CachingAllocator:
    """One run. All in bytes: ``reserved`` of the device, ``allocated`` of that in blocks that are in use, and the most
    that these have been; nothing that is reserved is given back."""

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.reserved = self.allocated = self.peak_allocated = 0
        self._pools: dict[tuple[str, bool], _Pool] = {}

    def allocate(self, nbytes: int, stream: str = "compute") -> Block:
        """A block of at least as many bytes, for work on a stream."""
        nbytes = _rounded(max(nbytes, 1), _SMALLEST)
        small = nbytes <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        if (block := pool.best_fit(nbytes)) is not None:
            pool.remove(block)
        elif self.expandable_segments:
            block = self._grown(pool, nbytes)
        else:
            large = _LARGE_SEGMENT if nbytes < _OWN_SEGMENT_FROM else _rounded(nbytes, _STEP)
            block = self._reserve(pool, _SMALL_SEGMENT if small else large)
        self._split(block, nbytes)
        self.allocated += block.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """The block may be allocated again, on its stream."""
        pool = block.pool
        self.allocated -= block.nbytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                pool.remove(neighbour)
                block = _joined(neighbour, block) if neighbour is block.before else _joined(block, neighbour)
        pool.add(block)

    def _grown(self, pool: _Pool, nbytes: int) -> Block:
        """The end of the pool's range, free and as large as is asked for."""
        page = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        last = pool.end
        have = 0
        if last is not None and last.free:
            pool.remove(last)
            have = last.nbytes
            if nbytes <= have:
                return last
        block = pool.end = self._reserve(pool, _rounded(nbytes - have, page))
        if last is not None:
            last.after, block.before = block, last
        return block if last is None or not have else _joined(last, block)

    def _reserve(self, pool: _Pool, nbytes: int) -> Block:
        block = Block(pool, pool.next_address, nbytes)
        pool.next_address += nbytes
        self.reserved += nbytes
        return block

    def _split(self, block: Block, nbytes: int) -> None:
        rest = block.nbytes - nbytes
        if rest < _SMALLEST or (rest <= _SMALL and not (block.pool.small or self.expandable_segments)):
            return
        after = Block(block.pool, block.address + nbytes, rest, before=block, after=block.after)
        if block.after is not None:
            block.after.before = after
        block.after, block.nbytes = after, nbytes
        if block.pool.end is block:
            block.pool.end = after
        block.pool.add(after)


def _joined(left: Block, right: Block) -> Block:
    left.nbytes += right.nbytes
    left.after = right.after
    if right.after is not None:
        right.after.before = left
    if left.pool.end is right:
        left.pool.end = left
    return left


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
