"""A hook of torch checks compiled models before each step of every optimizer.

It looks at one parameter of each group, so that its price does not grow with the model.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from graph_fsdp.errors import CheckpointError

_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@functools.cache
def watch_steps() -> None:
    """From now on, in this process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not isinstance(optimizer, Optimizer):
        return
    for group in optimizer.param_groups:
        for p in group["params"][:1]:
            _check_state(p, optimizer.state.get(p, {}))
    if optimizer not in _told:
        _told.add(optimizer)
        _warn_of_placeholders(optimizer)


def _check_state(p: Tensor, state: Any) -> None:
    if not isinstance(p, DTensor) or not p.dim() or p.device_mesh.size() == 1:
        return
    for name, value in state.items():
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == p.shape:
            raise CheckpointError(
                f"the optimizer's state {name!r} of a parameter of shape {tuple(p.shape)} is a whole tensor, and the "
                "parameter is sharded: optimizer.load_state_dict was given a state of whole tensors; load it with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict and "
                "StateDictOptions(full_state_dict=True)"
            )


def _warn_of_placeholders(optimizer: Optimizer) -> None:
    """Once per optimizer: it was made of what the model's parameters were before they were sharded."""
    names = [
        vars(p)["_graph_fsdp"][0]
        for group in optimizer.param_groups
        for p in group["params"]
        if "_graph_fsdp" in vars(p)
    ]
    if names:
        warnings.warn(
            f"{type(optimizer).__name__} was made before graph_fsdp.compile and holds {len(names)} parameters that the "
            f"model no longer has ({names[0]!r} first): its steps do not change the model; make it of "
            "model.parameters() after compile",
            stacklevel=4,
        )
