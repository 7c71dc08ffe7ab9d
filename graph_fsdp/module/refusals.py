"""Calls that a compiled model refuses raise one error each, before anything is changed.

Other libraries' functions are not patched: each asks the module something first, and is answered here. torch's own
hooks look at optimizers' steps, at one parameter of each group; meanwhile lists of DTensors are looked at once
(``compat/dtensor_lists.py``). Behind a step they count it as a write to each shard.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from graph_fsdp import compat
from graph_fsdp.errors import AlreadyShardedError, CheckpointError, MetaDeviceError, UnsupportedError
from graph_fsdp.optimizers.groups import count_writes, parameters_of
from graph_fsdp.parameters.gradient_norm import groups_sharding
from graph_fsdp.parameters.inputs import tensors_of
from graph_fsdp.parameters.own_rows import refuse_rows_of_another_rank

_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Refusals:
    """Adds the methods that refuse to the classes of models and units (``module.py``)."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a model compiled by graph_fsdp cannot be pickled (torch.save, copy.copy, an argument of another process): "
            "its class, its graphs and its process groups are this process's; save model.state_dict(), or with "
            "graph_fsdp.checkpoint.save"
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the model, but not to the meta device."""
        with contextlib.suppress(TypeError, RuntimeError):  # a wrong call is the model's to refuse
            if torch.empty(0, 0, 0, 0).to(*args, **kwargs).is_meta:
                raise MetaDeviceError(
                    "the model was moved to the meta device, where its shards would lose their values and its graphs "
                    "could not run; make a model for the meta device anew, and delete this one to free its memory"
                )
        return self._after_fsdp_module().to(*args, **kwargs)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Refuse DistributedDataParallel, which asks for it before it communicates, and torch.jit, which asks for all
        that a module has."""
        raise already_sharded(
            "DistributedDataParallel",
            ". If it was given to torch.jit: that cannot see the gathers of its shards; give it the model as it was "
            "before graph_fsdp.compile",
        )

    def share_memory(self) -> Any:
        """Share the memory of a model on one process. DTensors have no memory that torch could share."""
        if any(isinstance(p, DTensor) for p in self._after_fsdp_module().parameters()):
            raise UnsupportedError(
                "share_memory() is not available on a model whose parameters are DTensors; share "
                "parameter.to_local() of each"
            )
        return self._after_fsdp_module().share_memory()

    def _after_fsdp_module(self) -> Any:
        """Return the methods of the model's own classes, which come after FSDPModule."""
        return super(FSDPModule, self)


class NoState:
    """Stands for FSDP2's state of a module. ``share_comm_ctx`` asks it for streams, of which there are none to share:
    collectives run on those of their process groups, whichever model starts them."""

    _comm_ctx = None
    _fsdp_param_group = None  # of torch 2.11
    _fsdp_param_groups = ()


class Registry(dict[str, Any]):
    """Lists torch's composable functions applied to a module, each of which asks here before it is applied.
    ``has_shards``: whether the module itself has parameters that were sharded."""

    has_shards = False

    def __contains__(self, name: object) -> bool:
        if name == "replicate" and (method := _method_of_fsdp1()):
            raise UnsupportedError(
                f"FSDP.{method} was given a model that graph_fsdp has compiled, of which FSDP1 knows nothing; use "
                f"{_INSTEAD[method]}"
            )
        if name == "fully_shard":
            raise already_sharded("fully_shard or replicate")
        if name == "checkpoint":
            raise UnsupportedError(
                "composable checkpoint() was called on a module of a model that graph_fsdp has compiled, which would "
                "not trace its hooks; call it before graph_fsdp.compile, or pass activation_checkpointing=…"
            )
        return super().__contains__(name)


_GET, _SET = "get_optimizer_state_dict", "set_optimizer_state_dict"
_WHOLE = "of torch.distributed.checkpoint.state_dict; whole tensors with StateDictOptions(full_state_dict=True)"
_INSTEAD = {
    "set_state_dict_type": "model.state_dict(), which has this rank's shards as DTensors, or get_model_state_dict "
    + _WHOLE,
    "summon_full_params": "graph_fsdp.unsharded(model)",
    **dict.fromkeys(("optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict"), f"{_GET} {_WHOLE}"),
    **dict.fromkeys(("optim_state_dict_to_load", "shard_full_optim_state_dict"), f"{_SET} {_WHOLE}"),
}


def _method_of_fsdp1() -> str:
    """Return the method of FSDP1's class that asks for a module's registry, on the way through a model; "" where none
    does. Of a model without FSDP1 most of them fail behind that, or do nothing."""
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if (method := _methods_of_fsdp1().get(frame.f_code)) is not None:
            return method
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


_MOST_FRAMES = 6  # between such a method and a registry


@functools.cache
def _methods_of_fsdp1() -> dict[CodeType, str]:
    methods = {name: getattr(FullyShardedDataParallel, name, None) for name in _INSTEAD}
    return {inspect.unwrap(method).__code__: name for name, method in methods.items() if method is not None}


def refuse_transforms(*given: Any) -> None:
    """Refuse a call of the model, with ``given``, under what would transform its operators, of which its graphs show
    none."""
    if compat.transform_stack() is not None:
        raise UnsupportedError(
            "a model compiled by graph_fsdp was called under a transform of torch.func (vmap, grad, jvp, jacrev, …), "
            "which cannot see into its graphs; call the transform in the model's forward, which is traced with it"
        )
    if compat.differentiates_forward() and any(
        forward_ad.unpack_dual(t).tangent is not None for t in tensors_of(given)
    ):
        raise UnsupportedError(
            "a model compiled by graph_fsdp was given a tensor with a tangent (torch.autograd.forward_ad.make_dual), "
            "which its graphs would drop; call torch.func.jvp in the model's forward, which is traced with it"
        )
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            "torch.export was given a model that graph_fsdp has compiled, whose parameters are shards; export the "
            "model as it was before graph_fsdp.compile, with the values that graph_fsdp.checkpoint saves"
        )


def already_sharded(by: str, more: str = "") -> AlreadyShardedError:
    return AlreadyShardedError(
        f"the model was given to {by}, and graph_fsdp.compile has sharded it already and reduces its gradients; use it "
        f"as it is{more}"
    )


def saving_whole(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's ``save_pretrained`` that refuses to save shards: others read its files as whole tensors."""

    @functools.wraps(save_pretrained)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None and any(isinstance(p, DTensor) for p in self.parameters()):
            raise UnsupportedError(
                "save_pretrained() writes whole tensors, and this rank has shards: call it on one rank in a block "
                "that all ranks enter, `with graph_fsdp.unsharded(model):`, or give it a whole state_dict=…"
            )
        return save_pretrained(self, *args, **kwargs)

    return method


@functools.cache
def watch_steps() -> None:
    """Look at the steps of all optimizers of this process from now on, and have ranks agree where these are skipped."""
    compat.unscale_on_all_meshes(groups_sharding)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not isinstance(optimizer, Optimizer):
        return
    for group in optimizer.param_groups:
        for p in group["params"][:1]:
            _check_state(p, optimizer.state.get(p, {}))
    if optimizer not in _told:
        _told.add(optimizer)
        _warn_of_placeholders(optimizer)
    compat.begin_equal_places()


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not isinstance(optimizer, Optimizer):
        return
    compat.end_equal_places()  # where a step has raised, after the next one
    if "_graph_fsdp_stepper" not in vars(optimizer):  # else its step has counted, before it gathered ahead
        count_writes(parameters_of(optimizer))


def _check_state(p: Tensor, state: Any) -> None:
    if not isinstance(p, DTensor) or not p.dim() or p.device_mesh.size() == 1:
        return
    for name, value in state.items():
        if isinstance(value, DTensor):
            refuse_rows_of_another_rank(f"the optimizer's state {name!r}", value, p)
        elif isinstance(value, Tensor) and value.shape == p.shape:
            raise CheckpointError(
                f"the optimizer's state {name!r} of a parameter of shape {tuple(p.shape)} is a whole tensor, and the "
                "parameter is sharded: optimizer.load_state_dict was given a state of whole tensors, which "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict loads with "
                "StateDictOptions(full_state_dict=True); or the optimizer has made one, and cannot step shards"
            )


def _warn_of_placeholders(optimizer: Optimizer) -> None:
    """Warn, once per optimizer, if it was made of the parameters before they were sharded, or while they were whole."""
    parameters = parameters_of(optimizer)
    gone = [vars(p)["_graph_fsdp"][0] for p in parameters if "_graph_fsdp" in vars(p)]
    whole = [vars(p)["_graph_fsdp_whole"] for p in parameters if "_graph_fsdp_whole" in vars(p) and p.grad is None]
    if gone:
        warnings.warn(
            f"{type(optimizer).__name__} was made before graph_fsdp.compile and holds {len(gone)} parameters that the "
            f"model no longer has ({gone[0]!r} first): its steps do not change the model; make it of "
            "model.parameters() after compile",
            stacklevel=4,
        )
    if whole:
        warnings.warn(
            f"{type(optimizer).__name__} was made of a model that was unsharded and holds {len(whole)} whole "
            f"parameters ({whole[0]!r} first), which get no gradients: its steps do not change the model; make it of "
            "model.parameters() after reshard()",
            stacklevel=4,
        )
