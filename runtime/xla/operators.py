"""The operators of lowered graphs say how values enter and leave the part that each device runs by itself.

| operator | meaning |
|---|---|
| ``enter(x, devices, tiles)`` | a tensor of the whole program → what each device has of it |
| ``exit(x, shape, devices, tiles)`` | what each device has → a tensor of the whole program |
| ``all_gather(x, groups, size, channel)`` | rows of the devices of a group, one behind the other |
| ``reduce_scatter(x, groups, size)`` | sum over a group, of which each device keeps its part of dimension 0 |
| ``all_reduce(x, groups, size)`` | sum over a group |
| ``barrier(xs)`` | the same values, none of which is computed further before all are there |

``groups`` are all groups of devices behind each other, ``size`` devices each. ``devices`` and ``tiles`` are a
``Placement``. Between ``enter`` and ``exit`` XLA partitions nothing by itself.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.passes.ir import operands

_TILED = re.compile(
    r"^\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))( last_tile_dim_replicate)?\}$"
)


@dataclass(frozen=True)
class Placement:
    """Places dimension 0 in ``tiles`` parts, each on ``len(devices) // tiles`` devices; those of the first part come
    first. The last parts may hold fewer rows, or none; on the devices they are padded."""

    devices: tuple[int, ...]
    tiles: int = 1

    @property
    def is_replicated(self) -> bool:
        return self.tiles == 1

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the part that each device holds of a tensor of ``shape``."""
        return (-(-shape[0] // self.tiles), *shape[1:]) if self.tiles > 1 and shape else tuple(shape)

    def global_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of equal parts put together; a scalar on each device becomes one row."""
        if self.tiles == 1:
            return tuple(local)
        return (local[0] * self.tiles, *local[1:]) if local else (self.tiles,)


def read_placement(spec: str, devices: tuple[int, ...]) -> Placement | None:
    """Read how XLA writes a tensor's sharding, "" for none; None if another dimension than the first is sharded."""
    if spec in ("", "{replicated}") or spec.startswith("{maximal"):
        return Placement(devices)
    found = _TILED.match(spec)
    if found is None:
        return None
    tiles = _numbers(found[1])
    copies = tiles.pop() if found[5] else 1
    if math.prod(tiles) == 1:
        return Placement(devices)
    if math.prod(tiles[1:]) != 1:
        return None
    order = _numbers(found[4]) if found[4] else _iota(found[2], found[3])
    assert len(order) == tiles[0] * copies
    return Placement(tuple(order), tiles[0])


def same_placement(spec: str, other: str) -> bool:
    """Say whether two shardings, as XLA writes them, are the same; it has several ways to write some."""
    found = read_placement(spec, ())
    return spec == other or (found is not None and found == read_placement(other, ()))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _iota(shape: str, permutation: str | None) -> list[int]:
    """Return ``iota(prod(shape))``, reshaped, transposed, flattened: how XLA writes the devices of large meshes."""
    sizes = _numbers(shape)
    devices = torch.arange(math.prod(sizes)).reshape(sizes)
    order: list[int] = (devices.permute(_numbers(permutation)) if permutation else devices).flatten().tolist()
    return order


define = functools.partial(operands.define, torch.library.Library("graph_fsdp_xla", "DEF"))


def _in_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` to be given a list for each group."""

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
    "barrier(Tensor[] xs) -> Tensor[]", lambda xs: [torch.empty_like(x) for x in xs], XLA=compat_xla.barrier
)
