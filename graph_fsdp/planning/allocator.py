"""Simulate what torch's caching allocator reserves in training, without a device: planned steps are replayed.

More is reserved than live tensors hold: free blocks that are too small stay where they are, and the optimizer's state,
allocated at the end of the first step, lies where activations were. Trainers log these bytes
(``torch.cuda.max_memory_reserved``), and a device runs out of them first.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``, which XPU's allocator follows:

- sizes are rounded up to 512 bytes; those of 1 MiB and less lie in a pool of their own;
- every stream has its own pools, and gets no block that another stream has freed;
- a request takes the smallest free block of its pool that is large enough. The rest of the block stays free, if it is
  more than 1 MiB (in a small pool: 512 bytes). Freed blocks merge with free neighbours;
- where no block is large enough a segment is reserved: 2 MiB for small requests, 20 MiB for those below 10 MiB, else
  the request rounded up to 2 MiB;
- with ``expandable_segments`` each pool is one range that grows at its end, in pages of 20 MiB (small: 2 MiB); a free
  block at the end grows with it, and counts as the largest of all.

Nothing is given back, as torch does when a device is full. Private pools (CUDA graphs), ``max_split_size_mb`` and
``garbage_collection_threshold`` are not simulated. A step drops the gradients of the step before, then runs forward,
backward and the optimizer; forward's outputs are dropped when backward starts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_fsdp.passes import Graph, PassContext
from graph_fsdp.passes.analysis.memory import shards_on_device
from graph_fsdp.passes.analysis.storages import GraphStorage, Storages, allocations
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Phase

_MIB = 2**20
_SMALLEST, _SMALL = 512, _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT_FROM, _STEP = 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB
_MOST_STEPS = 6


# The allocator


@dataclass(frozen=True, eq=False)
class Block:
    """A block is a piece of a pool that is in use."""

    pool: _Pool
    address: int
    nbytes: int


class _Pool:
    """Keeps the free blocks of one stream, small or large, by address. The next segment begins at ``top``."""

    def __init__(self, small: bool) -> None:
        self.small, self.top = small, 0
        self.end_of: dict[int, int] = {}  # begin → end
        self.begin_of: dict[int, int] = {}
        self.sizes: list[tuple[int, int]] = []  # (bytes, begin), sorted

    def add(self, begin: int, end: int) -> None:
        """Add a free block, merged with its free neighbours."""
        if begin in self.begin_of:
            begin = self.begin_of[begin]
            self.remove(begin)
        if end in self.end_of:
            end = self.remove(end)
        self.end_of[begin], self.begin_of[end] = end, begin
        insort(self.sizes, (end - begin, begin))

    def remove(self, begin: int) -> int:
        """Remove the free block that begins there, and return its end."""
        end = self.end_of.pop(begin)
        del self.begin_of[end], self.sizes[bisect_left(self.sizes, (end - begin, begin))]
        return end

    def best_fit(self, nbytes: int) -> int | None:
        """Find the smallest free block that is large enough, other than the one at the top."""
        at = bisect_left(self.sizes, (nbytes,))
        return next((begin for _, begin in self.sizes[at : at + 2] if self.end_of[begin] != self.top), None)


class CachingAllocator:
    """Simulates one run, in bytes: ``reserved`` of the device, ``allocated`` of that in blocks in use."""

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.reserved = self.allocated = self.peak_allocated = 0
        self._pools: dict[tuple[str, bool], _Pool] = {}

    def allocate(self, nbytes: int, stream: str = "compute") -> Block:
        """Allocate a block of at least ``nbytes`` bytes for work on a stream."""
        nbytes = _rounded(max(nbytes, 1), _SMALLEST)
        small = nbytes <= _SMALL
        pool = self._pools.setdefault((stream, small), _Pool(small))
        begin = pool.best_fit(nbytes)
        if begin is None:
            begin = self._reserve(pool, nbytes)
        end = pool.remove(begin)
        rest = end - begin - nbytes
        if rest > (0 if small or self.expandable_segments else _SMALL):
            end = begin + nbytes
            pool.add(end, end + rest)
        self.allocated += end - begin
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return Block(pool, begin, end - begin)

    def free(self, block: Block) -> None:
        """Give a block back to its stream's pool."""
        self.allocated -= block.nbytes
        block.pool.add(block.address, block.address + block.nbytes)

    def _reserve(self, pool: _Pool, nbytes: int) -> int:
        """Return where a large enough free block begins: in a new segment, or at the end of the range, which grows."""
        begin = pool.begin_of.get(pool.top, pool.top)
        if self.expandable_segments:
            more = _rounded(max(0, nbytes - (pool.top - begin)), _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT)
        elif pool.small:
            more = _SMALL_SEGMENT
        else:
            more = _LARGE_SEGMENT if nbytes < _OWN_SEGMENT_FROM else _rounded(nbytes, _STEP)
        self.reserved += more
        if more:
            pool.add(pool.top, pool.top + more)
        pool.top += more if self.expandable_segments else more + 1  # segments of their own touch nowhere
        return begin


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


# Steps


@dataclass(frozen=True)
class Reserved:
    """Says what a replay came to. ``nbytes``: most bytes reserved; ``allocated``: most bytes in blocks that were in
    use; ``steps``: how many were replayed."""

    nbytes: int
    allocated: int
    steps: int


@dataclass
class Allocations:
    """Lists what one graph allocates. ``received``: storages that the graph before has left, by the ``id`` of this
    graph's; ``left``: storages that outlive the graph; ``stream``: whose pool a storage lies in."""

    found: Sequence[GraphStorage]
    received: Mapping[int, GraphStorage]
    left: Sequence[GraphStorage]
    stream: Callable[[GraphStorage], str] = lambda storage: "compute"


@dataclass
class StepAllocations:
    """Describes a training step as allocations. Bytes: ``persistent`` from before the first step, the optimizer's
    ``states`` from its first step on, and its ``temporaries`` until each step's end."""

    graphs: Mapping[Phase, Allocations]
    persistent: Sequence[int]
    states: Sequence[int] = ()
    temporaries: Sequence[int] = ()


def planned_step(graphs: Mapping[Phase, Graph], context: PassContext, kept: int, temporaries: int) -> StepAllocations:
    """Plan a step whose optimizer keeps ``kept`` values per parameter, and allocates ``temporaries`` each step."""
    first = graphs.get("forward") or graphs["inference"]
    forward = allocations(first, context)
    returned = [s for node in first.outputs for s in _of(node, forward)]
    found: dict[Phase, Allocations] = {first.phase: Allocations(forward.found, {}, returned)}
    trainable: list[int] = []
    if (graph := graphs.get("backward")) is not None:
        backward = allocations(graph, context)
        saved = [n for n in first.outputs[context.forward_outputs :] if _is_tensor(n)]
        received = [n for n in graph.placeholders if _is_tensor(n) and not has_role(n, Role.TANGENT)]
        pairs = {
            id(mine): theirs
            for node, source in zip(received, saved, strict=True)
            for mine, theirs in zip(_of(node, backward), _of(source, forward), strict=False)
        }
        gradients = [s for node in graph.outputs for s in _of(node, backward)]
        found["backward"] = Allocations(backward.found, pairs, gradients)
        parameters = context.model.parameters.values()
        trainable = [p.shard_numel * p.dtype.itemsize for p in parameters if p.trainable]
        if not shards_on_device(context):  # their optimizer keeps its state where they are
            trainable = []
    return StepAllocations(found, [shards_on_device(context)], trainable * kept, trainable * temporaries)


def replay(step: StepAllocations, *, expandable_segments: bool = False) -> Reserved:
    """Replay steps until one reserves nothing more, at most six."""
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    for nbytes in step.persistent:
        allocator.allocate(nbytes)
    blocks: dict[int, Block] = {}
    for number in range(1, _MOST_STEPS + 1):
        before = allocator.reserved
        for graph in step.graphs.values():
            blocks = _run(graph, allocator, blocks)
        for nbytes in step.states if number == 1 else ():
            allocator.allocate(nbytes)
        for block in [allocator.allocate(nbytes) for nbytes in step.temporaries]:
            allocator.free(block)
        if number > 1 and allocator.reserved == before:
            break
    return Reserved(allocator.reserved, allocator.peak_allocated, number)


def _run(graph: Allocations, allocator: CachingAllocator, before: Mapping[int, Block]) -> dict[int, Block]:
    """Run a graph, and return the blocks it leaves. What it does not receive of ``before`` is dropped."""
    received = {key: id(source) for key, source in graph.received.items() if id(source) in before}
    blocks = {key: before[key] for key in received.values()}
    for key in before.keys() - blocks.keys():
        allocator.free(before[key])
    left = {received.get(id(storage), id(storage)) for storage in graph.left}
    held = [s for s in graph.found if s.nbytes and s.begin <= s.end]
    events: list[tuple[int, int, GraphStorage | None]] = [(s.begin, id(s), s) for s in held if id(s) not in received]
    ends: dict[int, int] = {}
    for storage in held:
        key = received.get(id(storage), id(storage))
        ends[key] = max(ends.get(key, 0), storage.end)
    events += [(end, key, None) for key, end in ends.items() if key not in left]
    for _, key, begins in sorted(events, key=lambda event: (event[0], event[2] is None)):
        if begins is None:
            allocator.free(blocks.pop(key))
        else:
            blocks[key] = allocator.allocate(begins.nbytes, graph.stream(begins))
    return blocks


def _of(node: Any, storages: Storages) -> list[GraphStorage]:
    return storages.of[node] if isinstance(node, fx.Node) else []


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
