"""Two ranks on gloo exchange halves.

[Note: two ranks on gloo]
gloo's all-gather copies its result, and its reduce-scatter is an all-reduce of a copy. Two ranks instead exchange
halves: half of what an all-reduce moves, and no copy. A sum of two has the same bits in either order. Where gradients
are reduced in a wider dtype than theirs, only the half that is sent is cast (docs/decisions/ranks_and_collectives.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graph_fsdp import compat


def is_pair(group: dist.ProcessGroup, device: torch.device) -> bool:
    """See [Note: two ranks on gloo]."""
    return group.size() == 2 and device.type == "cpu" and compat.uses_gloo(group, device)


def exchange_all_gather(messages: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> list[Any]:
    works = []
    for target, source in messages:
        own, other = own_first(target, group)
        works.append(exchange(other, source, group))
        if own.data_ptr() != source.data_ptr():  # or it was cast there
            own.copy_(source)
    return works


def own_first(halves: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    first, second = halves.chunk(2)
    return (first, second) if group.rank() == 0 else (second, first)


def exchange(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> Any:
    """Exchange flat tensors with the other of two ranks."""
    splits = [len(sent), 0] if group.rank() else [0, len(sent)]
    return dist.all_to_all_single(received, sent, splits, splits, group=group, async_op=True)
