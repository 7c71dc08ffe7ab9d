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

from collections.abc import Sequence

import torch
from torch import Tensor

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.runtime.xla.placement import Placement

_LIBRARY = torch.library.Library("graph_fsdp_xla", "DEF")
for _schema in (
    "enter(Tensor x, int[] devices, int tiles) -> Tensor",
    "exit(Tensor x, int[] shape, int[] devices, int tiles) -> Tensor",
    "all_gather(Tensor x, int[] groups, int size, int channel) -> Tensor",
    "reduce_scatter(Tensor x, int[] groups, int size) -> Tensor",
    "all_reduce(Tensor x, int[] groups, int size) -> Tensor",
    "barrier(Tensor[] xs) -> Tensor[]",
):
    _LIBRARY.define(_schema)

_ops = torch.ops.graph_fsdp_xla
enter = _ops.enter.default
exit = _ops.exit.default
all_gather = _ops.all_gather.default
reduce_scatter = _ops.reduce_scatter.default
all_reduce = _ops.all_reduce.default
barrier = _ops.barrier.default
COLLECTIVES = frozenset({all_gather, reduce_scatter, all_reduce})


def _groups(groups: Sequence[int], size: int) -> list[list[int]]:
    return [list(groups[i : i + size]) for i in range(0, len(groups), size)]


def _enter(x: Tensor, devices: Sequence[int], tiles: int) -> Tensor:
    return compat_xla.enter_manual(x, tuple(devices), tiles)


def _exit(x: Tensor, shape: Sequence[int], devices: Sequence[int], tiles: int) -> Tensor:
    return compat_xla.exit_manual(x, shape, tuple(devices), tiles)


def _all_gather(x: Tensor, groups: Sequence[int], size: int, channel: int) -> Tensor:
    return compat_xla.all_gather(x, _groups(groups, size), channel)


def _reduce_scatter(x: Tensor, groups: Sequence[int], size: int) -> Tensor:
    return compat_xla.reduce_scatter(x, _groups(groups, size))


def _all_reduce(x: Tensor, groups: Sequence[int], size: int) -> Tensor:
    return compat_xla.all_reduce(x, _groups(groups, size))


def _barrier(xs: Sequence[Tensor]) -> list[Tensor]:
    return compat_xla.barrier(xs)


for _name, _function in (
    ("enter", _enter),
    ("exit", _exit),
    ("all_gather", _all_gather),
    ("reduce_scatter", _reduce_scatter),
    ("all_reduce", _all_reduce),
    ("barrier", _barrier),
):
    _LIBRARY.impl(_name, _function, "XLA")


@torch.library.register_fake("graph_fsdp_xla::enter", lib=_LIBRARY)
def _(x: Tensor, devices: Sequence[int], tiles: int) -> Tensor:
    return x.new_empty(Placement(tuple(devices), tiles).local_shape(x.shape))


@torch.library.register_fake("graph_fsdp_xla::exit", lib=_LIBRARY)
def _(x: Tensor, shape: Sequence[int], devices: Sequence[int], tiles: int) -> Tensor:
    return x.new_empty(list(shape))


@torch.library.register_fake("graph_fsdp_xla::all_gather", lib=_LIBRARY)
def _(x: Tensor, groups: Sequence[int], size: int, channel: int) -> Tensor:
    return x.new_empty([x.shape[0] * size, *x.shape[1:]])


@torch.library.register_fake("graph_fsdp_xla::reduce_scatter", lib=_LIBRARY)
def _(x: Tensor, groups: Sequence[int], size: int) -> Tensor:
    return x.new_empty([x.shape[0] // size, *x.shape[1:]])


@torch.library.register_fake("graph_fsdp_xla::all_reduce", lib=_LIBRARY)
def _(x: Tensor, groups: Sequence[int], size: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("graph_fsdp_xla::barrier", lib=_LIBRARY)
def _(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]
