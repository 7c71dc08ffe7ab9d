"""Hand out a model's whole tensors while it trains, bucket by bucket: to a serving engine, to a file, to an evaluation.

Ranks gather the same buckets in the same order, whoever of them gets the tensors, and to the end: a rank that leaves
its loop early gathers what is left, so that it cannot leave the others waiting. One that raises is named on the others,
which meet before each bucket (``together.py``).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from graph_fsdp import compat
from graph_fsdp.checkpoint.together import check_rank, groups_of, in_step, meet, mesh_of_all
from graph_fsdp.errors import ParameterChangedError, UnsupportedError
from graph_fsdp.initialise.initial_values import agreeing_on_values
from graph_fsdp.passes.ir.settings import is_count
from graph_fsdp.report.report import engine_of

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine

Bucket = list[tuple[Tensor, list[str]]]  # one tensor, and all names that it has in the model


def export(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int | None = None,
    rank: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Generator[tuple[str, Tensor], None, None]:
    """Iterate over (name, whole tensor) of a compiled model's parameters and persistent buffers.

    All ranks of the model call it, outside of its forward, with the same arguments, and iterate. Names, tied ones
    included, and their order are those of the plain model's ``state_dict()``, but for tied names, which follow each
    other. A tensor of one process, a buffer, and what is not sharded is the model's own memory: copy what you change.
    A rank that stops early and keeps the iterator has to call its ``close()``, which gathers what is left; that of a
    ``for`` loop is closed by Python.

    Args:
        model: what ``graph_fsdp.compile`` has returned.
        dtype: of what is floating-point, cast before it is gathered; None: as it is stored.
        max_bytes: most bytes of whole tensors, in the dtype given out, that are gathered at once; a larger tensor comes
            alone. None: what one unit has.
        rank: global rank that gets the tensors; others' iterators gather with it and yield nothing. None: all ranks.
        group: a process group with one rank of the model and others that call :func:`receive`, such as a serving
            engine's: the bucket is broadcast there before it is yielded. On all ranks of the model: those that are not
            in it pass ``dist.GroupMember.NON_GROUP_MEMBER``, which ``dist.new_group`` gives them.

    Raises:
        TypeError, ValueError, UnsupportedError: an argument or the model does not fit; at the call, on every rank.
        RankDisagreement: ranks gave different arguments; at the call, on every rank.
        ParameterChangedError: a parameter was written to since the call: an optimizer's step ran between two tensors.
        RankFailure: another rank raised in it, or has died; on the CPU after ``agreement.PATIENCE_SECONDS`` at most.
    """
    engine = engine_of(model)
    mesh = mesh_of_all(engine)
    facts: list[str] = []
    member, outside = isinstance(group, dist.ProcessGroup), dist.GroupMember.NON_GROUP_MEMBER
    with agreeing_on_values(mesh, facts):
        buckets = _buckets(model, dtype, max_bytes)
        check_rank(mesh, rank)
        if not (group is None or member or (isinstance(group, type(outside)) and group == outside)):
            raise TypeError(f"group must be a ProcessGroup, GroupMember.NON_GROUP_MEMBER or None, got {group!r}")
        named = [f"{names} {tuple(t.shape)} {t.dtype}" for bucket in buckets for t, names in bucket]
        facts += [f"export(dtype={dtype}, max_bytes={max_bytes}, rank={rank})", *named]
    mine = rank is None or not dist.is_initialized() or dist.get_rank() == rank
    return _exported(engine, buckets, dtype, mine, group if member else None)


def receive(
    group: dist.ProcessGroup, *, src: int, device: torch.device | str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over what :func:`export` sends into ``group``: (name, whole tensor), in new memory. The rank is none of
    the model's; ``for`` loops end where the export ends, and vLLM's ``load_weights`` takes the iterator as it is.

    Args:
        group: the one that ``export`` was given, in which this rank is.
        src: global rank of the model's rank in it.
        device: of the tensors; None: the CPU. One that the group's backend sends from.

    Raises:
        RuntimeError: the export failed on ``src``, for the reason given.
        TypeError, ValueError: an argument is wrong; at the call.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be the ProcessGroup that export() was given, of which this rank is, got {group!r}")
    ranks = dist.get_process_group_ranks(group)
    if not is_count(src, least=0) or src not in ranks or src == dist.get_rank():
        raise ValueError(f"src must be the global rank of the model's rank in group, one of {ranks}, got {src!r}")
    return _received(group, src, torch.device("cpu" if device is None else device))


def _received(group: dist.ProcessGroup, src: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    while not isinstance(described := _announced(None, group, src), str | None):
        for names, shape, dtype in described:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, src, group)
            yield from ((name, tensor) for name in names)
    if described is not None:
        raise RuntimeError(f"rank {src} sends no more of the model: {described}")


def _buckets(model: Any, dtype: torch.dtype | None, max_bytes: int | None) -> list[Bucket]:
    storage = model._graph_fsdp.storage
    if storage.is_of_replica:
        raise UnsupportedError(
            "graph_fsdp.export has no parts of models compiled with sharding='replicas'; use "
            "graph_fsdp.xla.full_state_dict(model)"
        )
    if storage.active:
        raise RuntimeError("export() was called while the model's forward runs; call it before or after")
    if quantized := [name for name, p in storage.parameters.items() if p.used_like is not None]:
        raise UnsupportedError(
            f"graph_fsdp.export cannot give out parameter {quantized[0]!r}, which is quantized and sharded as bytes; "
            "take the adapters from model.state_dict()"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    if max_bytes is not None and not is_count(max_bytes):
        raise ValueError(f"max_bytes must be a positive number of bytes or None, got {max_bytes!r}")
    names: dict[Tensor, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(value, []).append(name)
    units = {p.registered: p.spec.unit for p in storage.parameters.values()}
    buckets: list[Bucket] = []
    unit, size = None, 0
    for tensor, own in names.items():
        item = (dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype).itemsize
        nbytes, of_unit = tensor.numel() * item, units.get(tensor, unit)
        if not buckets or (of_unit != unit if max_bytes is None else size + nbytes > max_bytes):
            buckets.append([])
            size = 0
        buckets[-1].append((tensor, own))
        unit, size = of_unit, size + nbytes
    return buckets


def _exported(
    engine: Engine, buckets: Sequence[Bucket], dtype: torch.dtype | None, mine: bool, group: dist.ProcessGroup | None
) -> Generator[tuple[str, Tensor], None, None]:
    writes = {tensor: compat.writes_to(tensor) for bucket in buckets for tensor, _ in bucket}
    left, end = iter(buckets), None
    try:
        for bucket in left:
            whole = _gathered(engine, bucket, dtype, writes, group)
            for (_, names), tensor in zip(bucket, whole, strict=True) if mine else ():
                yield from ((name, tensor) for name in names)
            del whole
    except GeneratorExit:
        for bucket in left:
            _gathered(engine, bucket, dtype, writes, group)
        raise
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
        raise
    finally:
        if group is not None:
            _announced(end, group, dist.get_rank())


@torch.no_grad()
def _gathered(
    engine: Engine,
    bucket: Bucket,
    dtype: torch.dtype | None,
    writes: dict[Tensor, tuple[int, int]],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Gather a bucket's tensors, all under way at once where that is safe, and send them to ``group``."""
    with in_step(engine, "export()", [names[0] for _, names in bucket]):
        for tensor, names in bucket:
            if compat.writes_to(tensor) != writes[tensor]:
                raise ParameterChangedError(
                    f"{names[0]!r} was written to while export() gave out the model, whose tensors would be of two "
                    "steps; take all of them before the optimizer's step"
                )
        meet(groups_of(tensor for tensor, _ in bucket), engine.storage.device)
        started = [_start(tensor, dtype) for tensor, _ in bucket]
        local: list[Any] = [value.to_local() if isinstance(value, DTensor) else value for value in started]
        # torch's AsyncCollectiveTensor is none of its public names.
        whole: list[Tensor] = [value if type(value) is Tensor else value.wait() for value in local]
        if group is not None:
            described = [(names, tensor.shape, tensor.dtype) for (_, names), tensor in zip(bucket, whole, strict=True)]
            _announced(described, group, dist.get_rank())
            for tensor in whole:
                dist.broadcast(tensor.contiguous(), dist.get_rank(), group)
    return whole


def _start(tensor: Tensor, dtype: torch.dtype | None) -> Any:
    """Gather a tensor, or start to, cast to ``dtype`` if it is floating-point."""
    value: Any = tensor.data  # a parameter's: a plain tensor or DTensor
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        if value.device.type != mesh.device_type:  # offloaded
            value = value.to(mesh.device_type)
        at_once = compat.gathers_at_once(mesh.get_all_groups(), value.device)
        value = value.redistribute(placements=[Replicate()] * mesh.ndim, async_op=at_once)
    return value


def _announced(described: Any, group: dist.ProcessGroup, src: int) -> Any:
    """Tell a group what comes next: a bucket's names, shapes and dtypes; None: nothing more; or why. Returns it on all
    ranks."""
    box = [described]
    dist.broadcast_object_list(box, src, group)
    return box[0]
