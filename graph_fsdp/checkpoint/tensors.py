"""Reading whole tensors of a checkpoint, in one process, without a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from graph_fsdp.checkpoint.group import describe
from graph_fsdp.checkpoint.metadata import Checkpoint
from graph_fsdp.checkpoint.storage import FillPlanner, Reader
from graph_fsdp.errors import CheckpointError


def read_tensors(checkpoint: Checkpoint, keys: Iterable[str], verify: bool = True) -> dict[str, Tensor]:
    """Read whole tensors to the CPU, by their keys in the checkpoint.

    Raises:
        CheckpointError: a file of theirs is damaged.
    """
    entries = checkpoint.tensors
    found = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in keys}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(dict(found), storage_reader=Reader(checkpoint, verify), planner=FillPlanner(), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(describe(next(iter(error.failures.values()))[0])) from error
    return found
