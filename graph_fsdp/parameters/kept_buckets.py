"""``reshard()`` between a forward and its backward frees what was kept for backward, which is then gathered again.

A kept bucket is a tensor that autograd saves. Only its memory is freed, and is filled again before the backward that it
was saved for begins. All ranks must have called ``reshard()``; as such gathers keep step, a rank that has not is found.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.engine.ranks import Schedules
from graph_fsdp.passes import Graph
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.layout import layout_of
from graph_fsdp.passes.ir.operands import argument, operand
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.runtime import GatheredBytes
from graph_fsdp.runtime.comm.collectives import Pending, start_all_gather
from graph_fsdp.runtime.ranks.lockstep import Runnable


@dataclass
class _Kept:
    """Holds a bucket of one forward, as long as its backward may come. ``start``: the node that gathers it, of
    ``shards``, which are held no longer. ``undo``: counts its bytes again, while its memory is freed."""

    start: fx.Node
    units: frozenset[str]
    shards: list[Tensor]
    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    given_up: set[str] = field(default_factory=set)  # units that reshard() was called on
    undo: Any = None


class KeptBuckets:
    """Holds what forwards of one model have kept for their backwards. ``schedules`` keeps the ranks in step. ``whole``:
    graphs are compiled whole, and their bytes not counted."""

    def __init__(self, counter: GatheredBytes, schedules: Schedules, whole: bool) -> None:
        self._counter, self._schedules = counter, schedules
        self._add: Callable[[int], None] = counter.add if not whole else lambda _: None
        self._kept: list[_Kept] = []

    def around(self, program: Runnable, graph: Graph, spec: ModelSpec) -> Runnable:
        """Return ``program``, which runs ``graph``, but remembers what forward keeps and gathers what backward
        lacks."""
        weak = weakref.ref(self)  # what Dynamo keeps must not keep the model
        found = _gathers(graph, spec) if graph.phase == "forward" else []
        places = [i for i, node in enumerate(graph.placeholders) if has_role(node, Role.KEPT)]

        def forward(args: list[Any]) -> Any:
            shards = [[args[i].detach() for i in inputs] for *_, inputs in found]  # without what autograd holds
            outputs = program(args)
            buckets = weak()
            assert buckets is not None, "the model's forward runs"
            buckets._kept = [kept for kept in buckets._kept if kept.storage() is not None]
            for (start, units, output, _), given in zip(found, shards, strict=True):
                storage = outputs[output].untyped_storage()
                if storage.resizable():
                    kept = weakref.ref(storage, functools.partial(_clear, given))
                    buckets._kept.append(_Kept(start, units, given, kept, storage.nbytes()))
            return outputs

        def backward(args: list[Any]) -> Any:
            if (buckets := weak()) is not None:
                buckets._gather([args[i] for i in places])
            elif not all(args[i].untyped_storage().nbytes() for i in places):
                raise RuntimeError(
                    "a backward came after its model was deleted, and reshard() had freed what it reads; keep the "
                    "model to the end of the backward"
                )
            return program(args)

        if not found and (graph.phase != "backward" or not places):
            return program
        return forward if found else backward

    def free(self, unit: str) -> None:
        """Free the memory of what is kept of ``unit``; of a bucket of several units with the last of them."""
        for kept in self._kept:
            storage = kept.storage()
            if unit not in kept.units or storage is None or kept.undo is not None:
                continue
            kept.given_up.add(unit)
            if kept.given_up == kept.units:
                storage.resize_(0)
                self._add(-kept.nbytes)
                # A buffer's bytes are subtracted when it is dropped; this one's, subtracted already, are added again.
                kept.undo = weakref.finalize(storage, self._add, kept.nbytes)
                kept.undo.atexit = False

    def _gather(self, buffers: list[Tensor]) -> None:
        """Gather those of ``buffers`` that were freed."""
        by_storage = {compat.storage_id(buffer): buffer for buffer in buffers}
        freed = [(kept, kept.storage()) for kept in self._kept if kept.undo is not None]
        found = [(by_storage[s._cdata], kept) for kept, s in freed if s is not None and s._cdata in by_storage]
        if not found:
            return
        gathers = [f"gather {kept.start.meta['fsdp'].bucket} of {kept.nbytes} bytes" for _, kept in found]
        self._schedules.begin("gather", "of what reshard() has freed, before backward,", gathers)
        with torch.no_grad():
            under_way = [self._start(buffer, kept) for buffer, kept in found]
        for pending in under_way:
            self._schedules.wait(pending)

    def _start(self, buffer: Tensor, kept: _Kept) -> Pending:
        storage, dtype = buffer.untyped_storage(), argument(kept.start, "dtype")
        storage.resize_(kept.nbytes)
        kept.undo.detach()
        kept.undo = None
        kept.given_up.clear()
        self._add(kept.nbytes)
        self._counter.count("all_gather")
        # Autograd counts writes to what it has saved; this is one that it must not see.
        whole = torch.empty(0, dtype=dtype, device=buffer.device).set_(storage, 0, (buffer.numel(),), (1,))
        group = compat.resolve_group(dialect.group_of(kept.start))
        return start_all_gather(kept.shards, layout_of(kept.start), dtype, group, take=lambda *_: whole)


def _clear(shards: list[Tensor], _: Any) -> None:
    shards.clear()


def _gathers(graph: Graph, spec: ModelSpec) -> list[tuple[fx.Node, frozenset[str], int, list[int]]]:
    """Return what a forward graph gathers from its inputs and returns whole, in one output only: the start, the units
    in it, and the places of the output and of the inputs."""
    places = {node: i for i, node in enumerate(graph.placeholders)}
    outputs = {node: i for i, node in enumerate(graph.outputs) if isinstance(node, fx.Node)}
    waits = [node for node in outputs if has_role(node, Role.GATHER_WAIT)]
    roots = graph.alias_roots() if waits else {}
    returned = Counter(root for node in outputs for root in roots.get(node, ()))
    found = []
    for node in waits:
        start = operand(node)
        shards = argument(start, "shards")
        if not all(has_role(shard, Role.SHARD) and shard in places for shard in shards) or returned[start] > 1:
            continue  # fetched from the host, or made by a tensor extension
        units = frozenset(spec.spec_of(name).unit for name in start.meta["fsdp"].params)
        found.append((start, units, outputs[node], [places[shard] for shard in shards]))
    return found
