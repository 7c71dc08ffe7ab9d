"""Write values as texts that are equal in all processes for equal values, or say that they cannot be."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.portable import NAMESPACES, Names, NotPortable, operator_name


class Unknown(Exception):
    """Says what a program depends on that cannot be written down, so that none is kept and none is found."""


def plain(value: Any, names: Names, nodes: Mapping[fx.Node, str] | None = None) -> str:
    """Return a value as text. Devices go by what they are for; with ``nodes``, nodes by their names.

    Raises:
        Unknown: it is a function, or an object of a class that is not this package's.
    """
    kind = type(value)
    if value is None or value is ... or kind in (bool, int, float, complex, str, bytes):
        return repr(value)
    if isinstance(value, fx.Node) and nodes is not None:
        return nodes[value]
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}"
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        return str(value)
    if isinstance(value, PurePath):
        return repr(str(value))
    try:
        if kind is torch.device:
            return f"device {names.of_device(value)}"
        if isinstance(value, compat.OpOverload):
            return operator_name(value)
        if compat.namespace_of(value) in NAMESPACES:  # all overloads of an operator
            return str(value)
    except NotPortable as reason:
        raise Unknown(str(reason)) from None
    if isinstance(value, torch.Size):
        return f"size {list(value)}"
    return collection(value, lambda item: plain(item, names, nodes))


def collection(value: Any, text_of: Callable[[Any], str]) -> str:
    """Return a collection, a slice or a dataclass of this package as text, of which ``text_of`` writes the parts."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        brackets = "[]" if isinstance(value, list) else "()"
        return f"{brackets[0]}{', '.join(map(text_of, value))}{brackets[1]}"
    if isinstance(value, slice):
        return f"slice{text_of((value.start, value.stop, value.step))}"
    if dataclasses.is_dataclass(value) and is_own(type(value)):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"{type(value).__qualname__}({', '.join(f'{name}={text_of(v)}' for name, v in fields)})"
    raise Unknown(f"a {type(value).__module__}.{type(value).__qualname__} that only its author knows")


def is_own(kind: type) -> bool:
    """Say whether a class is this package's."""
    return kind.__module__.partition(".")[0] == "graph_fsdp"
