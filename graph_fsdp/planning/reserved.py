"""What the device's caching allocator reserves in training: planned steps, replayed on ``planning/allocator.py``.

More is reserved than live tensors hold: free blocks that are too small for what comes next stay where they are, and the
optimizer's state, which is allocated at the end of the first step, lies where activations were before. It is what
``torch.cuda.max_memory_reserved`` tells, trainers log, and a device runs out of first, though torch then gives back
what is free before it gives up.

A step is replayed as a training loop does it: the gradients of the step before are dropped, forward, backward, the
optimizer. Forward's outputs are dropped when backward starts, as in the memory model. Steps are replayed until one
reserves nothing more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_fsdp.passes import Graph, PassContext
from graph_fsdp.passes.analysis.memory import GraphStorage, Storages, allocations, shard_nbytes
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.planning.allocator import Block, CachingAllocator

_MOST_STEPS = 6


@dataclass(frozen=True)
class Reserved:
    """``nbytes``: the most that the allocator has reserved; ``allocated``: the most of that in blocks that are in use.
    ``steps``: how many were replayed until one reserved nothing more."""

    nbytes: int
    allocated: int
    steps: int


@dataclass
class Step:
    """One training step as allocations, by phase in order. ``persistent``: bytes that are allocated before the first.
    ``states``, ``temporaries``: bytes of what the optimizer allocates in its first step and keeps, and in each step
    until its end."""

    graphs: Mapping[Phase, Allocations]
    persistent: Sequence[int]
    states: Sequence[int] = ()
    temporaries: Sequence[int] = ()


@dataclass
class Allocations:
    """Of one graph. ``received``: storages that are those of the graph before; ``left``: those that are allocated when
    the graph has run. ``stream``: whose pool a storage lies in."""

    found: Sequence[GraphStorage]
    received: Mapping[int, GraphStorage]
    left: Sequence[GraphStorage]
    stream: Callable[[GraphStorage], str] = lambda storage: "compute"


def planned_step(graphs: Mapping[Phase, Graph], context: PassContext, kept: int, temporaries: int) -> Step:
    """``kept``, ``temporaries``: how many values per parameter the optimizer keeps, and allocates in each step."""
    first = graphs.get("forward") or graphs["inference"]
    forward = allocations(first, context)
    returned = _flat(first.output.args[0])
    found: dict[Phase, Allocations] = {
        first.phase: Allocations(forward.found, {}, [s for node in returned for s in _of(node, forward)])
    }
    trainable: list[int] = []
    if (graph := graphs.get("backward")) is not None:
        backward = allocations(graph, context)
        saved = [n for n in returned[context.forward_outputs :] if _is_tensor(n)]
        received = [n for n in graph.placeholders if _is_tensor(n) and not has_role(n, Role.TANGENT)]
        pairs = {
            id(mine): theirs
            for node, source in zip(received, saved, strict=True)
            for mine, theirs in zip(_of(node, backward), _of(source, forward), strict=False)
        }
        gradients = [s for node in _flat(graph.output.args[0]) for s in _of(node, backward)]
        found["backward"] = Allocations(backward.found, pairs, gradients)
        parameters = context.model.parameters.values()
        trainable = [p.shard_numel * p.dtype.itemsize for p in parameters if p.trainable]
    return Step(found, [shard_nbytes(context.model)], trainable * kept, trainable * temporaries)


def replay(step: Step, *, expandable_segments: bool = False) -> Reserved:
    """Steps until one reserves nothing more, at most six."""
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    for nbytes in step.persistent:
        allocator.allocate(nbytes)
    gradients: list[Block] = []
    for number in range(1, _MOST_STEPS + 1):
        before = allocator.reserved
        for block in gradients:
            allocator.free(block)
        blocks: dict[int, Block] = {}
        for graph in step.graphs.values():
            blocks = _run(graph, allocator, blocks)
        gradients = list(blocks.values())
        for nbytes in step.states if number == 1 else ():
            allocator.allocate(nbytes)
        for block in [allocator.allocate(nbytes) for nbytes in step.temporaries]:
            allocator.free(block)
        if number > 1 and allocator.reserved == before:
            break
    return Reserved(allocator.reserved, allocator.peak_allocated, number)


def _run(graph: Allocations, allocator: CachingAllocator, before: Mapping[int, Block]) -> dict[int, Block]:
    """The blocks that are left, by storage. ``before``: those that the graph before has left."""
    users = Counter(id(storage) for storage in graph.received.values())
    for key in before.keys() - users.keys():
        allocator.free(before[key])
    left = {id(storage) for storage in graph.left}
    blocks: dict[int, Block] = {}
    found = [storage for storage in graph.found if storage.nbytes and storage.begin <= storage.end]
    events = [(event, is_end, s) for s in found for is_end, event in enumerate((s.begin, s.end))]
    for _, is_end, storage in sorted(events, key=lambda event: event[:2]):
        key, source = id(storage), graph.received.get(id(storage))
        if source is not None and id(source) in before:
            users[id(source)] -= is_end
            if key in left:
                blocks[key] = before[id(source)]
            elif is_end and users[id(source)] == 0:
                allocator.free(before[id(source)])
        elif not is_end:
            blocks[key] = allocator.allocate(storage.nbytes, graph.stream(storage))
        elif key not in left:
            allocator.free(blocks.pop(key))
    return blocks


def _of(node: Any, storages: Storages) -> list[GraphStorage]:
    return storages.of[node] if isinstance(node, fx.Node) else []


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _flat(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]
