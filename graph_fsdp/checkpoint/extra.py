"""What a training has to remember beside model and optimizer: numbers, text, their lists and dicts, tensors, and
whatever has a ``state_dict()``.

A value's tensors become entries of their own, so that a sharded one is written by the ranks that have its parts. What
is left of it, with the types of its keys and containers, is one entry of bytes.
"""

from __future__ import annotations

import io
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graph_fsdp.errors import CheckpointError

Path: TypeAlias = tuple[Any, ...]
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def state_of(value: Any) -> Any:
    """What is saved of a value: its ``state_dict()``, if it has one and takes one."""
    return value.state_dict() if is_stateful(value) else value


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def take_apart(value: Any, name: str) -> tuple[Any, dict[Path, Tensor]]:
    """A copy of a value with None in place of its tensors, and these by their paths in it. ``name``: of the value.

    Raises:
        TypeError: something of it could not be loaded without unpickling objects of any class.
    """
    tensors: dict[Path, Tensor] = {}
    try:
        return _take_apart(value, (), tensors), tensors
    except TypeError as error:
        raise TypeError(f"{name}{error}") from None


def _take_apart(value: Any, path: Path, tensors: dict[Path, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value
        return None
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, Mapping):
        made = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, item in value.items():
            if type(key) not in (str, int, bool, float, bytes, tuple, type(None)):
                raise TypeError(f"{_shown(path)}: a key is {key!r}, a {type(key).__name__}; use text or numbers")
            made[key] = _take_apart(item, (*path, key), tensors)
        return made
    if type(value) in (list, tuple):
        return type(value)(_take_apart(item, (*path, at), tensors) for at, item in enumerate(value))
    if type(value) is set and all(type(item) in _SIMPLE for item in value):
        return set(value)
    raise TypeError(
        f"{_shown(path)} is a {type(value).__name__}, and a checkpoint holds numbers, text, lists, tuples, dicts, "
        "tensors, and the state_dict() of what has one; convert it, as by float() or .tolist()"
    )


def put_together(value: Any, tensors: Mapping[Path, Tensor], path: Path = ()) -> Any:
    """Invert ``take_apart``: return the values with their tensors."""
    if path in tensors:
        return tensors[path]
    if isinstance(value, dict):
        for key in value:
            value[key] = put_together(value[key], tensors, (*path, key))
    elif type(value) in (list, tuple):
        return type(value)(put_together(item, tensors, (*path, at)) for at, item in enumerate(value))
    return value


def encode(structure: Any, paths: Mapping[str, Path]) -> bytes:
    """As bytes: what is left of the values, and key of the checkpoint → where in them its tensor was."""
    stream = io.BytesIO()
    torch.save({"structure": structure, "paths": dict(paths)}, stream)
    return stream.getvalue()


def decode(data: Any) -> tuple[dict[str, Any], dict[str, Path]]:
    """Invert ``encode``."""
    try:
        found = torch.load(io.BytesIO(data), weights_only=True)
        return dict(found["structure"]), dict(found["paths"])
    except Exception as error:  # whatever a damaged file leads to
        raise CheckpointError(f"extra: cannot be read: {error}") from error


def tensor_keys(tensors: Mapping[Path, Tensor]) -> dict[str, Path]:
    """A name for each path: its parts joined by dots, and a number where two would be the same."""
    keys: dict[str, Path] = {}
    for path in tensors:
        base = ".".join(map(str, path))
        names = itertools.chain([base], (f"{base}.{number}" for number in itertools.count(2)))
        keys[next(name for name in names if name not in keys)] = path
    return keys


def _shown(path: Path) -> str:
    """As in Python: ['loader'][0]."""
    return "".join(f"[{part!r}]" for part in path)
