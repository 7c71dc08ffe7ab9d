"""``backend="xla"`` compiles a model for all devices of an XLA program, and has these functions for its users."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.xla.mesh import XlaMesh
from graph_fsdp.xla.replicas import ShardMetadata, full_state_dict, shard_metadata

__all__ = ["ShardMetadata", "full_state_dict", "shard_batch", "shard_metadata"]


def shard_batch(batch: Any, mesh: Any = None) -> Any:
    """Give each device of ``mesh`` its rows of every tensor in ``batch``, a tree of tensors on the CPU or on XLA, with
    the rows first. Tensors without dimensions stay whole. ``mesh`` is as for ``graph_fsdp.compile``.

    Raises:
        ValueError: a tensor's rows cannot be divided equally among the devices.
    """
    place, device = XlaMesh.of(mesh).batch, compat_xla.device()

    def shard(tensor: Tensor) -> Tensor:
        tensor = compat_xla.plain(tensor).to(device)
        if tensor.dim() and place.tiles > 1:
            if tensor.shape[0] % place.tiles:
                raise ValueError(
                    f"batch has a tensor of shape {tuple(tensor.shape)}, whose {tensor.shape[0]} rows cannot be "
                    f"divided equally among {place.tiles} devices; give a multiple"
                )
            compat_xla.mark_sharding(tensor, place.devices, place.tiles)
        return tensor

    return compat.tree_map_only(Tensor, shard, batch)
