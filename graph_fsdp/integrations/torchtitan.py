"""``parallelize`` shards torchtitan's decoders (llama3, deepseek_v3, …) in its trainer, in place of their function.

    spec = dataclasses.replace(config.model_spec, parallelize_fn=graph_fsdp.integrations.torchtitan.parallelize)

``pipelined`` makes the stages of its pipelines compiled ones. Written for torchtitan 0.3, which this does not import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes.transforms.activation_checkpointing import Recompute

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> Model:
    """Compile a decoder of torchtitan, with the arguments and in the place of its ``ModelSpec.parallelize_fn``.

    The trainer initialises the model afterwards: values are zeros here. Of the options:

    - Tensor and expert parallelism are torchtitan's (``model.parallelize``); experts are sharded over ``efsdp``, the
      rest over ``fsdp``, both beside ``dp_replicate``.
    - ``compile_config``: its backend; Inductor where ``"model"`` is not compiled.
    - ``ac_config``: "full" recomputes each unit, "selective" all but the operators of its ``get_save_ops`` (no matrix
      product, where torchtitan recomputes every second one), "memory-budget" is the partitioner's.
    - Gradients are summed over ranks and not divided: torchtitan's loss has the number of all tokens.

    Raises:
        UnsupportedError: ``spmd_backend`` other than "partial_dtensor", context parallelism, symmetric memory.
    """
    _refuse(parallel_dims, parallelism)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        decoder: Any = model
        decoder.parallelize(parallel_dims)
    replicas = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    mesh = parallel_dims.get_mesh([*replicas, "fsdp"])
    experts = {}
    if parallel_dims.ep_enabled:
        names = [name for name, _ in model.named_modules() if name.endswith("routed_experts.inner_experts")]
        own = parallel_dims.get_mesh([*replicas, "efsdp"])
        experts = dict.fromkeys(map(model.get_submodule, names), own)
    reshard = {"always": True, "never": False, **({"default": False} if parallel_dims.pp_enabled else {})}
    compiled = compile_config.enable and "model" in compile_config.components
    graph_fsdp.compile(
        model,
        mesh,
        meshes=experts or None,
        auto_wrap_policy=_units(model),
        reshard_after_forward=reshard.get(parallelism.fsdp_reshard_after_forward),
        mp_policy=MixedPrecisionPolicy(
            getattr(torch, training.mixed_precision_param),
            getattr(torch, training.mixed_precision_reduce),
            cast_forward_inputs=False,
        ),
        offload_policy=CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy(),
        activation_checkpointing=_recompute(ac_config, dump_folder),
        param_init_fn=_zeros,
        backend=compile_config.backend if compiled else "inductor",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model


def pipelined(pipelining_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for a ``ModelSpec.pipelining_fn`` that does as torchtitan's own, which is given, and makes its
    stages, which ``parallelize`` has compiled, such as gather and reduce once in a step:
    :class:`graph_fsdp.integrations.pipelining.PipelineStage`."""

    @functools.wraps(pipelining_fn)
    def pipeline(*args: Any, **kwargs: Any) -> Any:
        from graph_fsdp.integrations.pipelining import PipelineStage  # takes a second to import, and few need it

        schedule, *rest = pipelining_fn(*args, **kwargs)
        for stage in compat.stages_of_schedule(schedule):
            PipelineStage.of(stage)
        return schedule, *rest

    return pipeline


def _refuse(parallel_dims: Any, parallelism: Any) -> None:
    refused = {
        f"spmd_backend={parallelism.spmd_backend!r}": parallelism.spmd_backend != "partial_dtensor",
        "context_parallel_degree above 1": parallel_dims.cp_enabled,
        "enable_fsdp_symm_mem": parallelism.enable_fsdp_symm_mem,
    }
    for option, asked in refused.items():
        if asked:
            raise UnsupportedError(
                f"parallelism.{option}: graph_fsdp.integrations.torchtitan has no such path; set "
                "spmd_backend='partial_dtensor', without context parallelism and symmetric memory, or take "
                "torchtitan's own parallelize function"
            )


def _units(decoder: Any) -> list[Any]:
    """Return the units that torchtitan's own function makes, of those modules that a stage of a pipeline has. Its
    chunked loss calls ``lm_head`` by itself."""
    first, last = (decoder.tok_embeddings,), (decoder.norm, decoder.lm_head)
    ends = [(*first, *last)] if decoder.enable_weight_tying else [first, last]
    there = [tuple(module for module in unit if module is not None) for unit in ends]
    return [*filter(None, there), *decoder.layers.values()]


def _recompute(config: Any, dump_folder: str) -> Recompute:
    if config is None:
        return None
    if hasattr(config, "memory_budget"):
        budget: float = config.memory_budget
        return budget
    policy = config.build(dump_folder=dump_folder)
    return tuple(policy.get_save_ops()) if hasattr(policy, "get_save_ops") else "unit"


@torch.no_grad()
def _zeros(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.zero_()
