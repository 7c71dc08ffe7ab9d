"""All XLA devices of this host, which one process drives; for `train_gpt.py --backend xla`.

torch_xla is imported by whoever calls these.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def make_mesh() -> Any:
    """Of all devices, along the axis that shards. To be called before anything is on them."""
    import numpy
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    devices = xr.global_runtime_device_count()
    return xs.Mesh(numpy.arange(devices), (devices,), ("fsdp",))


def shard_batch(batch: Any) -> Any:
    """Give each device its rows of the tensors in ``batch``."""
    import graph_fsdp.xla

    return graph_fsdp.xla.shard_batch(batch)


def sync() -> None:
    """Run what is pending."""
    import torch_xla

    torch_xla.sync()


def bytes_of_a_device(tensor: Tensor) -> int:
    """What the first device holds of a tensor, padding included."""
    import torch_xla.distributed.spmd as xs

    sync()
    whole = xs.wrap_if_sharded(tensor.detach())
    part = whole.local_shards[0].data if isinstance(whole, xs.XLAShardedTensor) else whole
    return part.numel() * part.element_size()
