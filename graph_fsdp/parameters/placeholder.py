"""Guarded placeholders are gathered, or raise an error, when code outside of compiled code reads them.

A kernel that reads a placeholder would read address zero. Two kinds of code may try: with ``fullgraph=False``, what
Dynamo leaves to Python in a forward, for which the parameter is gathered (``python_reads.py``); and, at any time, code
that kept a reference from before ``graph_fsdp.compile``. So placeholders are a Parameter subclass whose
``__torch_function__`` lets Dynamo trace it like a plain tensor, answers questions on shape and type, and for all else
gets it memory or refuses. With ``fullgraph=True`` they are plain while the forward runs, which saves Dynamo from
tracing that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.errors import EmptyPlaceholderError
from graph_fsdp.passes.ir.fake_values import iterate_tensors

if TYPE_CHECKING:
    from graph_fsdp.parameters.shards import Storage

NOT_OF_USERS = (os.path.dirname(torch.__file__), os.path.dirname(graph_fsdp.__file__))  # their files begin with one

# These read no memory and return no tensor.
_METADATA = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in (
            "shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_leaf", "is_cuda", "is_cpu", "is_xpu",
            "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "grad", "grad_fn",
            "output_nr", "_version",
        )),
        torch.Tensor.size, torch.Tensor.stride, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.element_size,
        torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_contiguous, torch.Tensor.nelement,
        torch.Tensor.storage_offset, torch.Tensor.__len__, torch.Tensor.__hash__, torch.Tensor.get_device,
        torch.is_floating_point, torch.is_complex, torch.numel,
    }
)  # fmt: skip


def _torch_function(
    cls: type, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Guard placeholders, as their ``__torch_function__``."""
    if compat.is_tracing() or func in _METADATA:
        with compat.without_torch_function():
            return func(*args, **(kwargs or {}))
    return _read(func, args, kwargs or {})


class GuardedPlaceholder(nn.Parameter):
    """A placeholder is a full-shape parameter without memory."""

    _graph_fsdp: tuple[str, Storage]  # its name, and where it is a parameter
    __torch_function__: Any = classmethod(_torch_function)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Guard the method, of which torch tells no ``__torch_function__``. To set it to itself, as torch's
        ``register_parametrization`` does, writes nothing, though torch counts it."""
        if args and args[0] is self:
            return self
        return _torch_function(type(self), torch.Tensor.set_, (), (self, *args), kwargs)


class GuardedTensorParallelPlaceholder(DTensor):
    """This placeholder is a tensor-parallel parameter without memory."""

    _graph_fsdp: tuple[str, Storage]
    __torch_function__: Any = classmethod(_torch_function)


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of DTensor that reads its part, and of which torch tells no ``__torch_function__``."""

    @functools.wraps(method)
    def guarded(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        return _torch_function(type(self), method, (), (self, *args), kwargs)

    return guarded


for _name in ("__repr__", "to_local", "full_tensor", "redistribute"):
    setattr(GuardedTensorParallelPlaceholder, _name, _guarded(getattr(DTensor, _name)))


def set_guarded(placeholders: Iterable[nn.Parameter], guarded: bool) -> None:
    """Switch the guards of placeholders on or off, in place: references to them stay valid."""
    plain: type[Any] = GuardedPlaceholder if guarded else nn.Parameter
    of_tensor_parallel: type[Any] = GuardedTensorParallelPlaceholder if guarded else DTensor
    for placeholder in placeholders:
        placeholder.__class__ = of_tensor_parallel if isinstance(placeholder, DTensor) else plain


@contextlib.contextmanager
def unguarded(placeholders: Sequence[nn.Parameter]) -> Iterator[None]:
    """Take guards away for a block: torch 2.9 wants a view of a DTensor to be of the class of what it is a view of."""
    set_guarded(placeholders, False)
    try:
        yield
    finally:
        set_guarded(placeholders, True)


def _read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` on placeholders that have memory for it (``python_reads.py``)."""
    with unguarded(_given_memory(func, [*args, *kwargs.values()])), compat.without_torch_function():
        return func(*args, **kwargs)


def _given_memory(func: Callable[..., Any], operands: list[Any]) -> list[Any]:
    """Have placeholders among ``operands`` have memory, and return those that are DTensors."""
    by_model: dict[Storage, list[str]] = {}
    divided: list[Any] = []
    for value in iterate_tensors(operands):
        if isinstance(value, (GuardedPlaceholder, GuardedTensorParallelPlaceholder)):
            name, storage = value._graph_fsdp
            by_model.setdefault(storage, []).append(name)
            divided += [value] if isinstance(value, DTensor) else []
    for storage, names in by_model.items():
        _have_memory(func, storage, names)
    return divided


@functools.cache
def guard_beside_nested_tensors() -> None:
    """Have what Python calls on a nested tensor and placeholders find these whole: the nested tensor, whose
    ``__torch_function__`` takes whatever is beside it, is asked first."""
    own = compat.NestedTensor.__torch_function__

    def guarded(
        cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not compat.is_tracing() and any(issubclass(kind, GuardedPlaceholder) for kind in types):
            _given_memory(func, [*args, *(kwargs or {}).values()])
        return own(func, types, args, kwargs)

    compat.leave_to_python(guarded)
    compat.NestedTensor.__torch_function__ = classmethod(guarded)  # type: ignore[assignment,method-assign]


@torch.compiler.disable
def _have_memory(func: Callable[..., Any], storage: Storage, names: list[str]) -> None:
    owner, listed = names[0].rpartition(".")[0], ", ".join(map(repr, names))
    where = f"module {owner!r}" if owner else "the model itself"
    if not storage.active and compat.current_backward() == -1:
        raise EmptyPlaceholderError(
            f"parameter {listed} of {where} is a reference from before graph_fsdp.compile, or one that a forward kept, "
            f"and has no memory\n  at {calling_line()}\n  Take it from the model again, and make optimizers after "
            "graph_fsdp.compile."
        )
    if reason := storage.refusal(names):
        raise EmptyPlaceholderError(
            f"parameter {listed} of {where} was used by {getattr(func, '__name__', func)!r} in code that was not "
            f"compiled, where it cannot be gathered: {reason}\n  at {calling_line()}\n  A graph break made Python run "
            "this code; fullgraph=True tells where the break is. Remove the break, or move it out of the module and of "
            "any loop over modules."
        )


def calling_line() -> str:
    """Return the innermost line on the stack that is neither torch's nor ours."""
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(NOT_OF_USERS)]
    return line_of(frames[-1]) if frames else "?"


def line_of(frame: traceback.FrameSummary) -> str:
    return f'{frame.filename}:{frame.lineno}, in {frame.name}: "{frame.line}"'


# Dynamo traces these functions within others, and would compile them by themselves where Python calls them.
for _function in (_torch_function, _read, _given_memory, iterate_tensors):
    compat.leave_to_python(_function)
