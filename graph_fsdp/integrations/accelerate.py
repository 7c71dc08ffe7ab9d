"""Train with Hugging Face Accelerate: this ``Accelerator`` takes the place of Accelerate's.

::

    from graph_fsdp.integrations.accelerate import Accelerator   # instead of: from accelerate import Accelerator

[Note: the seam]
Accelerate leaves an ``FSDPModule`` as it is, and treats it as FSDP2's in ``accumulate``, ``clip_grad_norm_``,
``save_state``, ``load_state`` and ``get_state_dict``. So ``prepare`` compiles the model first, gives the optimizer the
shards, and calls Accelerate's ``prepare``. That finds an optimizer's parameters by their addresses, and shards without
rows have none; so the optimizer is given its own again afterwards. Nothing of Accelerate is patched.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.integrations.fsdp_config import (
    as_fsdp2,
    check_plugin,
    compile_arguments,
    prepared_dtypes,
    whole_tensors,
)
from graph_fsdp.optimizers.groups import parameters_of
from graph_fsdp.parameters.placements import part_of_rank

_NUMBERS = (int, float, str, type(None))
_BACKENDS = {"NO": None, "INDUCTOR": "inductor", "EAGER": "eager"}


class Accelerator(accelerate.Accelerator):
    """Prepares models with ``graph_fsdp.compile``, and is Accelerate's ``Accelerator`` otherwise.

    The FSDP configuration, of version 1 or 2, is what Accelerate finds: ``fsdp_plugin``, or what ``accelerate launch``
    has read from its YAML file. It works on the CPU too, where Accelerate itself ignores it.

    Args:
        compile_options: arguments of ``graph_fsdp.compile`` that the configuration does not have (``backend``,
            ``passes``, ``fullgraph`` and so on), or that replace what it says.
        args, kwargs: those of ``accelerate.Accelerator``.

    Raises:
        UnsupportedError: names a setting that graph_fsdp does not have.
    """

    def __init__(self, *args: Any, compile_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        given = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **kwargs).arguments
        plugin = given.get("fsdp_plugin")
        if plugin is not None:
            check_plugin(plugin)
        super().__init__(*args, **kwargs)
        adopt(self, plugin, compile_options)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Do what Accelerate's ``prepare`` does. A model that comes with its optimizer is compiled in place; the
        optimizer, which may have been made before, gets the shards.

        Raises:
            ValueError: there are several models; a model comes without its optimizer; an optimizer has a state that
                cannot be sharded with the parameters, or, of several processes, parameters that are not the model's.
            All that ``graph_fsdp.compile`` raises. Nothing is changed then.
        """
        models = [item for item in args if isinstance(item, nn.Module) and not isinstance(item, FSDPModule)]
        if not models:
            return self._prepare_compiled(args, device_placement)
        if len(models) > 1:
            raise ValueError("prepare: one model with its optimizer at a time, got several models; call it for each")
        optimizers = _plain_optimizers(args)
        if not optimizers:
            raise ValueError("prepare: the model must come together with its optimizer, which is given the shards")
        self._compile(models[0], optimizers)
        return self._prepare_compiled(args, device_placement)

    def _compile(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Compile a model in place, and give the optimizers that were made for it its shards."""
        names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
        others = [p for optimizer in optimizers for p in parameters_of(optimizer) if p not in names]
        if others and self.distributed_type == DistributedType.FSDP:  # of one process, Accelerate leaves them alone
            raise ValueError(
                f"prepare: the optimizer has {len(others)} parameters that are not the model's, such as a loss's (the "
                f"first has shape {tuple(others[0].shape)}); compute with them in the model's forward, as parameters "
                "of the model, or give them an optimizer of their own, which sees to their gradients on all ranks"
            )
        dimensions = None if self.parallelism_config is None else tuple(self.parallelism_config.fsdp_dim_names)
        mesh = None if dimensions is None else self.torch_device_mesh[dimensions]
        arguments = compile_arguments(self._fsdp_configuration, model, self.device.type, mesh)
        arguments.update(self._compile_options)
        for optimizer in optimizers:
            _check_state(optimizer, names, of_first_rank=bool(arguments.get("sync_module_states")))
        mesh = arguments.pop("mesh")
        if mesh is None:
            model.to(self.device)
        with prepared_dtypes(self._fsdp_configuration, model):
            graph_fsdp.compile(model, mesh, **arguments)
        shards = dict(model.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [shards[names[p]] if p in names else p for p in group["params"]]
            for p in [p for p in optimizer.state if p in names]:  # Adagrad's is there from the beginning
                shard, state = shards[names[p]], optimizer.state.pop(p)
                optimizer.state[shard] = {key: _sharded(key, value, shard) for key, value in state.items()}

    def prepare_for_evaluation(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        """Compile a model in place that is evaluated before it is trained, or never trained; and return it.
        ``optimizer``: one that was made for it already, which gets the shards. ``prepare`` takes both afterwards.

        Raises:
            All that ``prepare`` raises of one model.
        """
        if not isinstance(model, FSDPModule):
            self._compile(model, _plain_optimizers([optimizer]))
        prepared: nn.Module = self.prepare_model(model, evaluation_mode=True)
        return prepared

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return what Accelerate's does: whole tensors on the CPU, on the first rank alone. With FULL_STATE_DICT,
        ``offload_to_cpu`` and ``rank0_only`` of ``state_dict_config`` say where. All ranks call it."""
        on_cpu, first_only = whole_tensors(self._fsdp_configuration)
        if (on_cpu, first_only) == (True, True) or not isinstance(model, FSDPModule):
            found: dict[str, Any] = super().get_state_dict(model, unwrap)
            return found
        state = {}
        for name, value in model.state_dict().items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if self.is_main_process or not first_only:
                state[name] = value.cpu() if on_cpu and isinstance(value, torch.Tensor) else value
        return state

    def _prepare_compiled(self, args: tuple[Any, ...], device_placement: list[bool] | None) -> Any:
        before = [(o, [list(group["params"]) for group in o.param_groups]) for o in _plain_optimizers(args)]
        prepared = super().prepare(*args, device_placement=device_placement)
        for optimizer, groups in before:  # [Note: the seam]; these are other groups, as their state was loaded
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
        return prepared


def _check_state(optimizer: torch.optim.Optimizer, names: Mapping[Any, str], of_first_rank: bool) -> None:
    """Raise ValueError where a state of the model's parameters is not made of tensors like them, and of numbers; or on
    all ranks where the first one has the values, which others may have on the meta device."""
    for p, state in optimizer.state.items():
        for key, value in state.items() if p in names else ():
            is_plain, why = type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta, None
            if of_first_rank and isinstance(value, torch.Tensor):
                why = "the first process alone has the parameters' values (sync_module_states)"
            elif not (value.shape == p.shape or value.numel() == 1 if is_plain else isinstance(value, _NUMBERS)):
                why = "it is no plain tensor with a number for each of the parameter's"
            if why is not None:
                raise ValueError(
                    f"prepare: {type(optimizer).__name__} has a state {key!r} of parameter {names[p]!r} that cannot be "
                    f"sharded with it: {why}; give prepare an optimizer without a state, and call load_state afterwards"
                )


def _sharded(key: str, value: Any, shard: nn.Parameter) -> Any:
    """Return what this rank has of a state of a parameter that has been sharded."""
    is_like = isinstance(value, torch.Tensor) and value.shape == shard.shape and (value.dim() > 0 or key != "step")
    if not (is_like and isinstance(shard, DTensor)):
        return value
    return compat.make_dtensor(part_of_rank(shard, value).to(shard.to_local().device, copy=True).contiguous(), shard)


def adopt(
    accelerator: accelerate.Accelerator,
    plugin: FullyShardedDataParallelPlugin | None = None,
    compile_options: Mapping[str, Any] | None = None,
) -> None:
    """Turn an ``accelerate.Accelerator`` that has prepared nothing yet into this module's, in place.

    Args:
        plugin: the FSDP configuration; None for the accelerator's own, or that of the environment, which ``accelerate
            launch`` has set.

    Raises:
        UnsupportedError: names a setting that graph_fsdp does not have.
    """
    state = accelerator.state
    plugin = plugin or getattr(state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
    check_plugin(plugin)
    backend = _dynamo_backend(accelerator)
    parallelism = accelerator.parallelism_config
    if parallelism is not None and (parallelism.tp_enabled or parallelism.cp_enabled or parallelism.sp_enabled):
        raise UnsupportedError(
            "parallelism_config: only dp_replicate_size and dp_shard_size; make a model tensor parallel with "
            "parallelize_module and call graph_fsdp.compile on it before prepare"
        )
    if accelerator.mixed_precision == "fp8":
        raise UnsupportedError(
            "mixed_precision: fp8; convert the model with torchao's convert_to_float8_training and use bf16"
        )
    configuration = copy.copy(plugin)
    if accelerator.mixed_precision != "no":
        configuration.set_mixed_precision(accelerator.mixed_precision)
    if state.distributed_type != DistributedType.NO:
        # Each new AcceleratorState starts from the PartialState.
        state.distributed_type = accelerate.PartialState().distributed_type = DistributedType.FSDP
        state.fsdp_plugin = as_fsdp2(configuration)
    if accelerator.scaler is not None:  # FSDP1's is of flattened parameters
        options = accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler is not None else {}
        accelerator.scaler = GradScaler(device=accelerator.device.type, **options)
    accelerator.__class__ = Accelerator
    accelerator._fsdp_configuration = configuration
    accelerator._compile_options = {**({} if backend is None else {"backend": backend}), **(compile_options or {})}


def _dynamo_backend(accelerator: accelerate.Accelerator) -> str | None:
    """Return the backend that a configuration of ``torch.compile`` asks for, and have Accelerate leave that alone."""
    dynamo = accelerator.state.dynamo_plugin
    name = str(getattr(dynamo.backend, "value", dynamo.backend)).upper()
    if name not in _BACKENDS:
        raise UnsupportedError(f"dynamo_backend: {name}; graph_fsdp compiles with inductor or eager")
    if name != "NO":
        dynamo.backend = type(dynamo.backend)("NO")
    return _BACKENDS[name]


def _plain_optimizers(items: Iterable[Any]) -> list[torch.optim.Optimizer]:
    found = [item for item in items if isinstance(item, torch.optim.Optimizer)]
    return [item.optimizer if isinstance(item, AcceleratedOptimizer) else item for item in found]
