"""The dialect's collectives run on process groups here.

A start launches a collective asynchronously: on CUDA and XPU on a stream of ours, and the wait blocks the current
stream, not the host ([Note: streams of collectives] in ``streams.py``). On gloo it blocks the host.

A gather reads the bucket's slice of the shard storage, or casts it in one kernel to the rank's own part of the result
and sends it from there. A parameter with a message of its own lands where the graph reads it, and its gradient is
reduced from where it was written.

The mean of gradients is FSDP2's, bit for bit: float32 and bfloat16 use the group's AVG; for narrower dtypes the divisor
is split, about its square root before the sum and the rest after, so that nothing overflows.

[Note: custom collectives]
The user's object has ``allocate(size, *, dtype, device)`` and is called as FSDP2's ``AllGather`` and ``ReduceScatter``
protocols say: with ``async_op=False`` on a stream of ours, or where there are none with True. It returns what to wait
for, or None when the result is there (on the current stream). It gets one call per bucket, with the rank's own part of
the output as a gather's input, and its own ``allocate`` gives both buffers of a reduction. What is gathered is copied
to the bucket's buffer. Gradients are views of a reduction's output: an ``allocate`` that gives out the same memory
again would change those of the step before, as with FSDP2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.layout import GatherLayout, Message
from graph_fsdp.runtime.comm.pairs import exchange, exchange_all_gather, is_pair, own_first
from graph_fsdp.runtime.comm.streams import UnderWay
from graph_fsdp.runtime.comm.unpacking import part_of, unpack
from graph_fsdp.runtime.ranks import lockstep
from graph_fsdp.runtime.slots import Allocate, by_device

# A reduction's operator, and what to divide by before and after it (``mean_of``).
Mean = tuple[dist.ReduceOp.RedOpType, float | None, float | None]


class Comm(Protocol):
    """Is a custom collective of the user; see [Note: custom collectives]."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **given: Any) -> Any: ...


def allocated(comm: Comm, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what the user's object allocates. Raises ValueError if it is not what was asked for: views of it are made
    without another look at its size, and compiled kernels read the type that they were compiled for."""
    memory = comm.allocate((numel,), dtype=dtype, device=device)
    found = tuple(memory.shape), memory.dtype, memory.device
    if found != ((numel,), dtype, device) or not memory.is_contiguous():
        raise ValueError(
            f"allocate() of the custom collective {type(comm).__name__} returned a tensor of shape {found[0]} in "
            f"{found[1]} on {found[2]} (strides {memory.stride()}), and was asked for a contiguous one of shape "
            f"({numel},) in {dtype} on {device}; pass size, dtype and device on to torch.empty"
        )
    return memory


@dataclass
class Comms:
    """Holds a model's custom collectives; None stands for the process group's own."""

    all_gather: Comm | None = None
    reduce_scatter: Comm | None = None


@dataclass(eq=False)
class Pending:
    """Is the handle of a collective or copy under way. ``finish`` waits for it and puts the result into ``buffer``."""

    buffer: Tensor
    finish: Callable[[], None]


class AllGather:
    """Holds what is the same in every gather of a bucket, of ``shards`` like these; the other arguments are those of
    ``start_all_gather``."""

    def __init__(
        self, shards: Sequence[Tensor], layout: GatherLayout, dtype: torch.dtype, group: dist.ProcessGroup
    ) -> None:
        self.layout, self.dtype, self.group = layout, dtype, group
        self.world, self.numel = layout.world_size, layout.world_size * layout.length
        self.is_pair = is_pair(group, shards[0].device)
        self.messages = [(message, message.lands_in_place) for message in layout.messages]
        self.is_one = layout.messages[0].numel == layout.length  # the message is the bucket
        self.casts, self.is_float8 = shards[0].dtype is not dtype, is_float8(dtype) or is_float8(shards[0].dtype)
        self.in_place: tuple[list[Any], Any] = [], 0  # where shards were that lie in one slice, and its beginning

    def start(
        self,
        shards: Sequence[Tensor],
        take: Allocate = by_device,
        take_landing: Allocate = by_device,
        release: Callable[[Tensor], None] = lambda _: None,
        comm: Comm | None = None,
    ) -> Pending:
        source, world = self._source(shards), self.world
        device = source.device
        result = take(self.numel, self.dtype, device)
        landing: Tensor | None = None
        if comm is not None:
            landing = allocated(comm, self.numel, self.dtype, device)
        elif numel := self.layout.landing_numel:
            landing = take_landing(numel, self.dtype, device)
        unpacked: list[tuple[Tensor, int, Message]] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        used = 0
        for message, lands_in_place in self.messages:
            begin, numel = message.begin, message.numel
            if lands_in_place and comm is None:
                target = result if self.is_one else part_of(result, world * begin, world * numel)
            else:
                assert landing is not None
                target = landing if self.is_one else part_of(landing, used, world * numel)
                unpacked += [(landing, used, message)] if message.offsets else []
                used += world * numel
            pairs.append((target, source if self.is_one else source[begin : begin + numel]))
        buffers = [result] if landing is None else [result, landing]
        if self.casts or comm is not None or any(map(compat.is_symmetric, buffers)):
            pairs = _cast_in_place(pairs, self.group)
        if self.is_float8:
            pairs = [(_sendable(target), _sendable(part)) for target, part in pairs]
        launch = functools.partial(self._launch, pairs, comm)
        under_way = compat.seen_as(
            "_allgather_base_",
            self.group,
            lambda: compat.all_gather_single(result, source, group=self.group, async_op=True),
            lambda: UnderWay("gather", self.group, [*buffers, source], launch),
        )

        def finish() -> None:
            under_way.wait()
            for received, begin, message in unpacked:
                unpack(_sendable(received), _sendable(result), message, world, begin)
            if landing is not None and comm is None:
                release(landing)

        return Pending(result, finish)

    def _launch(self, pairs: list[tuple[Tensor, Tensor]], comm: Comm | None, async_op: bool) -> list[Any]:
        if comm is None and self.is_pair:
            return exchange_all_gather(pairs, self.group)
        collective = compat.all_gather_single if comm is None else comm
        return compat.grouped(pairs, self.group, collective, async_op=async_op)

    def _source(self, shards: Sequence[Tensor]) -> Tensor:
        """Return ``shard_slice``; shards lie where they did in the last run, as a rule."""
        first, (before, begin) = shards[0], self.in_place
        places = [first.storage_offset(), first.untyped_storage().nbytes(), *map(Tensor.data_ptr, shards)]
        if places == before:
            return compat.reinterpreted(first, (self.layout.length,), (1,), begin)
        found = slice_in_place(shards, self.layout)
        if found is None:
            return shard_slice(shards, self.layout)
        self.in_place = places, found.storage_offset() - first.storage_offset()
        return found


def start_all_gather(
    shards: Sequence[Tensor], layout: GatherLayout, dtype: torch.dtype, group: dist.ProcessGroup, **given: Any
) -> Pending:
    """Gather ``shards`` (each rank's padded chunks) of a bucket into a flat, parameter-major buffer of ``dtype``, which
    ``take`` allocates, and ``take_landing`` what has to be unpacked, which is given to ``release`` in the end. ``comm``
    gathers in one message, in memory of its own, which is unpacked whole."""
    return AllGather(shards, layout, dtype, group).start(shards, **given)


def _sendable(value: Tensor) -> Tensor:
    """View float8 as uint8: process groups may not know it."""
    return value.view(torch.uint8) if is_float8(value.dtype) else value


def is_float8(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point


def _cast_in_place(targets: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
    """Cast each rank's part of a message to where it belongs in the target, to be sent from there."""
    rank = group.rank()
    own = [part_of(target, rank * part.numel(), part.numel()) for target, part in targets]
    compat.foreach_copy(own, [part for _, part in targets])
    return [(target, part) for (target, _), part in zip(targets, own, strict=True)]


def shard_slice(shards: Sequence[Tensor], layout: GatherLayout) -> Tensor:
    """Return the bucket's slice of the shard storage; packed into a new tensor where the shards do not lie in one."""
    if (found := slice_in_place(shards, layout)) is not None:
        return found
    packed = shards[0].new_zeros(layout.length)
    for shard, offset in zip(shards, layout.offsets, strict=True):
        packed[offset : offset + shard.numel()].copy_(shard.reshape(-1))
    return packed


def slice_in_place(shards: Sequence[Tensor], layout: GatherLayout) -> Tensor | None:
    """Return the bucket's slice of the shard storage, if the shards lie in one."""
    first = shards[0]
    if len(shards) == 1 and first.numel() == layout.length and first.is_contiguous():  # flat, with all chunks in it
        return first.reshape(-1)
    itemsize = first.element_size()
    begin = first.storage_offset() - layout.offsets[0]
    base = first.data_ptr() - layout.offsets[0] * itemsize
    in_place = 0 <= begin <= first.untyped_storage().nbytes() // itemsize - layout.length and all(
        shard.data_ptr() == base + offset * itemsize and shard.is_contiguous()
        for shard, offset in zip(shards, layout.offsets, strict=True)
    )
    return first.as_strided((layout.length,), (1,), begin) if in_place else None


def keep_shard(
    buffer: Tensor, offsets: list[int], numels: list[int], length: int, world_size: int, group: dist.ProcessGroup
) -> Tensor:
    """Return this rank's shard over ``group`` of a bucket that ``world_size`` ranks gathered: for the parameter at
    element ``o`` of the bucket's shard (``length`` elements), ``scale = world_size / group.size()`` of its chunks, at
    ``scale * o``, with zeros in between."""
    scale, place = world_size // group.size(), group.rank()
    kept = buffer.new_zeros(scale * length)
    for offset, numel in zip(offsets, numels, strict=True):
        begin = world_size * offset + place * scale * numel
        kept[scale * offset : scale * (offset + numel)] = buffer[begin : begin + scale * numel]
    return kept


class ReduceScatter:
    """Holds what is the same in every reduction of a bucket, for ``grads`` of these shapes; the other arguments are
    those of ``quantized.start_reduce_scatter``. ``comms`` has what runs it, in one message, unless the user takes that
    away. ``registered``: buffers come from the process group's allocator."""

    def __init__(
        self,
        grads: Sequence[Tensor],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        mean: Mean,
        messages: Sequence[int] = (),
        comms: Comms | None = None,
        registered: bool = False,
    ) -> None:
        self.allocate = functools.partial(compat.allocate_from_group, group) if registered else by_device
        self.dtype, self.group, self.world, self.comms = dtype, group, group.size(), comms
        self.op, self.before, self.after = mean
        self.is_pair = is_pair(group, grads[0].device)
        *offsets, self.length = dialect.reduced_offsets(grads, dtype, self.world, messages)
        numels = dialect.chunk_numels(grads, self.world)
        # Of each message: its gradients, and where in the result their chunks begin and how many elements they have.
        ends = itertools.accumulate(messages or [len(grads)], initial=0)
        self.messages = [(slice(a, b), offsets[a], sum(numels[a:b])) for a, b in itertools.pairwise(ends)]

    def start(self, grads: Sequence[Tensor]) -> Pending:
        comm = self.comms.reduce_scatter if self.comms is not None else None
        out = self._empty(self.length, grads[0], comm)
        pairs = [
            (out[begin : begin + n] if n < self.length else out, self._message(grads[which], n, comm))
            for which, begin, n in self.messages
        ]
        return compat.seen_as(
            "_reduce_scatter_base_",
            self.group,
            lambda: self._start_as_one(out, pairs),
            lambda: self._start(out, pairs, comm),
        )

    def _empty(self, numel: int, like: Tensor, comm: Comm | None) -> Tensor:
        if comm is None:
            return self.allocate(numel, self.dtype, like.device)
        return allocated(comm, numel, self.dtype, like.device)

    def _start_as_one(self, out: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Show dispatch modes one collective, which is not run. Several messages have its shape together."""
        sent = pairs[0][1] if len(pairs) == 1 else out[:1].expand(self.world * self.length)
        return compat.reduce_scatter_single(out, sent, op=self.op, group=self.group, async_op=True)

    def _start(self, out: Tensor, pairs: list[tuple[Tensor, Tensor]], comm: Comm | None) -> Pending:
        if self.is_pair and comm is None:
            divisor = 2.0 if self.op == dist.ReduceOp.AVG else self.after
            return _exchange_reduce_scatter(out, pairs, self.group, divisor)
        collective = compat.reduce_scatter_single if comm is None else comm

        def start(async_op: bool) -> list[Any]:
            return compat.grouped(pairs, self.group, collective, async_op=async_op, op=self.op)

        return _reduction(UnderWay("reduce", self.group, [out, *(sent for _, sent in pairs)], start), out, self.after)

    def _is_sent_as_it_is(self, grad: Tensor) -> bool:
        """Say whether a gradient, alone in its message, is sent from where it lies. Between two ranks, one whose dtype
        the reduction's holds exactly is not cast yet."""
        uncast = self.is_pair and self.before is None and torch.promote_types(grad.dtype, self.dtype) is self.dtype
        return dialect.is_sent_as_it_is(grad, grad.dtype if uncast else self.dtype, self.world)

    def _message(self, grads: Sequence[Tensor], numel: int, comm: Comm | None) -> Tensor:
        """Return what a reduction sends: the ranks' chunks of ``numel`` elements one behind the other, flat."""
        first = grads[0]
        if comm is None and len(grads) == 1 and self._is_sent_as_it_is(first):
            sent = first.view(-1)
            return sent if self.before is None else sent / self.before
        sent = self._empty(self.world * numel, first, comm)
        pack_gradients(grads, sent.view(self.world, -1))
        return sent if self.before is None else sent.div_(self.before)


def _exchange_reduce_scatter(
    out: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup, divisor: float | None
) -> Pending:
    under_way = []
    for part, sent in pairs:
        own, other = own_first(sent, group)
        under_way.append((exchange(part, other.to(part.dtype), group), part, own))

    def finish() -> None:
        for work, part, own in under_way:
            lockstep.finish(work, out.device)
            part.add_(own)
            if divisor is not None:
                part.div_(divisor)

    return Pending(out, finish)


def pack_gradients(grads: Sequence[Tensor], rows: Tensor) -> None:
    """Pack full gradients into ``rows``, one for each rank: its chunks, padded with zeros, in the dtype of ``rows``."""
    compat.chunk_cat([g if g.dim() else g.reshape(1) for g in grads], dim=0, num_chunks=rows.shape[0], out=rows)


def start_all_reduce(grads: Sequence[Tensor], dtype: torch.dtype, group: dist.ProcessGroup, mean: Mean) -> Pending:
    """Start the mean over ranks of gradients that are not sharded; the result is flat."""
    return _all_reduce(torch.cat([g.reshape(-1).to(dtype) for g in grads]), group, mean)


def start_shard_all_reduce(shard: Tensor, group: dist.ProcessGroup, mean: Mean) -> Pending:
    """Start the mean over replicas of what ``start_reduce_scatter`` or ``start_all_reduce`` left, in place. ``mean`` is
    over the ranks of both reductions, of which the first has divided before it."""
    op, _, after = mean
    return _all_reduce(shard, group, (op, None, after))


def reduce_payloads(values: Sequence[Tensor], op: str, group: dist.ProcessGroup) -> Tensor:
    """Reduce small tensors of one dtype in one all-reduce, and wait for it; the result is flat."""
    mean = getattr(dist.ReduceOp, op.upper()), None, None
    pending = _all_reduce(torch.cat([value.reshape(-1) for value in values]), group, mean)
    pending.finish()
    return pending.buffer


def _all_reduce(flat: Tensor, group: dist.ProcessGroup, mean: Mean) -> Pending:
    """Start to reduce ``flat`` in place."""
    op, before, after = mean
    if before is not None:
        flat.div_(before)

    def start(async_op: bool) -> list[Any]:
        return [dist.all_reduce(flat, op=op, group=group, async_op=async_op)]

    return _reduction(UnderWay("reduce over replicas", group, [flat], start), flat, after)


def _reduction(under_way: UnderWay, out: Tensor, after: float | None) -> Pending:
    def finish() -> None:
        under_way.wait()
        if after is not None:
            out.div_(after)

    return Pending(out, finish)


def mean_of(
    dtype: torch.dtype, ranks: int, replicas: int = 1, factor: float | None = None, summed: bool = False
) -> Mean:
    """Return the reduction's operator and the divisors before and after it; with ``replicas``, the one after follows
    the second reduction. ``factor`` replaces the number of ranks as divisor. With ``summed``, the group only adds."""
    narrow = dtype not in (torch.float32, torch.bfloat16)
    if not narrow and factor is None and not summed:
        return dist.ReduceOp.AVG, None, None
    factor = float(ranks * replicas) if factor is None else factor
    before = 1
    while narrow and factor % before == 0 and factor / before > before:
        before *= 2
    after = factor / before if replicas == 1 else None
    return dist.ReduceOp.SUM, float(before) if narrow else None, after
