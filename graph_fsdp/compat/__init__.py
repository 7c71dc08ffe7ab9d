"""``compat`` has every private name of PyTorch that graph_fsdp uses: a new torch release changes nothing else.

Inductor's scheduler (``inductor_scheduler.py``), its C++ compiler (``inductor_cpp.py``), its devices
(``inductor_devices.py``) and torch_xla (``xla.py``) are imported by themselves, and list their names. The table says
what a name is for, and the torch versions in which it was imported. The whole test-suite was run on 2.9.1, 2.13.0 and
2.15.0.

| name | for | torch |
|---|---|---|
| ``_dynamo.backends.common.aot_autograd`` | AOTAutograd as a Dynamo backend | 2.9 to 2.15 |
| ``_aot_autograd.graph_compile._log_fw_bw_graphs`` | graphs are not printed for a log that is off | 2.13 |
| ``_logging._internal.trace_log``, ``graph_compile.aot_graphs_log`` | whether it is | 2.9, 2.13 |
| ``_aot_autograd.schemas.OutputType`` | which outputs have a gradient in backward | 2.13 |
| ``_guards.TracingContext.fw_metadata`` | which outputs AOTAutograd has added for inputs that are written | 2.9, 2.13 |
| ``_guards.TracingContext``, ``_guards.tracing`` | fake mode of the capture; a fresh context per region | 2.9 to 2.15 |
| ``Node.meta["partitioner_tag"]`` | what of a joint graph is backward | 2.9, 2.13 |
| ``_functorch.partitioners.min_cut_rematerialization_partition`` | joint graph → forward, backward | 2.9 to 2.15 |
| ``_functorch.partitioners.functionalize_rng_ops`` | random states of operators that draw alone | 2.13 |
| ``_functorch.config.activation_memory_budget``, ``_functorch.partitioners.choose_saved_values_set`` |
  how much of its saved activations the partitioner keeps; no tuples among them | 2.9, 2.13 |
| ``GraphModule._param_name_to_source``, ``Node._dynamo_source`` | Dynamo's sources of inputs | 2.9, 2.13 |
| ``_dynamo.OptimizedModule`` | refusing modules that are compiled already | 2.9 to 2.15 |
| ``_dynamo.exc`` | Dynamo's errors, to be retold with the user's line | 2.9 to 2.15 |
| ``_dynamo.config.ignore_logging_functions`` | logging in models; another name in 2.9 | 2.9 to 2.15 |
| ``_dynamo.config.allow_rnn`` | tracing ``nn.LSTM`` | 2.9 to 2.15 |
| ``_dynamo.config._make_closure_patcher`` | settings for the time of a call, quickly | 2.9, 2.13 |
| ``_dynamo.config.skip_nnmodule_hook_guards`` | graphs of models with hooks are guarded by them | 2.13 |
| ``_dynamo.eval_frame.skip_code`` | functions of ours that Dynamo compiles only within others | 2.13 |
| ``_dynamo.guards.profile_guard_manager``, ``guards_log`` | guards that nobody times | 2.13 |
| ``_dynamo.utils._get_dynamo_config_for_logging`` | that torch logs its settings with it; fails in 2.11 | 2.9 to 2.15 |
| ``_dynamo.utils.get_debug_dir`` | where reports of failed passes go, with ``TORCH_COMPILE_DEBUG=1`` | 2.9, 2.13 |
| ``_logging.trace_structured`` | stages in ``TORCH_TRACE`` | 2.9, 2.13 |
| ``_inductor.compile_fx.compile_fx_inner`` | Inductor on one region, or on a graph whole | 2.9 to 2.15 |
| ``_inductor.fx_passes.joint_graph.joint_graph_passes`` | Inductor's passes before partitioning | 2.9 to 2.15 |
| ``_inductor.virtualized.V.set_fake_mode`` | the fake mode of the capture, for random numbers in them | 2.9, 2.13 |
| ``_inductor.decomposition.select_decomp_table``, ``_inductor.lowering`` that one of them uses |
  Inductor's decompositions | 2.9 to 2.15 |
| ``_inductor.runtime.cache_dir_utils``, ``_inductor.config`` | the user's cache that ranks share | 2.9, 2.13 |
| ``_inductor.cpu_vec_isa.pick_vec_isa`` | the width of vectors, which that cache's key lacks | 2.9, 2.13 |
| ``fx._lazy_graph_module._use_lazy_graph_module``, ``_make_graph_module`` |
  code of graphs that nobody reads, the partitioner's too, is not written | 2.9, 2.13 |
| ``_subclasses.fake_tensor.FakeTensor(mode, meta, device)``, ``in_kernel_invocation_manager`` |
  fake tensors at a sixth of the price | 2.9 to 2.15 |
| ``_subclasses.fake_tensor.FakeTensorMode.cache_clear`` | forgetting what is gone | 2.9, 2.13 |
| ``ShapeEnv.fake_tensor_cache``, ``tracked_fakes``, ``cache_clear`` of its methods | likewise | 2.13 |
| ``fx.experimental.symbolic_shapes.ShapeEnv`` | graphs of ours that Dynamo has not traced | 2.13 |
| ``fx.experimental.symbolic_shapes.free_symbols`` | symbols in a region's shapes | 2.9 to 2.15 |
| ``fx.experimental.symbolic_shapes.optimization_hint`` | value of a symbolic size; ``hint_int`` in 2.9 | 2.9 to 2.15 |
| ``_guards.CompileContext.current_compile_id`` | which compilation is under way | 2.9, 2.13 |
| ``_dynamo.utils.get_metrics_context``, ``MetricsContext._metrics["recompile_reason"]``, ``guard_failures`` |
  guards of earlier graphs that failed, as ``TORCH_LOGS="recompiles"`` has them | 2.9, 2.13 |
| ``UntypedStorage._cdata`` | whether two fake tensors share memory | 2.9 to 2.15 |
| ``_C._construct_storage_from_data_pointer`` | tensors without memory; results of CUDA graphs | 2.9 to 2.15 |
| ``_C._storage_Use_Count`` | whether results of CUDA graphs are still held | 2.9, 2.13 |
| ``_C._swap_tensor_impl`` | a meta tensor gets memory, and references to it stay valid | 2.9 to 2.13 |
| ``_C._autograd._unsafe_set_version_counter`` | that a parameter's memory is gone, for autograd | 2.13 |
| ``_C._current_graph_task_id``, ``_execution_engine.queue_callback`` | when a backward ends | 2.13 |
| ``_C._will_engine_execute_node``, ``Tensor._backward_hooks``, ``_post_accumulate_grad_hooks``,
  ``RemovableHandle.next_id`` | whether a backward does more with a gradient than to add it to ``grad`` | 2.13 |
| ``_C._set_grad_enabled``, ``_C._log_api_usage_once`` | calls in Dynamo's graphs that compute nothing | 2.9 to 2.15 |
| ``_C.DisableTorchFunctionSubclass`` | operators on guarded placeholders | 2.9 to 2.15 |
| ``_C._cuda_clearCublasWorkspaces`` | capturing CUDA graphs; never run | |
| ``Tensor._make_wrapper_subclass`` | tensors on XLA's devices: as their parts, and without memory | 2.9 |
| ``_ops.HigherOrderOperator`` | which calls have no schema | 2.9 to 2.15 |
| ``_ops.OpOverload``, ``OpOverloadPacket``, ``OpOverload._schema`` | names of an operator's arguments | 2.9 to 2.15 |
| ``_decomp.get_decompositions`` | operators that torch_xla lacks | 2.9 |
| ``_chunk_cat``, ``_foreach_copy_`` | packing gradients, padded; casting a message: one kernel each | 2.9 to 2.15 |
| ``_foreach_add_`` | adding gradients: one call for those of a model | 2.13 |
| ``utils.flop_counter.flop_registry`` | FLOPs of an operator | 2.9 to 2.15 |
| ``utils._pytree`` | casts of inputs and outputs; inputs of any structure | 2.9 to 2.15 |
| ``autograd.profiler._is_profiler_enabled`` | whether a profiler of torch records | 2.9, 2.13 |
| ``distributed_c10d._resolve_process_group`` | group name in a graph → process group | 2.9 to 2.15 |
| ``distributed_c10d._coalescing_manager``, ``_world`` | grouped collectives on CUDA and XPU; never run | 2.9 to 2.15 |
| ``distributed_c10d._get_default_store`` | comparing plan fingerprints | 2.9 to 2.15 |
| ``ProcessGroup._get_backend`` | whether a process group allocates memory, and that memory | 2.13 |
| ``ops.c10d._allgather_base_``, ``_reduce_scatter_base_`` | a collective as modes know it | 2.9, 2.13 |
| ``UntypedStorage._checkpoint_offset`` | where in a file of ``torch.save`` a tensor is | 2.9, 2.13 |
| ``_C.PyTorchFileReader`` | likewise, in a file of ``torch.distributed.checkpoint`` | 2.9, 2.13 |
| ``distributed.checkpoint.utils._create_file_view`` | likewise | 2.9, 2.13 |
| ``testing._internal.distributed.fake_pg.FakeStore`` | a process group of one process, for planning | 2.9 to 2.15 |
| ``distributed.fsdp.wrap._Policy`` | torch's auto-wrap policies | 2.9 to 2.15 |
| ``register_fsdp_forward_method.__code__`` | the methods that it has wrapped | 2.9, 2.13 |
| ``_composable.checkpoint_activation``, its hooks | composable ``checkpoint`` is traced as the ordinary one | 2.13 |
| ``_composable.contract.REGISTRY_KEY`` | what ``fully_shard`` asks a module before it touches it | 2.13 |
| ``DTensor._local_tensor``, ``DTensor._spec`` | a shard without autograd; a DTensor of a shard | 2.9 to 2.15 |
| ``distributed.tensor._utils.compute_local_shape_and_global_offset`` | a rank's part of a DTensor | 2.9, 2.13 |
| ``DeviceMesh._concatenate`` | a mesh of tensor-parallel shards; ``_mesh_resources`` in 2.9 | 2.9, 2.13 |
| ``distributed.tensor.placement_types._StridedShard`` | likewise, both sharded on one dimension | 2.9, 2.13 |
| ``utils._python_dispatch.TorchDispatchMode`` | which tensors an initialisation writes to | 2.9 to 2.13 |
| ``utils._python_dispatch.is_traceable_wrapper_subclass`` | what a tensor extension may make | 2.9 to 2.13 |
| ``utils._python_dispatch._disable_current_modes`` | capture without the user's dispatch modes | 2.9, 2.13 |
| ``utils._python_dispatch._is_in_non_infra_torch_dispatch_mode`` | Dynamo traces under modes | 2.9, 2.13 |
| ``utils._python_dispatch._is_in_any_mode_without_ignore_compile_internals``,
  ``_C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals`` | likewise | 2.13 |
| ``_C._len_torch_dispatch_stack`` and its like | what modes are active, and one below them | 2.9, 2.13 |
| ``nn.modules.module._global_forward_hooks`` and its like | modes' own hooks, which Dynamo refuses | 2.9, 2.13 |
"""

from __future__ import annotations

import torch

_MINIMUM_TORCH = (2, 9)


def release(version: str) -> tuple[int, ...]:
    """Return (2, 9) for "2.9.1+cpu"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def check_torch_version(version: str) -> None:
    """Raise ImportError on a torch that does not have what this package imports."""
    if release(version) < _MINIMUM_TORCH:
        raise ImportError(
            f"graph_fsdp needs torch {'.'.join(map(str, _MINIMUM_TORCH))} or newer, and this is {version}; "
            "pip install --upgrade torch"
        )


check_torch_version(torch.__version__)  # before the imports that an older torch would fail in

# What FSDP2 takes a MixedPrecisionPolicy without reduce_dtype to mean: that gradients are reduced in the dtype of their
# parameters, and before torch 2.15 in param_dtype.
REDUCES_IN_OWN_DTYPE = release(torch.__version__) >= (2, 15)

from torch.distributed.fsdp.wrap import _Policy as _Policy

from graph_fsdp.compat.dispatch_modes import *
from graph_fsdp.compat.distributed import *
from graph_fsdp.compat.dynamo import *
from graph_fsdp.compat.inductor import *
from graph_fsdp.compat.tensors import *
