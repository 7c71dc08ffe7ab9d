"""Settings are what the user changed by methods after compile; graphs depend on them beside their inputs."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Prefetches: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]


def is_count(value: object, least: int = 1) -> bool:
    """Say whether what a user set is a whole number, ``least`` or more. True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive(value: object, *, or_zero: bool = False) -> bool:
    """Say whether what a user set is a number above 0 (or 0 itself), one of NumPy's too. True and False are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return float(value) > 0 or (or_zero and float(value) == 0)


def check_signature(what: str, function: Callable[..., Any], advice: str, *given: str, **named: object) -> None:
    """Raise TypeError if a function that a user gave cannot be called so, before it is: Python's own error would not
    say whose it is. ``what``: the argument; ``given``: names for positional arguments of the call."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins have none
        return
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        call = ", ".join((*given, *(f"{name}=" for name in named)))
        raise TypeError(f"{what} cannot be called with ({call}): {error}; {advice}") from None


def check_flags(**flags: object) -> None:
    """Raise TypeError if one is neither True nor False: "no" would mean yes."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_path(name: str, value: object, what: str = "the path of a folder") -> None:
    """Raise TypeError if the argument ``name`` is no path, and ValueError if it is empty, which ``Path`` takes for the
    current folder. ``what``: it must be."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be {what}, got {value!r}")
    if not os.fspath(value):
        raise ValueError(f"{name} must be {what}, got an empty path")


class SettingError(ValueError):
    """Says that what the user set does not fit the graph that was captured."""


@dataclass(frozen=True)
class Settings:
    """Holds what the user set. Each value has graphs of its own, captured at the first call with it.

    Fields are hashable, and their defaults are what ``compile`` was given. Ranks have to set the same, and compare it
    with their collectives. Units are named.

    ``unsharded``: units whose parameters are whole before the forward begins: nothing of them is gathered.
    ``reshard_after_forward``: (unit, whether it is gathered again in backward), for the units that were set.
    ``not_gathered_in_backward``: units of which backward must not need a parameter.
    ``forward_prefetch``, ``backward_prefetch``: (unit, the units whose gathers start when its own has arrived).
    ``unsynced``: units whose gradients are accumulated whole and not reduced.
    ``unreplicated``: units whose gradients are reduced over the ranks that shard, and not over the replicas.
    ``divide_factors``: (unit, what sums of gradients are divided by, instead of the number of ranks).
    ``summed``: units whose reductions are sums, divided apart.
    ``stepped``: parameters that an optimizer steps in backward.
    ``over_groups``: reduced gradients are reduced again over replica groups that come and go, outside of the mesh.
    ``hooked``: units whose reduced gradients are shown to a function of the user.
    ``reductions_in_flight``: how many may be under way at once; None for what the pipeline has.
    ``own_reduce_group``: reductions over the ranks that shard have a process group of their own.
    ``custom_all_gather``, ``custom_reduce_scatter``: collectives that the user brings, in one message per bucket.
    ``registered_memory``: "group" where collectives have the process group's memory, "symmetric" where slots share it.
    """

    unsharded: frozenset[str] = frozenset()
    reshard_after_forward: tuple[tuple[str, bool], ...] = ()
    not_gathered_in_backward: frozenset[str] = frozenset()
    forward_prefetch: Prefetches = ()
    backward_prefetch: Prefetches = ()
    unsynced: frozenset[str] = frozenset()
    unreplicated: frozenset[str] = frozenset()
    divide_factors: tuple[tuple[str, float], ...] = ()
    summed: frozenset[str] = frozenset()
    stepped: frozenset[str] = frozenset()
    over_groups: bool = False
    hooked: frozenset[str] = frozenset()
    reductions_in_flight: int | None = None
    own_reduce_group: bool = False
    custom_all_gather: bool = False
    custom_reduce_scatter: bool = False
    registered_memory: str = ""

    def key(self) -> str:
        """Return a text that is equal for equal settings, on all ranks; "" where nothing was changed."""
        changed = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed.append(f"{field.name}={sorted(value) if isinstance(value, frozenset) else value!r}")
        return ", ".join(changed)
