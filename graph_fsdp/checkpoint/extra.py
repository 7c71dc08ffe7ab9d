"""``extra`` is what a training has to remember beside model and optimizer: numbers, text, their lists and dicts,
tensors, and whatever has a ``state_dict()``.

A value's tensors become entries of their own, so that a sharded one is written by the ranks that have its parts. The
rest of it, with the types of its keys and containers, is one entry of bytes.
"""

from __future__ import annotations

import io
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graph_fsdp.checkpoint.metadata import Checkpoint, empty, unfit
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.state_keys import listed

EXTRA = "extra"

Path: TypeAlias = tuple[Any, ...]
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def take_apart(value: Any, name: str) -> tuple[Any, dict[Path, Tensor]]:
    """Return a copy of a value with None in place of its tensors, and these by their paths in it. Raises TypeError for
    what could not be loaded without unpickling objects of any class. ``name``: the value's."""
    tensors: dict[Path, Tensor] = {}
    return _take_apart(value, name, (), tensors), tensors


def _take_apart(value: Any, name: str, path: Path, tensors: dict[Path, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value
        return None
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, Mapping):
        made = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, item in value.items():
            if type(key) not in (str, int, bool, float, bytes, tuple, type(None)):
                raise TypeError(f"{name}: a key is {key!r}, a {type(key).__name__}; use text or numbers")
            made[key] = _take_apart(item, f"{name}[{key!r}]", (*path, key), tensors)
        return made
    if type(value) in (list, tuple):
        return type(value)(_take_apart(v, f"{name}[{at}]", (*path, at), tensors) for at, v in enumerate(value))
    if type(value) is set and all(type(item) in _SIMPLE for item in value):
        return set(value)
    raise TypeError(
        f"{name} is a {type(value).__name__}, and a checkpoint holds numbers, text, lists, tuples, dicts, "
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


def extra_tree(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``extra``: the values without tensors, as bytes that also have name → path of the tensors;
    and the tensors by name. A name is a path joined by dots, or a number where two would be the same.

    Raises:
        TypeError: something of it could not be loaded again.
    """
    structure, tensors = take_apart({name: _state_of(value) for name, value in extra.items()}, EXTRA)
    paths: dict[str, Path] = {}
    for path in tensors:
        base = ".".join(map(str, path))
        names = itertools.chain([base], (f"{base}.{number}" for number in itertools.count(2)))
        paths[next(name for name in names if name not in paths)] = path
    stream = io.BytesIO()
    torch.save({"structure": structure, "paths": paths}, stream)
    return {"structure": stream.getvalue(), "tensors": {name: tensors[path] for name, path in paths.items()}}


def saved_extra(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return a checkpoint's ``extra`` without its tensors, and name → path of these; both empty if none was saved."""
    key = f"{EXTRA}.structure"
    if key not in checkpoint.entries:
        return {}, {}
    data = checkpoint.value(key)
    try:
        found = torch.load(io.BytesIO(data), weights_only=True)
        return dict(found["structure"]), dict(found["paths"])
    except Exception as error:  # whatever a damaged file leads to
        raise CheckpointError(f"extra: cannot be read: {error}") from error


def check_extra(extra: object) -> None:
    """Raise TypeError if it is no mapping by name, nor None."""
    if extra is not None and not (isinstance(extra, Mapping) and all(isinstance(key, str) for key in extra)):
        raise TypeError(f"extra must be a dict of values by name, got {type(extra).__name__}")


class ExtraValues:
    """Holds what was saved as ``extra``, matched when made with what the caller has under the same names. ``wanted``:
    the tensors to read into, which are the caller's DTensors, and for all else a copy per rank."""

    def __init__(self, given: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        self.given = given
        self.wanted: dict[str, Tensor] = {}
        self.tensors: dict[Path, Tensor] = {}
        self.structure, paths = saved_extra(checkpoint)
        if unknown := sorted(set(given) - set(self.structure)):
            raise CheckpointError(
                f"{checkpoint.path} has no extra {listed(unknown)}; it has {listed(sorted(self.structure)) or 'none'}"
            )
        _, here = take_apart({name: _state_of(value) for name, value in given.items()}, EXTRA)
        for name, path in paths.items():
            at, mine = f"{EXTRA}.tensors.{name}", here.get(path)
            entry = checkpoint.tensors.get(at)
            if entry is None:
                raise CheckpointError(f"{checkpoint.path} has no tensor {at!r}")
            if not isinstance(mine, DTensor):
                mine = empty(entry)
            elif problem := unfit(at, entry, mine):
                raise CheckpointError(f"{checkpoint.path} is of another training: {problem}")
            self.tensors[path] = self.wanted[at] = mine

    def finish(self) -> dict[str, Any]:
        """Give each object with a state its state, after the tensors were read; return all that was saved."""
        found: dict[str, Any] = put_together(self.structure, self.tensors)
        for name, value in self.given.items():
            if _is_stateful(value):
                value.load_state_dict(found[name])
        return found


def _state_of(value: Any) -> Any:
    """Return what is saved of a value: its ``state_dict()``, if it has one and takes one."""
    return value.state_dict() if _is_stateful(value) else value


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
