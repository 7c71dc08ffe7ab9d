"""Tensors around plain ones, whose subclasses say what is gathered of them: FSDP2's tensor extensions."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

aten = torch.ops.aten
_KEEP = {
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.split.Tensor,
    aten.clone.default,
    aten.detach.default,
}


class Wrapped(torch.Tensor):
    """A tensor around a plain one, of the same values."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device, requires_grad=data.requires_grad
        )

    def __init__(self, data: Tensor) -> None:
        self._data = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapped, lambda t: t._data, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, cls, out) if func in _KEEP else out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Wrapped:
        return cls(inner["_data"])

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        full = self.restore(outputs, metadata, param_dtype)
        if out is None:
            return full, (full,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(full)
        return None

    def restore(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError
