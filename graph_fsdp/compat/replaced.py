"""Tell torch's own functions from those that others have put in their places: a name does not, as it can be copied."""

from __future__ import annotations

import inspect
import os
import pkgutil
import types
from typing import Any

import torch
from torch._ops import OpOverloadPacket
from torch.fx.node import _get_qualified_name

_FOLDERS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))


def is_torchs(function: Any) -> bool:
    """Say whether the code of a function is torch's, or of this package for torch, or compiled."""
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__wrapped__", None), "__code__", None)
    return code is None or code.co_filename.startswith(_FOLDERS)


def namespace_of(target: Any) -> str | None:
    """Return the namespace of an operator that is called without the name of an overload; None of anything else."""
    return str(target._qualified_op_name).partition("::")[0] if isinstance(target, OpOverloadPacket) else None


def name_of_function(target: Any) -> str | None:
    """Return the name under which torch or a module of Python has a function, "torch.relu"; None where it has none, or
    another function by that name."""
    try:
        is_builtin = isinstance(target, types.BuiltinFunctionType) and target.__module__ == "builtins"
        name = f"builtins.{target.__name__}" if is_builtin else str(_get_qualified_name(target))
        return name if pkgutil.resolve_name(name) is target else None
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return None


def is_tensors(attribute: str) -> bool:
    """Say whether an attribute, as "mT", is one that torch computes of a tensor: nobody can make another in Python."""
    found = inspect.getattr_static(torch.Tensor, attribute, None)
    return isinstance(found, types.GetSetDescriptorType) and found.__objclass__ is torch._C.TensorBase


def replaced_operators() -> list[str]:
    """Return which of ATen's operators have got an implementation in Python: operator and dispatch key."""
    return [name for name in torch.library._impls if name.startswith("aten/")]


def replaced_methods() -> list[str]:
    """Return which methods and properties of ``torch.Tensor`` are not torch's own: Dynamo's graph has their names."""
    parts = ((name, getattr(value, "fget", getattr(value, "__func__", value))) for name, value in _METHODS.items())
    return [name for name, function in parts if not is_torchs(function)]


_METHODS = vars(torch.Tensor)  # as they are now
