"""``constrain`` on XLA tensors: a copy that carries the sharding, which XLA's partitioner keeps to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.passes.transforms import constrain as constrain

_LIBRARY = torch.library.Library("graph_fsdp", "IMPL", "XLA")
_MESHES: dict[str, Any] = {}


def mesh_name(devices: Sequence[Sequence[int]], axes: tuple[str, str]) -> str:
    """The name by which graphs know a mesh of these devices, a row for each step along the first axis. Equal meshes
    have one name."""
    import numpy

    array = numpy.array(devices)
    mesh = compat_xla.spmd().Mesh(array.reshape(-1), array.shape, axes)
    name = next((name for name, known in _MESHES.items() if str(known) == str(mesh)), f"mesh{len(_MESHES)}")
    _MESHES.setdefault(name, mesh)
    return name


@functools.lru_cache(maxsize=4096)
def op_sharding(mesh: str, axes: tuple[str, ...]) -> Any:
    """What torch_xla annotates a tensor with. ``axes``: as in ``passes/transforms/constrain.py``."""
    return _MESHES[mesh].get_op_sharding(tuple(_axis(names) for names in axes))


def _axis(names: str) -> Any:
    several = tuple(names.split(","))
    return several if len(several) > 1 else names or None


def _constrain(value: Tensor, axes: Sequence[str], mesh: str) -> Tensor:
    return compat_xla.annotated(value, op_sharding(mesh, tuple(axes)))


_LIBRARY.impl("constrain", _constrain)
