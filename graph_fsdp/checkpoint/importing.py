"""Take in whole tensors while a model trains, as they come: what another model exports, or a file, a server, a function
gives. It is the other way of ``export.py``.

[Note: what a stream allows]
Nothing of a bucket is written before all of it is known to fit. So a name or shape that does not fit is an error before
anything is changed where the tensors are a mapping, whose names are there from the beginning; of an iterator, before
anything of its bucket is. What was written before then stays, and the error says how much that is, on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.checkpoint.together import check_rank, in_step, meet, mesh_of_all
from graph_fsdp.errors import CheckpointError, UnsupportedError
from graph_fsdp.initialise.initial_values import agreeing_on_values
from graph_fsdp.initialise.state_keys import IncompatibleKeys, check_fit, check_whole, size_mismatch
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.parameters.placements import part_of_rank
from graph_fsdp.passes.ir.canonical_form import digest
from graph_fsdp.passes.ir.settings import check_flags, is_count
from graph_fsdp.report.report import engine_of

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine

Tensors: TypeAlias = "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"
Named: TypeAlias = "list[tuple[str, Tensor]]"

_WHERE = "what import_() was given"
_MAX_BYTES = 2**28


def import_(
    model: nn.Module,
    tensors: Tensors | None,
    *,
    rank: int | None = None,
    max_bytes: int = _MAX_BYTES,
    strict: bool = True,
) -> IncompatibleKeys:
    """Write (name, whole tensor) into a compiled model's parameters and persistent buffers, cast to their dtypes. All
    ranks of the model call it, between a step and the next forward. No rank holds more than ``max_bytes`` besides.

    From another process group, :func:`receive` is the iterator: ``import_(model, receive(group, src=…))`` where all
    ranks of the model are in the group, with ``rank=`` where one is. Each rank keeps its own rows.

    Args:
        model: what ``graph_fsdp.compile`` has returned.
        tensors: a mapping, or an iterable of (name, tensor) by the names of the model's ``state_dict()``, in any order;
            a tied tensor needs one of its names, and of several the last counts. Tensors may be on any device.
        rank: global rank of the model's that has the tensors, and sends them to the others, which pass None. None: all
            ranks have the same.
        max_bytes: most bytes of whole tensors that are sent at once; a larger tensor comes alone.
        strict: whether names that the model lacks, and missing ones, are errors.

    Returns:
        What ``load_state_dict`` returns: with ``strict=False``, what was not written.

    Raises:
        CheckpointError, TypeError: a name, shape or dtype does not fit, a tensor is on the meta device, sparse or a
            DTensor, names are missing, or the iterator raised; says what was written before, of a mapping nothing. With
            ``rank=`` and an iterator, on every rank.
        TypeError, ValueError, UnsupportedError, RuntimeError: an argument or the model does not fit; before anything is
            changed.
        RankDisagreement: ranks gave different arguments, or tensors of different names; or one of the above was raised
            on another rank.
        RankFailure: another rank raised in it, or has died.
    """
    engine = engine_of(model)
    mesh = mesh_of_all(engine)
    facts: list[str] = []
    with agreeing_on_values(mesh, facts):
        _check(engine, mesh, tensors, rank, max_bytes, strict)
        facts += [f"import_(rank={rank}, max_bytes={max_bytes}, strict={strict})"]
        written = _Written(model, strict)
        stream = iter(tensors.items() if isinstance(tensors, Mapping) else () if tensors is None else tensors)
        if isinstance(tensors, Mapping):
            written.check(list(tensors.items()))
            written.check_complete(tensors)
    engine.unsharded.release()
    if rank is None or mesh is None or len(mesh.ranks) == 1:
        _write_all(mesh, written, stream)
    else:
        _write_sent(engine, mesh, written, stream, rank, max_bytes)
    return IncompatibleKeys(written.missing(written.names), written.unexpected)


def _check(engine: Engine, mesh: DataParallelMesh | None, tensors: Any, rank: Any, max_bytes: Any, strict: Any) -> None:
    if engine.backend.name == "xla":
        raise UnsupportedError("import_() writes into shards of ranks; with backend='xla' use model.load_state_dict")
    if engine.storage.active:
        raise RuntimeError("import_() was called while the model's forward runs; call it before or after")
    if not is_count(max_bytes):
        raise ValueError(f"max_bytes must be a positive number of bytes, got {max_bytes!r}")
    check_flags(strict=strict)
    check_rank(mesh, rank)
    has = rank is None or mesh is None or dist.get_rank() == rank
    if has and (isinstance(tensors, (str, Tensor)) or not isinstance(tensors, Iterable)):
        raise TypeError(
            f"tensors must be a mapping or an iterable of (name, whole tensor) on the rank that has them, got "
            f"{type(tensors).__name__}"
        )
    if not has and tensors is not None:
        raise ValueError(f"tensors must be None on a rank that is sent them: rank={rank} has them, and this one is not")


@dataclass
class _Written:
    """Writes into a model, and knows what was written. ``unexpected``: names that the model lacks."""

    model: nn.Module
    strict: bool
    names: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        registered = {*self.model.parameters(), *self.model.buffers()}
        state = self.model.state_dict(keep_vars=True)
        self.targets: dict[str, Tensor] = {name: value for name, value in state.items() if value in registered}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the names of what has none of its names among these."""
        found = {self.targets[name] for name in names if name in self.targets}
        return [name for name, target in self.targets.items() if target not in found]

    def check(self, bucket: Named) -> None:
        """Raise CheckpointError, or TypeError, if a tensor of the bucket does not fit."""
        problems, unexpected = [], []
        for item in bucket:
            if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
                raise TypeError(f"tensors must give pairs of a name and a tensor, got {type(item).__name__}")
            name, tensor = item
            target = self.targets.get(name)
            check_whole("tensors", name, tensor, subclasses=True)
            if target is None:
                unexpected.append(name)
            elif problem := size_mismatch(name, tensor.shape, target):
                problems.append(problem)
            elif _kind(tensor) != _kind(target):
                problems.append(f"{name}: {tensor.dtype} cannot be written into {target.dtype}")
        check_fit(self.model, _WHERE, IncompatibleKeys([], unexpected if self.strict else []), problems)

    def check_complete(self, names: Iterable[str]) -> None:
        """Raise CheckpointError if something of the model has none of its ``names`` there."""
        if self.strict:
            check_fit(self.model, _WHERE, IncompatibleKeys(self.missing(names), []), [])

    @torch.no_grad()
    def write(self, bucket: Named) -> None:
        """Write this rank's part of whole tensors that were checked."""
        for name, tensor in bucket:
            target = self.targets.get(name)
            if target is None:
                self.unexpected.append(name)
                continue
            local = compat.local_part(target).detach()
            if isinstance(target, DTensor):
                tensor = part_of_rank(target, tensor)
            if local.numel():
                local.copy_(tensor.detach())
            increment_version(target)
            self.names.append(name)

    def failed(self, error: Exception) -> Exception:
        """Return what to raise for an error: with what was written before it, as a CheckpointError if it is of another
        kind."""
        known = isinstance(error, (CheckpointError, TypeError))
        text = (str(error) if known else f"{type(error).__name__}: {error}").rstrip(". ")
        if self.names:
            text += (
                f"; {len(self.names)} tensors were written before it, {self.names[0]!r} to {self.names[-1]!r}: import "
                "all of them again, or load a checkpoint"
            )
        return TypeError(text) if isinstance(error, TypeError) else CheckpointError(text)


def _kind(tensor: Tensor) -> str:
    return "complex" if tensor.is_complex() else "floating" if tensor.is_floating_point() else "integral"


def _write_all(mesh: DataParallelMesh | None, written: _Written, stream: Iterator[tuple[str, Tensor]]) -> None:
    """Write what this rank has itself, one tensor after the other, and agree with the others on what that was."""
    facts: list[str] = []
    with agreeing_on_values(mesh, facts):
        try:
            for item in stream:
                written.check([item])
                written.write([item])
            written.check_complete(written.names)
        except Exception as error:
            raise written.failed(error) from error
        facts.append(f"{len(written.names)} tensors, {digest(written.names)}")


def _write_sent(
    engine: Engine,
    mesh: DataParallelMesh,
    written: _Written,
    stream: Iterator[tuple[str, Tensor]],
    rank: int,
    max_bytes: int,
) -> None:
    """Write what ``rank`` sends, bucket by bucket. What is wrong there is told to all before they raise, so that they
    are in step afterwards."""
    lines, device = _lines(mesh, rank), engine.storage.device
    buckets = _buckets(stream, max_bytes, written) if dist.get_rank() == rank else None
    while True:
        own: Exception | None = None
        with in_step(engine, "import_()", []):
            bucket: Named = []
            if buckets is not None:
                try:
                    bucket = next(buckets, [])
                except Exception as error:
                    own = error
            problem = None if own is None else f"{type(own).__name__}: {own}"
            meet([name for name, _ in lines], device)
            described: list[Any] = [[(name, t.shape, t.dtype) for name, t in bucket], problem]
            for name, source in lines:
                dist.broadcast_object_list(described, source, compat.resolve_group(name))
            if problem is None and described[1] is None:
                bucket = _sent(described[0], dict(bucket) if buckets is not None else None, lines, device)
                written.write(bucket)
        if own is not None:
            raise written.failed(own) from own
        if described[1] is not None:
            raise written.failed(CheckpointError(f"rank {rank}, which has the tensors, raised {described[1]}"))
        if not bucket:
            break
    try:
        written.check_complete(written.names)
    except CheckpointError as error:
        raise written.failed(error) from error


def _buckets(stream: Iterator[tuple[str, Tensor]], max_bytes: int, written: _Written) -> Iterator[Named]:
    """Yield what comes in buckets that fit."""
    bucket: Named = []
    size = 0
    for item in stream:
        written.check([item])
        if bucket and size + item[1].nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += item[1].nbytes
    if bucket:
        yield bucket


def _sent(
    described: list[tuple[str, torch.Size, torch.dtype]],
    own: dict[str, Tensor] | None,
    lines: list[tuple[str, int]],
    device: torch.device,
) -> Named:
    """Send a bucket's tensors along the ``lines``; return them on this rank."""
    found: Named = []
    for name, shape, dtype in described:
        if own is None:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        else:
            tensor = own[name].detach().to(device).contiguous()
        for group, source in lines:
            dist.broadcast(tensor, source, compat.resolve_group(group))
        found.append((name, tensor))
    return found


def _lines(mesh: DataParallelMesh, rank: int) -> list[tuple[str, int]]:
    """Return what brings a tensor of ``rank`` here, in order: the name of a process group, and who sends in it. Those
    in line with it along the last dimension get it first, and pass it on along the others."""
    ranks, here = mesh.mesh.mesh, mesh.mesh.get_coordinate()
    assert here is not None
    there = (ranks == rank).nonzero()[0].tolist()
    found: list[tuple[str, int]] = []
    for dim in reversed(range(mesh.mesh.ndim)):
        if all(here[other] == there[other] for other in range(dim)) and mesh.mesh.size(dim) > 1:
            source = [*there[: dim + 1], *here[dim + 1 :]]
            found.append((mesh.mesh.get_group(dim).group_name, int(ranks[tuple(source)])))
    return found
