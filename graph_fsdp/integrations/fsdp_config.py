"""Turn an FSDP configuration of Accelerate into arguments of ``graph_fsdp.compile``.

Accelerate keeps an ``fsdp_config`` (of a YAML file, of ``TrainingArguments`` or of a script) in a
``FullyShardedDataParallelPlugin``, of version 1 (FSDP1) or 2 (FSDP2). Each setting is honoured here or refused by name:
``docs/accelerate.md`` has the table.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.parameters.mixed_precision import PrecisionPolicies
from graph_fsdp.passes import default_pipeline
from graph_fsdp.passes.transforms.activation_checkpointing import ActivationCheckpointing

# Strategy of FSDP1 → reshard_after_forward, and the names of the mesh's dimensions: FSDP2's default has one without a
# name, and DTensors of it compute with those of models that fully_shard has. With NO_SHARD nothing is gathered.
_STRATEGIES: dict[str, tuple[bool | None, tuple[str, ...] | None]] = {
    "FULL_SHARD": (True, None),
    "SHARD_GRAD_OP": (False, None),
    "NO_SHARD": (None, ("replicate",)),
    "HYBRID_SHARD": (True, ("replicate", "shard")),  # sharded in each node, replicated over nodes
    "_HYBRID_SHARD_ZERO2": (False, ("replicate", "shard")),
}


def check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse by name what graph_fsdp does not have. Raises UnsupportedError, which says what to set instead."""
    if plugin.state_dict_type == StateDictType.LOCAL_STATE_DICT:
        raise UnsupportedError(
            "fsdp_state_dict_type: LOCAL_STATE_DICT saves flattened parameters, and there are none; set "
            "SHARDED_STATE_DICT (each rank's shards) or FULL_STATE_DICT"
        )
    of_model, of_optimizer = (_gathered(c) for c in (plugin.state_dict_config, plugin.optim_state_dict_config))
    if of_model != of_optimizer:
        raise UnsupportedError(
            f"optim_state_dict_config: offload_to_cpu, rank0_only are {of_optimizer[0]}, {of_optimizer[1]}, and those "
            f"of state_dict_config {of_model[0]}, {of_model[1]}; one save writes both alike: set the same in both"
        )
    if not plugin.limit_all_gathers:
        raise UnsupportedError(
            "limit_all_gathers=False: gathers are scheduled ahead of time, never without limit; leave it out. A "
            "limit in bytes is compile_options={'passes': graph_fsdp.passes.default_pipeline(budget=…)}"
        )
    if getattr(plugin.mixed_precision_policy, "keep_low_precision_grads", False):
        raise UnsupportedError(
            "mixed_precision_policy: keep_low_precision_grads=True leaves gradients in reduce_dtype, and here they get "
            "that of their parameters; leave it out"
        )


def _gathered(config: Any) -> tuple[bool, bool]:
    """Return ``offload_to_cpu`` and ``rank0_only``, which only a configuration of whole tensors has."""
    return bool(getattr(config, "offload_to_cpu", True)), bool(getattr(config, "rank0_only", True))


def whole_tensors(plugin: FullyShardedDataParallelPlugin) -> tuple[bool, bool]:
    """Say whether a whole state dict is on the CPU, and whether on the first rank alone. Both unless a
    ``state_dict_config`` of FULL_STATE_DICT says otherwise."""
    return _gathered(plugin.state_dict_config if plugin.state_dict_type == StateDictType.FULL_STATE_DICT else None)


def set_state_dict_configs(plugin: FullyShardedDataParallelPlugin) -> None:
    """Give the plugin new configurations of the kind of ``state_dict_type``, with which Accelerate saves and loads as
    for FSDP2. Accelerate writes to them, and the script's own may be of the other kind:
    docs/decisions/package_and_libraries.md."""
    on_cpu, first_only = _gathered(plugin.state_dict_config)
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type(plugin.state_dict_type)
    for config in (plugin.state_dict_config, plugin.optim_state_dict_config):
        config.offload_to_cpu = on_cpu
        if hasattr(config, "rank0_only"):
            config.rank0_only = first_only


def compile_arguments(
    plugin: FullyShardedDataParallelPlugin, model: nn.Module, device_type: str, mesh: DeviceMesh | None
) -> dict[str, Any]:
    """Return arguments of :func:`graph_fsdp.compile` for ``model``, by name.

    Args:
        plugin: one that :func:`check_plugin` has accepted.
        device_type: that of the training's devices.
        mesh: the dimensions of Accelerate's ``ParallelismConfig`` that replicate and shard, if it has one.

    Raises:
        ValueError: a class to wrap is not in the model, or ``fsdp_ignored_modules`` matches no module.
    """
    reshard, names = _strategy(plugin)
    if mesh is None and dist.is_initialized():
        mesh = init_device_mesh(device_type, _mesh_shape(names), mesh_dim_names=names)
    offload = bool(getattr(plugin, "activation_checkpointing_offload", False))
    checkpointing = ActivationCheckpointing("unit", offload=offload)
    return {
        "mesh": mesh,
        "auto_wrap_policy": _auto_wrap_policy(plugin, model),
        "reshard_after_forward": reshard,
        "mp_policy": _mp_policy(plugin, model),
        "offload_policy": _offload_policy(plugin),
        "ignored_params": _ignored(plugin.ignored_modules, model),
        "activation_checkpointing": checkpointing if plugin.activation_checkpointing else None,
        "sync_module_states": bool(plugin.sync_module_states or plugin.cpu_ram_efficient_loading) and mesh is not None,
        # FSDP1's plugin makes one of its own where states are synchronised: to_empty, which nothing needs here.
        "param_init_fn": None if plugin.sync_module_states else plugin.param_init_fn,
        "passes": _pipeline(plugin),
    }


def as_fsdp2(plugin: FullyShardedDataParallelPlugin) -> FullyShardedDataParallelPlugin:
    """Return what Accelerate is told of a model that is compiled: it is FSDP2's, and no more is to be done to it. The
    rest is said as version 2 says it, since TRL calls ``fully_shard`` with it on a reference model."""
    found = copy.copy(plugin)
    found.fsdp_version = 2
    found.reshard_after_forward = _strategy(plugin)[0]
    found.cpu_offload = _offload_policy(plugin)
    if isinstance(plugin.mixed_precision_policy, MixedPrecision):
        found.mixed_precision_policy = _of_model(plugin.mixed_precision_policy)
    found.auto_wrap_policy = None
    found.activation_checkpointing = False
    set_state_dict_configs(found)
    return found


def _strategy(plugin: FullyShardedDataParallelPlugin) -> tuple[bool | None, tuple[str, ...] | None]:
    """Return ``reshard_after_forward``, and the names of the mesh's dimensions."""
    strategy = plugin.sharding_strategy.name if plugin.fsdp_version == 1 else None
    return _STRATEGIES[strategy] if strategy else (plugin.reshard_after_forward, None)


def _offload_policy(plugin: FullyShardedDataParallelPlugin) -> OffloadPolicy:
    policy: CPUOffload | OffloadPolicy = plugin.cpu_offload
    if isinstance(policy, CPUOffload):
        return CPUOffloadPolicy() if policy.offload_params else OffloadPolicy()
    return policy


@contextlib.contextmanager
def prepared_dtypes(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> Iterator[None]:
    """Cast what FSDP casts for mixed precision, and undo it after an error: trainable parameters to float32, from which
    ``param_dtype`` is then computed, and to FSDP1's ``buffer_dtype`` the buffers of modules in mixed precision."""
    policy = plugin.mixed_precision_policy
    dtypes: dict[Tensor, torch.dtype] = {}
    if policy is not None:
        dtypes = {p: torch.float32 for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    if (dtype := getattr(policy, "buffer_dtype", None)) is not None:
        kept = {b for m in model.modules() if isinstance(m, _in_full_precision(plugin)) for b in m.buffers()}
        dtypes |= {buffer: dtype for buffer in model.buffers() if buffer.is_floating_point() and buffer not in kept}
    before = [(tensor, tensor.data) for tensor in dtypes]
    for tensor, dtype in dtypes.items():
        tensor.data = tensor.data.to(dtype)
    try:
        yield
    except BaseException:
        for tensor, data in before:
            tensor.data = data
        raise


def _mesh_shape(names: Sequence[str] | None) -> tuple[int, ...]:
    """Return the number of processes; for two dimensions that of nodes, and of the processes of each."""
    world_size = dist.get_world_size()
    if names is None or len(names) == 1:
        return (world_size,)
    # All ranks are told the same number of nodes; the number of processes may differ from node to node.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", world_size // here))
    if nodes < 1 or world_size % nodes:
        raise ValueError(
            f"fsdp_sharding_strategy: HYBRID_SHARD shards in each node, and {nodes} nodes do not divide {world_size} "
            "processes; start as many on each"
        )
    return nodes, world_size // nodes


def _auto_wrap_policy(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> Any:
    policy: Any = plugin.auto_wrap_policy
    function = policy.func if isinstance(policy, functools.partial) else policy
    if function is transformer_auto_wrap_policy:
        names = plugin.transformer_cls_names_to_wrap
        source = "fsdp_transformer_layer_cls_to_wrap"
        if names is None:
            names, source = sorted(getattr(model, "_no_split_modules", None) or ()), "_no_split_modules"
        classes = {type(module).__name__: type(module) for module in model.modules()}
        missing = [name for name in names if name not in classes]
        if missing and (source != "_no_split_modules" or len(missing) == len(names)):
            raise ValueError(f"{source}: the model has no {', '.join(missing)}; it has {', '.join(sorted(classes))}")
        return {classes[name] for name in names if name in classes} or {type(model)}
    if function is size_based_auto_wrap_policy:
        policy = functools.partial(function, min_num_params=plugin.min_num_params) if plugin.min_num_params else None
    return {type(model)} if policy is None else policy  # NO_WRAP: one unit


def _in_full_precision(plugin: FullyShardedDataParallelPlugin) -> tuple[type[nn.Module], ...]:
    """Return the classes whose modules FSDP1 wraps by themselves, without mixed precision, where it wraps modules."""
    policy = plugin.mixed_precision_policy
    wraps = isinstance(policy, MixedPrecision) and plugin.auto_wrap_policy is not None
    return compat.classes_in_full_precision(policy) if wraps else ()


def _mp_policy(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> PrecisionPolicies:
    policy: MixedPrecision | MixedPrecisionPolicy | None = plugin.mixed_precision_policy
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    of_model = _of_model(policy)
    full = MixedPrecisionPolicy(torch.float32, torch.float32, policy.param_dtype, True)
    classes = _in_full_precision(plugin)
    return lambda module: of_model if module is model else full if isinstance(module, classes) else None


def _of_model(policy: MixedPrecision) -> MixedPrecisionPolicy:
    """Return what FSDP2 says for FSDP1's policy. Around a model of FSDP1, Accelerate converts outputs to float32: the
    model's, and not those of its units."""
    cast = policy.cast_forward_inputs or policy.cast_root_forward_inputs
    reduce_dtype = policy.reduce_dtype or policy.param_dtype  # FSDP1 means this by None, and FSDP2 not in every torch
    return MixedPrecisionPolicy(policy.param_dtype, reduce_dtype, torch.float32, cast)


def _ignored(modules: str | Iterable[nn.Module] | None, model: nn.Module) -> list[nn.Module] | None:
    if modules is None:
        return None
    if not isinstance(modules, str):
        return list(modules)
    matched = [module for name, module in model.named_modules() if re.fullmatch(modules, name)]
    if not matched:
        raise ValueError(
            f"fsdp_ignored_modules: {modules!r} matches no module of the model; it is a regular expression"
        )
    return matched


def _pipeline(plugin: FullyShardedDataParallelPlugin) -> Any:
    """Return a pipeline with FSDP1's prefetches; None, the default, for FSDP2, which has none to set. Without
    forward_prefetch FSDP1 starts gathers as the host runs ahead, which here is the time from which on they are
    hidden."""
    if plugin.fsdp_version != 1:
        return None
    prefetch: Any = plugin.backward_prefetch
    return default_pipeline(prefetch=prefetch, forward_prefetch=1 if plugin.forward_prefetch else "auto")
