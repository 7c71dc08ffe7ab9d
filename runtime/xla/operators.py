"""The operators of lowered graphs: how values enter and leave the part of a program that each device runs by itself.

| operator | meaning |
|---|---|
| ``enter(x, devices, tiles)`` | a tensor of the whole program → what each device has of it |
| ``exit(x, shape, devices, tiles)`` | what each device has → a tensor of the whole program |
| ``all_gather(x, groups, size, channel)`` | rows of the devices of a group, one behind the other |
| ``reduce_scatter(x, groups, size)`` | sum over a group, of which each device keeps its part of dimension 0 |
| ``all_reduce(x, groups, size)`` | sum over a group |
| ``barrier(xs)`` | the same values, none of which is computed further before all are there |

``groups`` are all groups of devices behind each other, ``size`` devices each. ``devices`` and ``tiles`` are a
:class:`graph_fsdp.runtime.xla.placement.Placement`. Between ``enter`` and ``exit`` XLA partitions nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.runtime.xla.placement import Placement

_LIBRARY = torch.library.Library("graph_fsdp_xla", "DEF")


def define(schema: str, fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = (), **functions: Any) -> Any:
    """Define an operator; ``functions``: what runs it, by dispatch key. ``fake``: likewise without values."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    torch.library.register_fake(f"graph_fsdp_xla::{name}", fake, lib=_LIBRARY)
    for key, function in functions.items():
        _LIBRARY.impl(name, function, key)
    return getattr(torch.ops.graph_fsdp_xla, name).default


def _in_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` is given a list for each group."""

    def run(x: Tensor, groups: Sequence[int], size: int, *channel: int) -> Any:
        return function(x, [list(groups[i : i + size]) for i in range(0, len(groups), size)], *channel)

    return run


enter = define(
    "enter(Tensor x, int[] devices, int tiles) -> Tensor",
    lambda x, devices, tiles: x.new_empty(Placement(tuple(devices), tiles).local_shape(x.shape)),
    XLA=compat_xla.enter_manual,
)
exit = define(
    "exit(Tensor x, int[] shape, int[] devices, int tiles) -> Tensor",
    lambda x, shape, devices, tiles: x.new_empty(shape),
    XLA=compat_xla.exit_manual,
)
all_gather = define(
    "all_gather(Tensor x, int[] groups, int size, int channel) -> Tensor",
    lambda x, groups, size, channel: x.new_empty([x.shape[0] * size, *x.shape[1:]]),
    XLA=_in_groups(compat_xla.all_gather),
)
reduce_scatter = define(
    "reduce_scatter(Tensor x, int[] groups, int size) -> Tensor",
    lambda x, groups, size: x.new_empty([x.shape[0] // size, *x.shape[1:]]),
    XLA=_in_groups(compat_xla.reduce_scatter),
)
all_reduce = define(
    "all_reduce(Tensor x, int[] groups, int size) -> Tensor",
    lambda x, groups, size: torch.empty_like(x),
    XLA=_in_groups(compat_xla.all_reduce),
)
barrier = define(
    "barrier(Tensor[] xs) -> Tensor[]",
    lambda xs: [torch.empty_like(x) for x in xs],
    XLA=compat_xla.barrier,
)
