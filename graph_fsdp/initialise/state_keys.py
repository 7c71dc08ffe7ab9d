"""Match a checkpoint's keys with a model's parameters and buffers, and say what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp.errors import CheckpointError

_SHOWN = 8  # names in a message

Rename: TypeAlias = Callable[[str], "str | None"]


class IncompatibleKeys(NamedTuple):
    """Holds what ``load_state_dict`` returns: with ``strict=False``, what was not loaded."""

    missing_keys: list[str]  # of the model, in no file
    unexpected_keys: list[str]  # of the checkpoint, not in the model


@dataclass(frozen=True)
class Matched:
    key_of: dict[Tensor, str]  # parameter or buffer → key of the checkpoint, in the model's order
    incompatible: IncompatibleKeys


def match_keys(
    model: nn.Module,
    shapes: Mapping[str, Sequence[int]],
    *,
    strict: bool,
    where: str,
    rename: Rename | None = None,
    unfit: Callable[[str, Tensor], str | None] | None = None,
) -> Matched:
    """Match the names in ``model.state_dict()`` with the keys of a checkpoint.

    A tied parameter needs one of its names; of several, the last is taken, as ``load_state_dict`` would copy it last.

    Args:
        shapes: key → shape of the whole tensor.
        where: what the keys were found in, for messages.
        rename: name in the model → its key in the checkpoint; None for what the checkpoint is not asked for.
        unfit: key and parameter or buffer → why it cannot be loaded, besides its shape.

    Raises:
        CheckpointError: worded as by ``nn.Module.load_state_dict``. Without ``strict`` too if a shape differs.
    """
    registered = {*model.parameters(), *model.buffers()}
    key_of: dict[Tensor, str] = {}
    absent: dict[str, Tensor] = {}  # name → a tensor that may be there under another name
    known, missing, problems = set(), [], []
    for name, value in model.state_dict(keep_vars=True).items():
        key = rename(name) if rename is not None else name
        if key is None:
            continue
        known.add(key)
        if not isinstance(value, Tensor) or value not in registered:
            if key in shapes:
                problems.append(f"{key} is neither a parameter nor a buffer of the model; load it by load_state_dict")
            else:
                missing.append(name)
        elif key not in shapes:
            absent[name] = value
        else:
            key_of[value] = key
            if problem := size_mismatch(name, shapes[key], value):
                problems.append(problem)
            elif unfit is not None and (reason := unfit(key, value)):
                problems.append(f"{name}: {reason}")
    missing += [name for name, value in absent.items() if value not in key_of]
    incompatible = IncompatibleKeys(missing, [key for key in shapes if key not in known])
    check_fit(model, where, incompatible if strict else IncompatibleKeys([], []), problems)
    return Matched(key_of, incompatible)


def check_fit(model: nn.Module, where: str, keys: IncompatibleKeys, problems: Sequence[str]) -> None:
    """Raise CheckpointError, worded as by ``nn.Module.load_state_dict``, if there are such keys or problems. ``where``:
    what the keys were found in."""
    found = (("Missing", keys.missing_keys), ("Unexpected", keys.unexpected_keys))
    lines = [f"{kind} key(s) in state_dict: {listed(names)}. " for kind, names in found if names]
    if lines := [*lines, *problems]:
        error = f"Error(s) in loading state_dict for {type(model).__name__} from {where}:"
        raise CheckpointError("\n\t".join([error, *lines]))


def size_mismatch(name: str, shape: Sequence[int], value: Tensor) -> str | None:
    """Return why a tensor of ``shape`` does not fit ``value``, of this name in the model; None where it does."""
    if tuple(shape) == tuple(value.shape):
        return None
    return (
        f"size mismatch for {name}: copying a param with shape {list(shape)} from checkpoint, the shape in current "
        f"model is {list(value.shape)}."
    )


def check_whole(argument: str, key: str, value: object, *, subclasses: bool) -> None:
    """Raise TypeError if what a user gives as ``argument[key]`` is no whole tensor that can be copied. ``subclasses``:
    tensors of other classes than torch's are taken too."""
    taken = isinstance(value, Tensor) if subclasses else type(value) in (Tensor, nn.Parameter)
    if not taken or not isinstance(value, Tensor) or isinstance(value, DTensor):
        problem = f"{type(value).__name__}, and not a whole tensor; give one, of a DTensor its full_tensor()"
    elif lacking := not_copied(value):
        problem = f"{lacking}; give a dense tensor with values, of a sparse one its to_dense(), or leave the key out"
    else:
        return
    raise TypeError(f"{argument}[{key!r}] is {problem}")


def not_copied(tensor: Tensor) -> str | None:
    """Return what a tensor is whose elements cannot be copied, from it or into it; None where they can."""
    if tensor.is_meta:
        return "on the meta device"
    return None if tensor.layout is torch.strided else f"of the layout {tensor.layout}"


def listed(names: Sequence[object]) -> str:
    """Return names in quotes, the first few where they are many."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f'"{name}"' for name in names[:_SHOWN]) + more
