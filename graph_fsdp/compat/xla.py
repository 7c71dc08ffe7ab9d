"""This file has every name of torch_xla that graph_fsdp uses (``docs/private_names.md``), and imports it when one of
them is first needed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import aot_autograd
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _mode_utils

_DUMP = "XLA_DUMP_POST_OPTIMIZATIONS"
_NO_DISPATCH = _mode_utils.no_dispatch


torch_xla = functools.partial(importlib.import_module, "torch_xla")
runtime = functools.partial(importlib.import_module, "torch_xla.runtime")  # devices, processes and replicas
spmd = functools.partial(importlib.import_module, "torch_xla.distributed.spmd")  # meshes and shardings


def xlac() -> Any:
    """Return the module of torch_xla that is written in C++."""
    return torch_xla()._XLAC


def is_mesh(value: object) -> bool:
    """Say whether it is a mesh of torch_xla's own. False, and nothing imported, where it cannot be one."""
    return type(value).__module__.startswith("torch_xla.") and isinstance(value, spmd().Mesh)


def ordinal() -> int:
    """Return that of the replica that this thread runs, or that this thread of autograd computes gradients of."""
    return int(xlac()._xla_get_default_device_ordinal())


def device() -> torch.device:
    return torch_xla().device()


@functools.cache
def decompose_for_autograd() -> None:
    """Have operators that torch makes of others, and torch_xla has kernels for, decomposed before autograd where they
    are traced. Autograd has no formula of them (``std``, ``kl_div``, ``selu``, ``cross``, ``diag``, ``inverse``), and
    looks for their parts only where a device has no kernel: gradients through them were lost, without a word. Nor can
    torch_xla's own kernels for autograd be traced (``max_pool3d``)."""
    torch_xla()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        namespace, _, rest = name.partition("::")
        known = has(name, "AutogradXLA") or (has(name, "XLA") and not has(name, "Autograd"))
        if namespace == "aten" and known:
            packet, _, overload = rest.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            operator.py_kernels[torch._C.DispatchKey.AutogradXLA] = operator.decompose  # replicas may do so at once
            operator._dispatch_cache.clear()


# --- shardings: of dimension 0 in ``tiles`` parts, over ``devices`` in the order (part, copy of it)


@functools.lru_cache(maxsize=4096)
def op_sharding(devices: tuple[int, ...], tiles: int, dims: int) -> Any:
    import numpy

    mesh = spmd().Mesh(numpy.array(devices), (tiles, len(devices) // tiles), ("parts", "copies"))
    return mesh.get_op_sharding(("parts",) + (None,) * (dims - 1) if tiles > 1 and dims else ())


def mark_sharding(tensor: Tensor, devices: tuple[int, ...], tiles: int) -> None:
    """Put a tensor's parts on the devices that are to hold them; the tensor stays the same object."""
    xlac()._xla_mark_sharding(tensor, op_sharding(devices, tiles, tensor.dim()))


def annotated(tensor: Tensor, sharding: Any) -> Tensor:
    """Return a copy of a tensor, sharded as torch_xla describes it; None: whole on each device."""
    copy = tensor.clone()
    if sharding is None:
        sharding = xlac().OpSharding([], [], [], spmd().ShardingType.REPLICATED)
    xlac()._xla_annotate_custom_sharding(copy, sharding)
    return copy


def sharding_specs(tensors: Sequence[Tensor]) -> list[str]:
    """Return how tensors are sharded, as XLA writes it; "" where nothing says."""
    return [spec or "" for spec in xlac()._get_xla_sharding_specs(list(tensors))]


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor that an ``XLAShardedTensor`` stands for; any other itself."""
    return getattr(tensor, "global_tensor", tensor) if type(tensor).__name__ == "XLAShardedTensor" else tensor


@dataclass(frozen=True)
class DeviceShard:
    """Holds the part of a tensor that is on a device of this host. ``padded`` is on the CPU, as large as that of each
    other device; ``offset`` and ``size`` are those of the part in the tensor, without the padding."""

    padded: Tensor
    device: str
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def part(self) -> Tensor:
        """Return a view of ``padded`` without the padding; the last devices may have no rows."""
        return self.padded[tuple(slice(0, size) for size in self.size)]


def device_shards(tensor: Tensor) -> list[DeviceShard]:
    """Return the parts of a tensor that is divided, in memory of their own."""
    shards, places = xlac()._get_local_shards([tensor])[0], xlac()._get_local_shard_replica_and_indices([tensor])[0]
    found = []
    for (padded, device_name), (_, slices) in zip(shards, places, strict=True):
        if slices is Ellipsis:  # a tiling of one tile
            slices = [slice(0, size) for size in tensor.shape]
        offset, size = tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices)
        found.append(DeviceShard(padded, device_name, offset, size))
    return found


def load_device_shards(tensor: Tensor, shards: Sequence[DeviceShard]) -> None:
    """Give each device its part of a tensor, with other values than ``device_shards`` found."""
    xlac()._load_local_shards(tensor, [shard.padded for shard in shards], [shard.device for shard in shards])


# --- inside of a graph


def enter_manual(x: Tensor, devices: Sequence[int], tiles: int) -> Tensor:
    return xlac()._spmd_full_to_shard_shape(annotated(x, op_sharding(tuple(devices), tiles, x.dim())))


def exit_manual(x: Tensor, shape: Sequence[int], devices: Sequence[int], tiles: int) -> Tensor:
    copy, manual = x.clone(), xlac().OpSharding([], [], [], spmd().ShardingType.MANUAL)
    xlac()._mark_manual_sharding(copy, manual)
    sharding = op_sharding(tuple(devices), tiles, len(shape))
    return xlac()._spmd_shard_to_full_shape(copy, sharding, list(shape), x.dtype)


def all_gather(x: Tensor, groups: list[list[int]], channel: int) -> Tensor:
    gathered: Tensor = xlac()._xla_all_gather(x, 0, len(groups[0]), groups, False, channel, True)
    # torch_xla has each gather wait for the last one, also that of another graph, which would then be in this one.
    xlac()._set_all_reduce_token(str(xlac()._xla_get_default_device()), None)
    return gathered


def reduce_scatter(x: Tensor, groups: list[list[int]]) -> Tensor:
    return xlac()._xla_spmd_reduce_scatter("sum", x, 1.0, 0, len(groups[0]), groups)


def all_reduce(x: Tensor, groups: list[list[int]]) -> Tensor:
    return xlac()._xla_spmd_all_reduce("sum", x, 1.0, groups)


def barrier(tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [tensor.clone() for tensor in tensors]
    xlac()._xla_optimization_barrier_(copies)
    return copies


# --- lazy tensors


def sync(wait: bool = False) -> None:
    """Compute everything that is pending."""
    torch_xla().sync(wait=wait, reset_scope=False)
    if wait:  # not for other replicas' devices, which may be waiting for this one
        model = importlib.import_module("torch_xla.core.xla_model")
        xlac()._xla_wait_device_ops([] if runtime().is_spmd() else model.xla_real_devices([device()]))


def pending(tensors: Sequence[Tensor]) -> bool:
    """Say whether any of them is not computed yet."""
    return any(xlac()._check_tensor_need_materialization(list(tensors)))


def lazily() -> contextlib.AbstractContextManager[Any]:
    return importlib.import_module("torch_xla.experimental").eager_mode_context(False)


def tensor_id(tensor: Tensor) -> int:
    return int(xlac()._xla_get_tensor_id(tensor))


def graph_inputs(outputs: Sequence[Tensor]) -> list[tuple[int, Any]]:
    """Return the id and the value of each tensor in memory that pending tensors are computed from."""
    return list(zip(*xlac()._get_tensors_xla_device_data_node(list(outputs)), strict=True))


def compile_pending(outputs: Sequence[Tensor]) -> Any:
    """Compile the graph that ``outputs`` are pending on; return its key for ``run_compiled``."""
    context = importlib.import_module("torch_xla.utils.buffer_donor_context")
    with context.alias_with_buffer_donor_config():
        key = xlac()._get_graph_hash(list(outputs))
        xlac()._xla_warm_up_cache(list(outputs), [])
    return key


class ProgramDroppedError(RuntimeError):
    """torch_xla has dropped a program: it keeps those that ran last, all graphs and all of the lazy ones together."""


def run_compiled(key: Any, inputs: Sequence[Any]) -> list[Tensor]:
    """Run a program. Raises ProgramDroppedError, before anything runs, if torch_xla does not have it any more."""
    try:
        found: list[Tensor] = xlac()._run_cached_graph(key, list(inputs))
    except RuntimeError as error:
        if "Failed to get computation by hash" in str(error):
            raise ProgramDroppedError(str(error)) from error
        raise
    return found


def drop_pending() -> None:
    """Forget what is pending on all live tensors; those in memory keep their values."""
    xlac()._clear_pending_irs(str(device()))


def fallback_counts() -> dict[str, int]:
    """Count how often each operator has run on the host so far, for want of an implementation on XLA."""
    metrics = importlib.import_module("torch_xla.debug.metrics")
    return {name: metrics.counter_value(name) or 0 for name in sorted(metrics.executed_fallback_ops())}


# --- what XLA compiled


@dataclass(frozen=True)
class Like:
    """Describes an input of a program without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    sharding: Any
    spec: str


def descriptions(inputs: Sequence[Any]) -> list[Any]:
    """Describe tensors; what is none stays as it is."""
    return [_described(value) if isinstance(value, Tensor) else value for value in inputs]


def _described(value: Tensor) -> Like:
    sharding = xlac()._get_xla_op_sharding(value) if runtime().is_spmd() else None
    return Like(value.shape, value.dtype, value.device, sharding, sharding_specs([value])[0])


def fresh_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Return zeros like tensors, or like descriptions of them, in memory of their own; the rest stays as it is."""
    fresh: list[Any] = []
    for value in descriptions(inputs):  # of those among them that are descriptions already, themselves
        if isinstance(value, Like):
            zeros = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
            fresh.append(zeros if value.sharding is None else annotated(zeros, value.sharding))
        else:
            fresh.append(value)
    tensors = [value for value in fresh if isinstance(value, Tensor)]
    if tensors:
        devices = [] if runtime().is_spmd() else [str(tensors[0].device)]
        xlac()._xla_sync_multi(tensors, devices, wait=True, sync_xla_data=True)
    return fresh


def optimized_text(function: Callable[..., Any], inputs: Sequence[Any]) -> str:
    """Return XLA's optimized program for the tuple that ``function`` returns. Raises RuntimeError if HLO text was asked
    for before in this process, which is when torch_xla reads the variable for it."""
    os.environ[_DUMP] = "1"
    tensors = [value for value in function(*inputs) if isinstance(value, Tensor)]  # pending
    text = str(xlac()._get_xla_tensors_hlo(tensors))
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise RuntimeError(
            "torch_xla gave the HLO as it was before XLA's passes, because HLO text was asked for in this process "
            f"before; start the process with {_DUMP}=1"
        )
    return text


# --- tracing


@contextlib.contextmanager
def backward_compiled_with_forward() -> Iterator[None]:
    """For a time, let AOTAutograd compile backward where it compiles forward, and not when it first runs, in a thread
    of autograd and under metrics that all threads share."""
    kind = aot_autograd.AOTConfig

    def eager(*args: Any, **kwargs: Any) -> Any:
        return kind(*args, **{**kwargs, "force_non_lazy_backward_lowering": True})

    with unittest.mock.patch.object(aot_autograd, "AOTConfig", eager):
        yield


@contextlib.contextmanager
def in_place_views() -> Iterator[None]:
    """For a time, let AOTAutograd trace ``transpose_``, ``unsqueeze_`` and others that change what a tensor says of
    itself. It has them change its own wrapper, too, which torch_xla's kernels do not know; those of any device do."""
    mode, of_torch, keys = FunctionalTensorMode, FunctionalTensorMode.__torch_dispatch__, torch._C.DispatchKey
    of_xla = torch._C.DispatchKeySet(keys.XLA) | torch._C.DispatchKeySet(keys.AutogradXLA)

    @contextlib.contextmanager
    def no_dispatch() -> Iterator[None]:
        with _NO_DISPATCH(), torch._C._ExcludeDispatchKeyGuard(of_xla):
            yield

    def dispatched(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.Tag.inplace_view not in func.tags:
            return of_torch(self, func, *args, **kwargs)
        with unittest.mock.patch.object(_mode_utils, "no_dispatch", no_dispatch):
            return of_torch(self, func, *args, **kwargs)

    with unittest.mock.patch.object(mode, "__torch_dispatch__", dispatched):
        yield


# --- tensors without memory


class WithoutMemory(Tensor):
    """Describes a tensor by shape, dtype and device; nothing can be computed with it."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        return Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's is a constant
        raise TypeError(f"{func} ran on a tensor without memory")


def without_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool, kind: type = Tensor
) -> Tensor:
    """Make a tensor for Dynamo to trace with: on ``device``, and a plain tensor or an ``nn.Parameter`` for all that
    Python can tell. (XLA's tensors have no storage whose memory could be taken away.)"""
    made: Tensor = WithoutMemory(shape, dtype, device)
    made.__class__ = kind
    return made.requires_grad_(requires_grad) if kind is not nn.Parameter or requires_grad else made
