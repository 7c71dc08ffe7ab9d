"""Every private PyTorch name that graph_fsdp uses, in one place. (Those of Inductor's scheduler: compat_inductor.py;
of its C++ compiler: compat_cpp.py; why Dynamo traces again: compat_recompiles.py.)

Supporting a new torch release means reading this file and editing nothing else. Per name: what it is for, and
the torch versions in which the import below was run. ``TORCH_VERSIONS_RUN`` lists the releases on which the
whole test-suite was run.

| name | for | torch |
|---|---|---|
| ``_dynamo.backends.common.aot_autograd`` | AOTAutograd as a Dynamo backend | 2.9 to 2.15 |
| ``Node.meta["partitioner_tag"]`` | what of a joint graph is backward | 2.9, 2.13 |
| ``GraphModule._param_name_to_source``, ``Node._dynamo_source`` | Dynamo's sources of inputs | 2.9, 2.13 |
| ``_functorch.partitioners.min_cut_rematerialization_partition`` | joint graph → forward, backward | 2.9 to 2.15 |
| ``_functorch.config.activation_memory_budget`` | how much of its saved activations the partitioner keeps | 2.9, 2.13 |
| ``_guards.TracingContext``, ``_guards.tracing`` | fake mode of the capture; a fresh context per region | 2.9 to 2.15 |
| ``_inductor.virtualized.V.set_fake_mode`` | likewise, for random numbers | 2.9, 2.13 |
| ``_inductor.compile_fx.compile_fx_inner`` | Inductor on one region, or on a graph whole | 2.9 to 2.15 |
| ``_inductor.runtime.cache_dir_utils.cache_dir``, ``_inductor.config`` | the cache that ranks share | 2.9, 2.13 |
| ``_inductor.runtime.cache_dir_utils.default_cache_dir`` | making it for the user alone | 2.9, 2.13 |
| ``_inductor.decomposition.select_decomp_table`` | Inductor's decompositions | 2.9 to 2.15 |
| ``_inductor.lowering`` | imported, as a decomposition uses it | 2.13 |
| ``_inductor.fx_passes.joint_graph.joint_graph_passes`` | Inductor's passes before partitioning | 2.9 to 2.15 |
| ``_subclasses.fake_tensor.FakeTensor(mode, meta, device)`` | fake tensors at a sixth of the price | 2.9 to 2.15 |
| ``_subclasses.fake_tensor.in_kernel_invocation_manager`` | likewise | 2.9 to 2.15 |
| ``_subclasses.fake_tensor.FakeTensorMode.cache_clear`` | forgetting what is gone | 2.9, 2.13 |
| ``ShapeEnv.fake_tensor_cache`` | likewise, of graphs with symbolic sizes | 2.13 |
| ``UntypedStorage._cdata`` | whether two fake tensors share memory | 2.9 to 2.15 |
| ``_dynamo.config.ignore_logging_functions`` | logging in models; another name in 2.9 | 2.9 to 2.15 |
| ``_dynamo.utils.get_debug_dir`` | where reports of failed passes go, with ``TORCH_COMPILE_DEBUG=1`` | 2.9, 2.13 |
| ``_logging.trace_structured`` | stages in ``TORCH_TRACE`` | 2.9, 2.13 |
| ``autograd.profiler._is_profiler_enabled`` | whether a profiler of torch records | 2.9, 2.13 |
| ``_dynamo.config.allow_rnn`` | tracing ``nn.LSTM`` | 2.9 to 2.15 |
| ``_dynamo.exc`` | Dynamo's errors, to be retold with the user's line | 2.9 to 2.15 |
| ``distributed_c10d._resolve_process_group`` | group name in a graph → process group | 2.9 to 2.15 |
| ``distributed_c10d._coalescing_manager`` | grouped collectives on CUDA and XPU; never run there | 2.9 to 2.15 |
| ``ProcessGroup._get_backend`` | whether a process group allocates memory, and that memory | 2.13 |
| ``distributed_c10d._get_default_store`` | comparing plan fingerprints | 2.9 to 2.15 |
| ``distributed.fsdp.wrap._Policy`` | torch's auto-wrap policies | 2.9 to 2.15 |
| ``fx._lazy_graph_module._use_lazy_graph_module`` | code of graphs that nobody reads is not written | 2.9, 2.13 |
| ``fx._lazy_graph_module._make_graph_module`` | likewise, of what the partitioner returns | 2.9, 2.13 |
| ``_aot_autograd.graph_compile._log_fw_bw_graphs`` | nor printed for a log that is off | 2.13 |
| ``_logging._internal.trace_log``, ``graph_compile.aot_graphs_log`` | whether it is | 2.9, 2.13 |
| ``_guards.TracingContext.fw_metadata`` | which outputs AOTAutograd has added for inputs that are written | 2.9, 2.13 |
| ``fx.experimental.symbolic_shapes.free_symbols`` | symbols in a region's shapes | 2.9 to 2.15 |
| ``fx.experimental.symbolic_shapes.optimization_hint`` | value of a symbolic size; ``hint_int`` in 2.9 | 2.9 to 2.15 |
| ``utils.flop_counter.flop_registry`` | FLOPs of an operator | 2.9 to 2.15 |
| ``UntypedStorage._cdata`` | which fake tensors share memory | 2.9 to 2.15 |
| ``DTensor._local_tensor``, ``DTensor._spec`` | a shard without autograd; a DTensor of a shard | 2.9 to 2.15 |
| ``distributed.tensor._utils.compute_local_shape_and_global_offset`` | a rank's part of a DTensor | 2.9, 2.13 |
| ``_chunk_cat`` | packing gradients, padded, in one kernel | 2.9 to 2.15 |
| ``_ops.HigherOrderOperator`` | which calls have no schema | 2.9 to 2.15 |
| ``_dynamo.OptimizedModule`` | refusing modules that are compiled already | 2.9 to 2.15 |
| ``_C.DisableTorchFunctionSubclass`` | operators on guarded placeholders | 2.9 to 2.15 |
| ``utils._pytree.tree_map_only`` | casts of inputs and outputs | 2.9 to 2.15 |
| ``_C._construct_storage_from_data_pointer`` | tensors without memory; results of CUDA graphs | 2.9 to 2.15 |
| ``_C._cuda_clearCublasWorkspaces`` | capturing CUDA graphs; never run | |
| ``testing._internal.distributed.fake_pg.FakeStore`` | a process group of one process, for planning | 2.9 to 2.15 |
| ``_C._swap_tensor_impl`` | a meta tensor gets memory, and references to it stay valid | 2.9 to 2.13 |
| ``register_fsdp_forward_method.__code__`` | the methods that it has wrapped | 2.9, 2.13 |
| ``utils._python_dispatch.TorchDispatchMode`` | which tensors an initialisation writes to | 2.9 to 2.13 |
| ``utils._python_dispatch.is_traceable_wrapper_subclass`` | what a tensor extension may make | 2.9 to 2.13 |
| ``UntypedStorage._checkpoint_offset`` | where in a file of ``torch.save`` a tensor is | 2.9, 2.13 |
| ``DeviceMesh._concatenate`` | a mesh of tensor-parallel shards; ``_mesh_resources`` in 2.9 | 2.9, 2.13 |
| ``distributed.tensor.placement_types._StridedShard`` | likewise, both sharded on one dimension | 2.9, 2.13 |
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import types
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

MINIMUM_TORCH = (2, 9)
TORCH_VERSIONS_RUN = ("2.9.1", "2.13.0", "2.15.0")


def check_torch_version(version: str) -> None:
    """Raise ImportError on a torch that does not have what this module imports."""
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if found < MINIMUM_TORCH:
        raise ImportError(
            f"graph_fsdp needs torch {'.'.join(map(str, MINIMUM_TORCH))} or newer, and this is {version}; "
            "pip install --upgrade torch"
        )


check_torch_version(torch.__version__)  # before the imports that an older torch would fail in

import torch.distributed as dist
from torch._dynamo import OptimizedModule
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    Unsupported,
)
from torch._dynamo.utils import get_debug_dir
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._logging._internal import trace_log
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.autograd import profiler as autograd_profiler
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_store, _resolve_process_group
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.fsdp.wrap import _Policy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

__all__ = [
    "BackendCompilerFailed",
    "CheckpointPolicy",
    "FailOnRecompileLimitHit",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OptimizedModule",
    "StridedShard",
    "TorchDispatchMode",
    "TorchDynamoException",
    "TracingContext",
    "Unsupported",
    "_Policy",
    "activation_memory_budget",
    "all_gather_single",
    "allocate_from_group",
    "aot_autograd",
    "check_torch_version",
    "chunk_cat",
    "concatenate_meshes",
    "current_fake_mode",
    "debug_directory",
    "default_inductor_cache_directory",
    "default_store",
    "dynamo_config",
    "fake_process_group",
    "fake_tensor",
    "flop_registry",
    "forget_fake_values",
    "forward_outputs",
    "free_symbols",
    "grouped_all_gather",
    "grouped_reduce_scatter",
    "has_memory",
    "inductor_cache_directory",
    "inductor_compile",
    "inductor_decompositions",
    "inductor_joint_passes",
    "is_of_backward",
    "is_traceable_wrapper_subclass",
    "is_tracing",
    "launches_groups",
    "local_part",
    "local_shape_and_offset",
    "local_tensor",
    "make_dtensor",
    "min_cut_rematerialization_partition",
    "reduce_scatter_single",
    "registered_forward_method",
    "resolve_group",
    "same_memory",
    "set_local_tensor",
    "size_hint",
    "storage_id",
    "swap",
    "take_over",
    "traced_by_aot_autograd",
    "tracing",
    "tracing_options",
    "tree_map_only",
    "with_graph",
    "without_memory",
    "without_torch_function",
]

chunk_cat: Callable[..., Any] = torch._chunk_cat

# torch 2.13 renamed the two and warns on the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage, fake ones too, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def launches_groups(device: torch.device) -> bool:
    """Whether the process groups of a device launch several collectives as one."""
    return device.type in ("cuda", "xpu")


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def grouped_all_gather(pairs: _Pairs, group: dist.ProcessGroup) -> list[dist.Work | Any]:
    """All-gathers of (target, source) pairs, launched as one group where the process group can (NCCL, xccl), else one
    after the other; what to wait for."""
    return _grouped(all_gather_single, pairs, group)


def grouped_reduce_scatter(
    pairs: _Pairs, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> list[dist.Work | Any]:
    """Reduce-scatters of (target, source) pairs, likewise."""
    return _grouped(functools.partial(reduce_scatter_single, op=op), pairs, group)


def _grouped(collective: Callable[..., Any], pairs: _Pairs, group: dist.ProcessGroup) -> list[dist.Work | Any]:
    if len(pairs) > 1 and launches_groups(pairs[0][1].device):
        with _coalescing_manager(group=group, async_ops=True) as manager:
            for target, source in pairs:
                collective(target, source, group=group)
        return [manager]
    return [collective(target, source, group=group, async_op=True) for target, source in pairs]


# 2.9 has it under another name.
_hint: Callable[..., int] = next(
    getattr(symbolic_shapes, name) for name in ("optimization_hint", "hint_int") if hasattr(symbolic_shapes, name)
)

# A size that only the data decides (what ``nonzero`` returns) counts as this many elements.
UNBACKED_HINT = 1024


def size_hint(size: int | torch.SymInt) -> int:
    """The size itself, or the value that a symbolic size had when it was traced. Guards on nothing."""
    return size if isinstance(size, int) else int(_hint(size, fallback=UNBACKED_HINT))


def activation_memory_budget(budget: float) -> contextlib.AbstractContextManager[Any]:
    """The partitioner saves as much for backward; 1 is what it does without being asked."""
    if budget == 1:  # what the user may have set is left alone
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[Any] = functorch_config.patch(activation_memory_budget=budget)
    return patched


def profiler_is_active() -> bool:
    """Whether ``torch.profiler``, ``torch.autograd.profiler`` or ``emit_nvtx`` records in this process."""
    return autograd_profiler._is_profiler_enabled


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group that a graph names."""
    return _resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]  # a NewType of str since 2.13


def allocate_from_group(
    group: dist.ProcessGroup, size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory that a process group has allocated, where it can; else the device's."""
    backend = group._get_backend(device)
    if backend.supports_tensor_alloc(device):
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(*size)
    return torch.empty(*size, dtype=dtype, device=device)


def default_store() -> dist.Store:
    """The key-value store of the default process group."""
    return _get_default_store()


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The rank's own tensor of a DTensor parameter, outside autograd (``to_local`` would record an op)."""
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor


def local_shape_and_offset(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the rank's part of a DTensor, and where it begins in the whole tensor."""
    assert isinstance(tensor, DTensor)
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of a DTensor; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def take_over(parameter: torch.Tensor, other: torch.Tensor) -> None:
    """A DTensor parameter becomes what another DTensor is (memory, dtype, placements); references to it stay valid."""
    assert isinstance(parameter, DTensor) and isinstance(other, DTensor)
    swap(parameter, other)
    parameter._local_tensor, parameter._spec = other._local_tensor, other._spec


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """A mesh with the dimensions of two slices of one mesh. In 2.9 a slice, whose dimensions have the mesh's order.

    Raises:
        RuntimeError, KeyError: they are no slices of one mesh, or share ranks.
    """
    concatenate = getattr(DeviceMesh, "_concatenate", None)
    if concatenate is not None:
        concatenated: DeviceMesh = concatenate([first, second])
        return concatenated
    assert first.mesh_dim_names is not None and second.mesh_dim_names is not None
    root: DeviceMesh = getattr(device_mesh, "_mesh_resources").get_root_mesh(first)  # noqa: B009
    return root[(*first.mesh_dim_names, *second.mesh_dim_names)]


def without_torch_function() -> contextlib.AbstractContextManager[Any]:
    """Run operators on tensor subclasses as on plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def is_tracing() -> bool:
    """Dynamo traces in this thread: in traced code (where this is a constant) or in Dynamo's own."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


_WRAPPERS = {c for c in register_fsdp_forward_method.__code__.co_consts if isinstance(c, types.CodeType)}


def registered_forward_method(value: object) -> Callable[..., Any] | None:
    """The user's method, if ``value`` is what torch's ``register_fsdp_forward_method`` sets in its place."""
    function = getattr(value, "__func__", None)
    return function.__wrapped__ if getattr(function, "__code__", None) in _WRAPPERS else None  # type: ignore[union-attr]


def set_local_tensor(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Make ``local`` the memory of a DTensor parameter (same shape, dtype and device as before)."""
    assert isinstance(parameter, DTensor)
    parameter._local_tensor = local


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchange all that two tensors are but their Python objects: a reference to one now finds the other's memory.
    ``torch.utils.swap_tensors`` would exchange classes and attributes too, and refuses what has weak references (those
    of ``nn.LSTM`` to its parameters)."""
    torch._C._swap_tensor_impl(a, b)


def make_dtensor(local: torch.Tensor, like: torch.Tensor) -> DTensor:
    """A DTensor of ``local``, placed and shaped as ``like``: ``DTensor.from_local`` without its checks, which cost
    more than the gradient of a small parameter."""
    assert isinstance(like, DTensor)
    return DTensor(local, like._spec, requires_grad=False)


def current_fake_mode() -> FakeTensorMode:
    """The fake mode of the capture that is under way."""
    context = TracingContext.try_get()
    assert context is not None and context.fake_mode is not None, "called outside of a torch.compile capture"
    return context.fake_mode


def forget_fake_values(shape_envs: Iterable[Any]) -> None:
    """Drop what torch remembers of fake tensors, of all models and of captures with these ``ShapeEnv``. They are
    caches: whoever lives computes them again. Torch keeps the second kind until ``torch._dynamo.reset()``."""
    FakeTensorMode.cache_clear()
    for shape_env in shape_envs:
        getattr(shape_env, "fake_tensor_cache", {}).clear()


def forward_outputs() -> tuple[list[int], list[bool]]:
    """Of the graph that AOTAutograd has just traced, whose outputs do not alias its inputs: which inputs are written,
    of which it returns the new values first; and of each of the user's outputs, which follow, whether backward is
    given a gradient of it."""
    context = TracingContext.try_get()
    assert context is not None and context.fw_metadata is not None, "called outside of AOTAutograd"
    found: Any = context.fw_metadata
    return list(found.mutated_inp_runtime_indices), [
        bool(info.requires_grad) and issubclass(info.raw_type, torch.Tensor) for info in found.output_info
    ]


def fake_tensor(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    memory: torch.Tensor | None,
    offset: int,
) -> torch.Tensor:
    """A fake tensor without running an operator, in the memory of another (offset and strides in elements) or in its
    own. It is how FakeTensorMode makes the value of a call that it has seen before."""
    with in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if memory is not None:
            meta.set_(memory.untyped_storage(), offset, shape, stride)  # type: ignore[call-overload,unused-ignore]
    return FakeTensor(mode, meta, device)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors lie in the same storage (which has no address)."""
    return storage_id(a) == storage_id(b)


@contextlib.contextmanager
def tracing_options(fullgraph: bool = False) -> Iterator[None]:
    """How Dynamo traces our models.

    Calls of ``logging.Logger`` methods, and of what transformers adds to them, are left out of the graph instead of
    breaking it. Recurrent modules (``nn.LSTM``) are traced; Dynamo's default refuses them because they trace slowly.
    With ``fullgraph``, sizes that are data (``torch.nonzero``) are traced, as newer versions of torch do by themselves.
    Graph modules write their code when it is asked for, as Inductor has it: that of a whole model is long, written for
    each of its graphs more than once, and rarely read. Garbage is collected when Python does it, and not after each
    compilation, which would walk all that was allocated for it.
    """
    ignored = {
        getattr(logging.Logger, name)
        for name in ("debug", "info", "warning", "error", "exception", "critical", "log", "warn")
        if hasattr(logging.Logger, name)
    } | {getattr(logging, name) for name in ("debug", "info", "warning", "error", "critical", "log")}
    for loggers_method in ("warning_once", "info_once", "warning_advice"):
        method = getattr(logging.Logger, loggers_method, None)  # added by transformers
        if method is not None:
            ignored.add(method)
    name = "ignore_logging_functions" if hasattr(dynamo_config, "ignore_logging_functions") else "ignore_logger_methods"
    options = {name: set(getattr(dynamo_config, name)) | ignored, "allow_rnn": True}
    if hasattr(dynamo_config, "run_gc_after_compile"):
        options["run_gc_after_compile"] = False
    if fullgraph:
        options |= {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with dynamo_config.patch(options), _use_lazy_graph_module(True):
        yield


def writes_code_when_asked(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same graph in a module that does; under ``tracing_options``."""
    lazy: torch.fx.GraphModule = _make_graph_module(module, module.graph)
    lazy.meta = module.meta
    return lazy


@contextlib.contextmanager
def unlogged_graphs_unprinted() -> Iterator[None]:
    """For a time AOTAutograd prints forward and backward graphs only if a log wants them. torch 2.13 always does, for a
    cache that only its own compilers use."""
    wanted = trace_log.handlers or graph_compile.aot_graphs_log.isEnabledFor(logging.INFO)
    if wanted or not hasattr(graph_compile, "_log_fw_bw_graphs"):
        yield
        return
    with unittest.mock.patch.object(graph_compile, "_log_fw_bw_graphs", lambda *_, **__: (None, None)):
        yield


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor that is told apart from an ordinary one only by who reads its memory: there is none, and
    the process crashes. (torch 2.9's tracer refuses FakeTensors of another mode than its own.)"""
    like = torch.empty(shape, dtype=dtype, device="meta")
    construct: Any = torch._C._construct_storage_from_data_pointer
    storage = construct(0, device, like.numel() * like.element_size())
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, like.shape, like.stride())


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A new storage in memory that somebody else owns, and must keep for as long as it is used."""
    construct: Any = torch._C._construct_storage_from_data_pointer
    storage: torch.UntypedStorage = construct(address, device, nbytes)
    return storage


def clear_cublas_workspaces() -> None:
    """As torch's own CUDA graph trees do before and after each capture."""
    clear: Any = torch._C._cuda_clearCublasWorkspaces
    clear()


def has_memory(tensor: torch.Tensor) -> bool:
    """False for what ``without_memory`` made."""
    return tensor.data_ptr() != 0 or tensor.untyped_storage().nbytes() == 0


@contextlib.contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """The default process group, for a while: this process as rank 0, and collectives that do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Traced(BaseException):  # AOTAutograd retells every Exception as one of its own
    def __init__(self, graph: torch.fx.GraphModule, forward_outputs: int) -> None:
        self.graph, self.forward_outputs = graph, forward_outputs


def traced_by_aot_autograd(
    module: torch.fx.GraphModule,
    arguments: Sequence[torch.Tensor],
    decompositions: dict[Any, Callable[..., Any]] | None,
) -> tuple[torch.fx.GraphModule, int]:
    """The joint graph of ``module`` on fake ``arguments``, or that of inference, apart from the capture that is under
    way; and how many of its outputs are forward's."""

    def partition(joint: torch.fx.GraphModule, _: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        raise _Traced(joint, num_fwd_outputs)

    def compile_inference(graph: torch.fx.GraphModule, _: Any) -> Any:
        raise _Traced(graph, len(next(iter(reversed(graph.graph.nodes))).args[0]))

    compiler = aot_autograd(
        fw_compiler=compile_inference,
        inference_compiler=compile_inference,
        partition_fn=partition,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    try:
        with tracing(TracingContext(current_fake_mode())):
            compiler(module, arguments)
    except _Traced as traced:
        return traced.graph, traced.forward_outputs
    raise AssertionError("AOTAutograd returned without a graph")


def is_of_backward(node: torch.fx.Node) -> bool:
    """Whether AOTAutograd traced a node of a joint graph while it ran autograd."""
    return node.meta.get("partitioner_tag") == "is_backward"


def with_graph(
    module: torch.fx.GraphModule, graph: torch.fx.Graph, copies: Mapping[torch.fx.Node, torch.fx.Node]
) -> torch.fx.GraphModule:
    """Dynamo's ``module`` with another graph of the same inputs: AOTAutograd guards on inputs by where they come from.
    ``copies``: node of the old graph → of the new one."""
    made = torch.fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        made._param_name_to_source = module._param_name_to_source
    for node, copy in copies.items():
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source
    return made


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    import torch._inductor.lowering  # noqa: F401  # max_pool2d's decomposition takes it to be imported
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_joint_passes(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """What Inductor does to a graph before it is partitioned (random numbers, attention patterns, folding)."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(current_fake_mode()):  # in which seeds of random numbers are made
        return joint_graph_passes(module) or module


def default_inductor_cache_directory() -> Path | None:
    """Where Inductor keeps its caches if it is not told where; None if it is told another place."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    default = Path(default_cache_dir()).absolute()
    told = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # Inductor itself writes the default there
    return default if told is None or Path(told).absolute() == default else None


def inductor_cache_directory() -> Path | None:
    """Where Inductor keeps compiled graphs for other processes and later runs; None where it keeps none, or where
    nothing can be written."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    try:
        return Path(cache_dir())  # makes it
    except OSError:
        return None


def inductor_compile(
    module: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    is_backward: bool,
    is_inference: bool,
    keep_order: bool = False,
) -> Callable[[list[Any]], Any]:
    """Compile one region with Inductor. ``keep_order``: see :func:`graph_fsdp.passes.compat_inductor.graph_order`.

    Each call needs a TracingContext of its own, or the strides that Inductor reports for one region's outputs are
    taken for another's; and each output must be marked user-visible, or Inductor may change its strides.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    from graph_fsdp.passes.compat_inductor import graph_order

    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    outputs: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = [i for i, value in enumerate(outputs) if isinstance(value, torch.fx.Node)]
    mode = current_fake_mode()
    with tracing(TracingContext(mode)), graph_order() if keep_order else contextlib.nullcontext():
        return compile_fx_inner(module, inputs, is_backward=is_backward, is_inference=is_inference)


def lay_out(path: str, shapes: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, int]:
    """Write a file as ``torch.save`` does for a dict of tensors, with room for their values, which are not written.
    Where in the file they belong, of tensors that have any elements."""
    with FakeTensorMode():
        tensors = {name: torch.empty(tuple(shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tensors, path)
    with FakeTensorMode():
        loaded = torch.load(path, weights_only=True)
    return {name: getattr(t.untyped_storage(), "_checkpoint_offset", 0) or 0 for name, t in loaded.items()}


def debug_directory() -> Path | None:
    """Where torch keeps what it writes for debugging, with ``TORCH_COMPILE_DEBUG=1``; None without."""
    if os.environ.get("TORCH_COMPILE_DEBUG", "0") != "1":
        return None
    return Path(get_debug_dir())


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """A text in ``TORCH_TRACE`` that ``tlparse`` shows with the compilation that is under way."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
