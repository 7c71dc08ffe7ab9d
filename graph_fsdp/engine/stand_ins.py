"""Dynamo traces functions of this file in place of functions of torch that it does not trace."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from graph_fsdp import compat
from graph_fsdp.engine.dynamo import Entered
from graph_fsdp.parameters.placeholder import GuardedPlaceholder, GuardedTensorParallelPlaceholder


@functools.cache
def install() -> None:
    """Have Dynamo trace them so. Calls that are not traced, and models that are not of this package, have torch's."""
    for original, traced in (
        (checkpoint_sequential, _in_segments),
        (compat.detect_is_causal_mask, _is_said_causal),
        (handle_torch_function, of_plain_tensors),
        (compat.all_gather, _all_gather_of_rows),
        *((collective, _of_numbers(collective)) for collective in compat.TRACED_COLLECTIVES),
    ):
        _trace_as(original, traced)
    for let_trace in (compat.inline_compile_regions, compat.trace_methods_of_class_names):
        let_trace(lambda: Entered.engine >= 0)
    compat.trace_momenta_of_data(lambda: Entered.engine >= 0, _batch_norm)


def _trace_as(original: Any, traced: Any) -> None:
    as_ever = _as_ever(original)

    @torch.compiler.substitute_in_graph(original, skip_signature_check=True)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return as_ever(*args, **kwargs) if Entered.engine < 0 else traced(*args, **kwargs)


def _as_ever(original: Any) -> Any:
    """Return a copy of a function, for which nothing stands."""
    name, defaults = original.__name__, original.__defaults__
    return types.FunctionType(original.__code__, original.__globals__, name, defaults)


def _in_segments(
    functions: Any, segments: int, input: Tensor, use_reentrant: bool | None = None, **options: Any
) -> Tensor:
    """Stand for ``checkpoint_sequential``, whose file Dynamo skips."""
    layers = list(functions.children() if isinstance(functions, nn.Sequential) else functions)
    size = len(layers) // segments
    end = size * (segments - 1)
    for begin in range(0, end, size):
        run = functools.partial(_run, layers[begin : begin + size])
        input = checkpoint(run, input, use_reentrant=bool(use_reentrant), **options)
    return _run(layers[end:], input)


def _run(layers: Iterable[Any], input: Tensor) -> Tensor:
    for layer in layers:
        input = layer(input)
    return input


def _is_said_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Stand for the look of ``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` at the values of a mask, which a
    graph does not have. The mask is applied, whether it is causal or not."""
    return is_causal is True


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Stand for ``F.batch_norm`` of a layer with ``momentum=None``, as ``swa_utils.update_bn`` sets: its momentum is
    one divided by a count, which is the data's."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    with torch.no_grad():
        wide = torch.promote_types(input.dtype, torch.float32)
        found = torch.var_mean(input.to(wide), [0, *range(2, input.dim())])
        for running, now in zip((running_var, running_mean), found, strict=True):
            if running is not None:
                factor = torch.full((), momentum, dtype=running.dtype, device=running.device)
                running.lerp_(now.to(running.dtype), factor)
    return F.batch_norm(input, None, None, weight, bias, True, 0.0, eps)


def _of_numbers(collective: Any) -> Any:
    """Stand for a collective, which torch runs while it traces where it has one number that is known then
    (``torch.tensor(x.shape[0])``): a rank that traces alone would wait for the others."""
    as_ever = _as_ever(collective)

    def run_later(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return as_ever(_unknown(tensor), *args, **kwargs)

    return run_later


def _unknown(tensor: Tensor) -> Tensor:
    if compat.statically_known_true(tensor.numel() == 1):  # no guard where the data decides
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)  # no empty_like: known
    return tensor


def _all_gather_of_rows(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand for the collective that ``dist.all_gather`` is in a graph, of numbers as of rows with one element: gloo
    refuses numbers."""
    return _all_gather(_unknown(tensor.view(1) if tensor.dim() == 0 else tensor), *args, **kwargs)


def of_plain_tensors(function: Any, relevant: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    """Stand for the look of Python functions as ``F.rms_norm`` and ``F.pad`` for classes of tensors, where guarded
    placeholders are all that have one. Dynamo finds them again where ``__torch_function__`` has been disabled, and then
    nothing that could be called for them. The functions get views, which are plain tensors."""
    others = [value for value in relevant if not isinstance(value, _GUARDED) and has_torch_function((value,))]
    if others:
        return _torch_functions(function, relevant, *args, **kwargs)
    return function(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})


def _plain(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, _GUARDED) else value


_GUARDED = (GuardedPlaceholder, GuardedTensorParallelPlaceholder)
_torch_functions = _as_ever(handle_torch_function)
_all_gather: Callable[..., Tensor] = _as_ever(compat.all_gather)
