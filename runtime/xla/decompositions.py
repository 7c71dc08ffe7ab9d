"""Operators whose lowering in torch_xla is missing, or other than PyTorch's on CPU and CUDA, are made of others.

| operator | in torch_xla 2.9 |
|---|---|
| ``native_batch_norm`` and its kind | the running variance is biased |
| ``elu_backward`` | wrong for negative inputs |
| ``copy``, which a trace has for ``copy_`` | writes to its input, which may be saved as it was |
| ``fill`` with a tensor, as for ``x[0] = 3`` of what is made on the host | asks the host for its value |
| ``as_strided_scatter`` | takes strides for an order of dimensions |
| ``amax`` and other reductions over no dimension | reduce none; PyTorch's are over all |
| ``slice`` | an error where it begins in front of the first element, as ``x[-9:]`` of fewer may |
| ``norm`` | wrong where its order is infinite |
| ``_adaptive_avg_pool2d`` and its kind | missing where a window is longer than another |
| ``adaptive_max_pool2d`` and its kind | missing; where windows are of one length, these are ``max_pool2d``'s |
| ``diagonal`` and its kind | wrong of other dimensions than the last two, or an error |
| others | missing, with some arguments at least, or with a gradient that is |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.passes.analysis.kernels import packets

aten = torch.ops.aten


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return operator → decomposition, for AOTAutograd."""
    reductions = {operator: _over_all_dimensions(operator) for operator in _REDUCTIONS}
    ours: dict[Any, Callable[..., Any]] = {
        aten.copy.default: _copy,
        aten.fill.Tensor: _copy,
        aten.as_strided_scatter.default: _as_strided_scatter,
        aten.slice.Tensor: _slice,
        aten.slice_backward.default: _slice_backward,
        aten.slice_scatter.default: _slice_scatter,
        aten.diagonal.default: _diagonal,
        aten.diagonal_scatter.default: _diagonal_scatter,
    }
    return {**compat.get_decompositions(list(_BY_TORCH)), **reductions, **ours, **_pools()}


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return what ``x.copy_(source)`` leaves in ``x``, or ``x.fill_(source)``."""
    return source.to(x.device, x.dtype).expand(x.shape).clone()


def _as_strided_scatter(x: Tensor, source: Tensor, *view: Any, **offset: Any) -> Any:
    if not x.is_contiguous():
        return NotImplemented  # it stays as it is
    places = torch.arange(x.numel(), device=x.device).as_strided(*view, **offset)
    return x.reshape(-1).index_put((places.reshape(-1),), source.reshape(-1)).view(x.shape)


def _slice(x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    before = isinstance(start, int) and start < -x.shape[dim]
    return aten.slice.Tensor(x, dim, 0, end, step) if before else NotImplemented


def _slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    return aten.slice_backward(grad, sizes, dim, 0, end, step) if start < -sizes[dim] else NotImplemented


def _slice_scatter(x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    before = isinstance(start, int) and start < -x.shape[dim]
    return aten.slice_scatter(x, source, dim, 0, end, step) if before else NotImplemented


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    order = _with_last(x, dim1, dim2)
    return NotImplemented if order == sorted(order) else x.permute(order).diagonal(offset, -2, -1)


def _diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    order = _with_last(x, dim1, dim2)
    if order == sorted(order):
        return NotImplemented
    back = [order.index(dim) for dim in range(x.dim())]
    return x.permute(order).diagonal_scatter(source, offset, -2, -1).permute(back)


def _with_last(x: Tensor, *last: int) -> list[int]:
    """Return the dimensions of ``x``, with these at the end."""
    last = tuple(dim % x.dim() for dim in last)
    return [*(dim for dim in range(x.dim()) if dim not in last), *last]


def _pools() -> dict[Any, Callable[..., Any]]:
    def means(x: Tensor, sizes: Sequence[int]) -> Any:
        if _windows(x, sizes):
            return NotImplemented
        for dim, size in enumerate(sizes, -len(sizes)):
            x = torch.stack([x.narrow(dim, *place).mean(dim) for place in _places(x.shape[dim], size)], dim)
        return x

    def gradient_of_means(grad: Tensor, x: Tensor, *, dims: int) -> Any:
        if _windows(x, grad.shape[-dims:]):
            return NotImplemented
        for dim in range(-dims, 0):
            length, parts = x.shape[dim], []
            for part, (begin, window) in zip(grad.split(1, dim), _places(length, grad.shape[dim]), strict=True):
                around = [0, 0] * (-dim - 1) + [begin, length - begin - window]
                parts.append(F.pad((part / window).repeat_interleave(window, dim), around))
            grad = torch.stack(parts).sum(0)
        return grad

    def largest(x: Tensor, sizes: Sequence[int], *, pool: Callable[..., Any]) -> Any:
        windows = _windows(x, sizes)
        return pool(x, windows, windows) if windows else NotImplemented

    def gradient_of_largest(grad: Tensor, x: Tensor, indices: Tensor, *, dims: int, pool: Callable[..., Any]) -> Any:
        windows, same = _windows(x, grad.shape[-dims:]), [1] * dims
        return pool(grad, x, windows, windows, [0] * dims, same, False, indices) if windows else NotImplemented

    return {
        aten._adaptive_avg_pool2d.default: means,
        aten._adaptive_avg_pool3d.default: means,
        aten._adaptive_avg_pool2d_backward.default: partial(gradient_of_means, dims=2),
        aten._adaptive_avg_pool3d_backward.default: partial(gradient_of_means, dims=3),
        aten.adaptive_max_pool2d.default: partial(largest, pool=aten.max_pool2d_with_indices),
        aten.adaptive_max_pool3d.default: partial(largest, pool=aten.max_pool3d_with_indices),
        aten.adaptive_max_pool2d_backward.default: partial(
            gradient_of_largest, dims=2, pool=aten.max_pool2d_with_indices_backward
        ),
        aten.adaptive_max_pool3d_backward.default: partial(
            gradient_of_largest, dims=3, pool=aten.max_pool3d_with_indices_backward
        ),
    }


def _windows(x: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the lengths of an adaptive pool's windows; none where one is longer than another in its dimension."""
    lengths = x.shape[-len(sizes) :]
    even = all(length % size == 0 for length, size in zip(lengths, sizes, strict=True))
    return [length // size for length, size in zip(lengths, sizes, strict=True)] if even else []


def _places(length: int, count: int) -> list[tuple[int, int]]:
    """Return where each of an adaptive pool's windows in a dimension begins, and its length."""
    begins = [number * length // count for number in range(count)]
    return [(begin, -(-(number + 1) * length // count) - begin) for number, begin in enumerate(begins)]


def _over_all_dimensions(operator: compat.OpOverload[..., Any]) -> Callable[..., Any]:
    def reduced(x: Tensor, dim: Sequence[int] | None = (), *args: Any, **kwargs: Any) -> Any:
        if dim is None or len(dim) or not x.dim():
            return NotImplemented
        return operator(x, list(range(x.dim())), *args, **kwargs)

    return reduced


_REDUCTIONS = (
    *(aten.amax.default, aten.amin.default, aten.sum.dim_IntList, aten.mean.dim),
    *(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction),
)
_BY_TORCH = packets(
    aten,
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm"
    " _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training"
    " native_batch_norm_backward _batch_norm_with_update _batch_norm_with_update_functional _batch_norm_no_update"
    " batch_norm_backward native_dropout native_dropout_backward gelu_backward elu_backward norm linalg_vector_norm"
    " embedding_dense_backward nansum count_nonzero addmv channel_shuffle col2im gcd glu_backward huber_loss"
    " huber_loss_backward im2col isneginf isposinf lcm linalg_cross logaddexp logit_backward renorm sinc"
    " special_xlog1py vdot diagonal_backward",
)
