"""Where a tensor's rows lie: dimension 0 in equal parts over devices, or whole on each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_TILED = re.compile(
    r"^\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))( last_tile_dim_replicate)?\}$"
)


@dataclass(frozen=True)
class Placement:
    """``tiles`` parts of dimension 0, each on ``len(devices) // tiles`` devices: those of the first part come first.
    The last parts may hold fewer rows, or none; on the devices they are padded."""

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
    """What XLA writes of a tensor's sharding, "" for none; None where another dimension than the first is sharded."""
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
    """Whether XLA writes of two tensors that they are sharded alike; it has several ways to write some."""
    found = read_placement(spec, ())
    return spec == other or (found is not None and found == read_placement(other, ()))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _iota(shape: str, permutation: str | None) -> list[int]:
    """``iota(prod(shape))``, reshaped, transposed, flattened: how XLA writes the devices of large meshes."""
    sizes = _numbers(shape)
    devices = torch.arange(math.prod(sizes)).reshape(sizes)
    order: list[int] = (devices.permute(_numbers(permutation)) if permutation else devices).flatten().tolist()
    return order
