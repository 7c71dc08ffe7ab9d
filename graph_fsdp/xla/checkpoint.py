"""``torch.distributed.checkpoint`` writes and reads tensors on XLA's devices part by part.

With SPMD one process has tensors of full shape, of which each device has some rows. A checkpoint gets these parts, each
with its place in the whole, so one that XLA has saved can be loaded on ranks, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from graph_fsdp.checkpoint.files import TensorAccess
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.xla.storage import XlaStorage


class Parts(compat_xla.WithoutMemory):
    """Represents a tensor on devices by its parts on the CPU. ``torch.distributed.checkpoint`` asks of it the three
    methods that it also asks of a DTensor."""

    parts: dict[tuple[int, ...], Tensor]  # by the offset of its first element; without padding, and none is empty

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, parts: dict[tuple[int, ...], Tensor]) -> Any:
        made = compat_xla.WithoutMemory.__new__(cls, shape, dtype, torch.device("cpu"))
        made.parts = parts
        return made

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, index),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for index, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), part.shape) for offset, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


class XlaTensors(TensorAccess):
    """Gives a checkpoint access to the tensors of a model on XLA and of its optimizers."""

    def __init__(self, storage: XlaStorage) -> None:
        self.storage = storage

    def to_write(self, tensor: Tensor, copy: bool = False) -> Tensor:
        """Copy a tensor on XLA's devices to the CPU, as its parts if it is divided; compute what is pending first."""
        if tensor.device.type != "xla":
            return super().to_write(tensor, copy)
        tensor = compat_xla.plain(tensor.detach())
        if compat_xla.pending([tensor]):  # all that is pending, or other tensors would be computed once more
            compat_xla.sync(wait=True)
        if not self._is_divided(tensor):
            return tensor.cpu()
        # Devices of other replicas have the same parts.
        held = {shard.offset: shard.part for shard in compat_xla.device_shards(tensor) if shard.part.numel()}
        parts: Tensor = Parts(tensor.shape, tensor.dtype, held)
        return parts

    def to_fill(self, tensor: Tensor, is_state: bool) -> Tensor:
        if is_state and tensor.device.type == "xla":
            self._divide(compat_xla.plain(tensor.detach()))
        return self.to_write(tensor)

    def filled(self, tensor: Tensor, value: Tensor) -> None:
        """Give a tensor on XLA's devices the values; it stays divided as it is."""
        if tensor.device.type != "xla":
            return
        tensor = compat_xla.plain(tensor.detach())
        if not isinstance(value, Parts):
            tensor.copy_(value)
            return
        shards = compat_xla.device_shards(tensor)
        for shard in shards:
            if shard.part.numel():
                shard.part.copy_(value.parts[shard.offset])
        compat_xla.load_device_shards(tensor, shards)

    def _divide(self, tensor: Tensor) -> None:
        """Divide a state that an optimizer has just made, whole on each device, as the parameter of its shape. Another
        state of that shape has the same values wherever it lies; a buffer of the model stays whole."""
        if not self._is_divided(tensor):
            parameters = (p.spec for p in self.storage.parameters.values())
            like = next((p for p in parameters if tuple(p.shape) == tuple(tensor.shape)), None)
            placement = self.storage.placement(like) if like is not None else None
            if placement is not None and not placement.is_replicated:
                compat_xla.mark_sharding(tensor, placement.devices, placement.tiles)

    def _is_divided(self, tensor: Tensor) -> bool:
        """Say whether no device holds all of it."""
        return self.storage.xla_mesh.placements([tensor]) != [self.storage.xla_mesh.whole]
