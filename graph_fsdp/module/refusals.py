"""Calls that a compiled model refuses raise one error each, before anything is changed.

Other libraries' functions are not patched. Each asks the module something first, and is answered here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graph_fsdp.errors import AlreadyShardedError, MetaDeviceError, UnsupportedError


class Refusals:
    """Mixed into the classes of models and units (``module.py``)."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a model compiled by graph_fsdp cannot be deep-copied; copy it before graph_fsdp.compile")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a model compiled by graph_fsdp cannot be pickled (torch.save, copy.copy, an argument of another process): "
            "its class, its graphs and its process groups are this process's; save model.state_dict(), or with "
            "graph_fsdp.checkpoint.save"
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model, but not to the meta device."""
        with contextlib.suppress(TypeError, RuntimeError):  # a wrong call is the model's to refuse
            if torch.empty(0, 0, 0, 0).to(*args, **kwargs).is_meta:
                raise MetaDeviceError(
                    "the model was moved to the meta device, where its shards would lose their values and its graphs "
                    "could not run; make a model for the meta device anew, and delete this one to free its memory"
                )
        return self._model().to(*args, **kwargs)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """DistributedDataParallel asks for it before it communicates."""
        raise AlreadyShardedError(_already("DistributedDataParallel"))

    def share_memory(self) -> Any:
        """As of the model on one process. DTensors have no memory that torch could share."""
        if any(isinstance(p, DTensor) for p in self._model().parameters()):
            raise UnsupportedError(
                "share_memory() is not available on a model whose parameters are DTensors; share "
                "parameter.to_local() of each"
            )
        return self._model().share_memory()

    def _model(self) -> Any:
        """The methods of the model's own classes."""
        itself: Any = self
        return itself._after_fsdp_module()


class Registry(dict[str, Any]):
    """The composable functions of torch that were applied to a module, which each asks before it is applied."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise AlreadyShardedError(_already("fully_shard or replicate"))
        if name == "checkpoint":
            raise UnsupportedError(
                "composable checkpoint() was called on a module of a model that graph_fsdp has compiled, which would "
                "not trace its hooks; call it before graph_fsdp.compile, or pass activation_checkpointing=…"
            )
        return super().__contains__(name)


def _already(by: str) -> str:
    return (
        f"the model was given to {by}, and graph_fsdp.compile has sharded it already and reduces its gradients; use it "
        "as it is"
    )


def saving_whole(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """A model's ``save_pretrained`` that refuses to save shards. It writes files that others read, of whole tensors."""

    @functools.wraps(save_pretrained)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None and any(isinstance(p, DTensor) for p in self.parameters()):
            raise UnsupportedError(
                "save_pretrained() writes whole tensors, and this rank has shards: call it on one rank in a block "
                "that all ranks enter, `with graph_fsdp.unsharded(model):`, or give it a whole state_dict=…"
            )
        return save_pretrained(self, *args, **kwargs)

    return method
