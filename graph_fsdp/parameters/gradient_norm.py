"""Compute the norm of a model's gradients, whatever meshes they are on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.runtime.ranks import lockstep


def clip_gradients(gradients: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Multiply the gradients by ``max_norm / norm`` where their ``norm_type``-norm is larger. Return the norm, a plain
    scalar in float32 at least. There is one reduction for each process group that gradients are sharded over; every
    rank of these calls."""
    parts = [compat.local_part(grad).detach() for grad in gradients]
    if not parts:
        return torch.tensor(0.0)
    norm = _total_norm(parts, [groups_sharding(grad) for grad in gradients], norm_type)
    compat.foreach_mul(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def own_square(gradients: Sequence[Tensor], ranks: Sequence[int]) -> Tensor | None:
    """Return this rank's part of the squared 2-norm of all gradients: a scalar, float32, on their device; the sum over
    ``ranks``, those of the model's mesh, is the square. Nothing is communicated. What several ranks hold is divided by
    their number. None where gradients are on other ranks as well, or on fewer."""
    together: dict[Any, list[Tensor]] = {}
    for grad in gradients:
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        together.setdefault(key, []).append(compat.local_part(grad).detach())
    squares = []
    for key, parts in together.items():
        copies = len(ranks)
        if key is not None:
            mesh, placements = key
            if set(mesh.mesh.flatten().tolist()) != set(ranks):
                return None
            sizes = zip(mesh.shape, placements, strict=True)
            copies = math.prod(size for size, placement in sizes if placement.is_replicate())
        squares.append(torch.nn.utils.get_total_norm(parts).float().square() / copies)
    return torch.stack(squares).sum() if squares else None


def _total_norm(parts: Sequence[Tensor], groups: Sequence[tuple[str, ...]], norm_type: float) -> Tensor:
    together: dict[tuple[str, ...], list[Tensor]] = {}
    for part, names in zip(parts, groups, strict=True):
        # Of a tensor without elements, torch finds no largest one.
        together.setdefault(names, []).append(part if part.numel() else part.new_zeros(1))
    largest = math.isinf(norm_type)
    norms = torch.stack([torch.nn.utils.get_total_norm(members, norm_type) for members in together.values()])
    exact = norms.to(torch.promote_types(norms.dtype, torch.float32))  # a square overflows float16
    # Of the host: a mask on the device would have the host wait for the number of its elements.
    totals = list((exact if largest else exact**norm_type).unbind())
    for group in dict.fromkeys(name for names in together for name in names):
        sharded = [place for place, names in enumerate(together) if group in names]
        found = torch.stack([totals[place] for place in sharded])
        if largest:  # of a NaN and a number, a process group takes either for the larger one
            found = torch.stack([found.nan_to_num(math.inf, math.inf), found.isnan().to(found.dtype)])
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work = dist.all_reduce(found, operation, group=compat.resolve_group(group), async_op=True)
        lockstep.finish(work, found.device)
        if largest:
            found = found[0].masked_fill(found[1] > 0, math.nan)
        for place, total in zip(sharded, found.unbind(), strict=True):
            totals[place] = total
    of_all = torch.stack(totals)
    return of_all.max() if largest else of_all.sum() ** (1.0 / norm_type)


def groups_sharding(tensor: Tensor) -> tuple[str, ...]:
    """Return the groups of ranks over which a tensor is sharded, by their names."""
    if not isinstance(tensor, DTensor):
        return ()
    dims = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return tuple(tensor.device_mesh.get_group(dim).group_name for dim in dims if tensor.device_mesh.size(dim) > 1)
