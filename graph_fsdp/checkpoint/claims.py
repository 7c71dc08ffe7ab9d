"""Models on ranks of their own, as the stages of a pipeline are, save to folders of their own.

The first rank of those that save together claims the path in the store of the process group: another model's ranks
would replace the checkpoint, or take what is being written for what an interrupted save has left. A claim lasts as long
as the process group; models that have a rank in common do not disturb each other, as they save one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from graph_fsdp import compat
from graph_fsdp.checkpoint import folder
from graph_fsdp.errors import CheckpointError
from graph_fsdp.runtime.ranks.agreement import is_shared, listed, read


def claim(path: Path, ranks: Sequence[int], *, alone_in_series: bool) -> None:
    """Claim a path for the save of ``ranks``, whose first one calls it. ``alone_in_series``: older checkpoints of its
    series are removed.

    Raises:
        CheckpointError: ranks that are none of these save to the path, or, with ``alone_in_series``, to its series.
    """
    if not _have_others():
        return
    rank = _holder(path, "path", ranks)
    if rank is not None:
        raise CheckpointError(
            f"{path} is what the model on rank {rank} saves to, which is none of this model's ranks {listed(ranks)}: "
            "the last to save would replace what others saved; give each stage of a pipeline a path of its own, as "
            f"{path / 'stage0'}"
        )
    rank = _holder(path.parent / folder.series(path.name), "series", ranks)
    if rank is not None and alone_in_series:
        raise CheckpointError(
            f"older checkpoints are removed whose names differ from {path.name!r} in their numbers only, and in "
            f"{path.parent} these are those of the model on rank {rank}, too; give each stage of a pipeline a folder "
            f"of its own, as {path.parent / 'stage0' / path.name}"
        )


def is_of_others(path: Path, ranks: Sequence[int]) -> bool:
    """Say whether ranks that are none of ``ranks`` have claimed a path."""
    return _have_others() and read(compat.default_store(), _name(path, "path")) not in ("", *map(str, ranks))


def _have_others() -> bool:
    return dist.is_available() and dist.is_initialized() and is_shared(range(dist.get_world_size()))


def _holder(path: Path, kind: str, ranks: Sequence[int]) -> int | None:
    """Return the rank, none of ``ranks``, that has claimed a path; otherwise claim it."""
    held: bytes = compat.default_store().compare_set(_name(path, kind), "", str(ranks[0]))
    return int(held) if int(held) not in ranks else None


def _name(path: Path, kind: str) -> str:
    return f"graph_fsdp/checkpoints/{kind} {path}"
