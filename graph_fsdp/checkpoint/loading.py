"""Loading a training: first all that can be known without changing anything, then the values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from graph_fsdp.checkpoint.extra import EXTRA, ExtraValues
from graph_fsdp.checkpoint.group import Ranks
from graph_fsdp.checkpoint.metadata import Checkpoint
from graph_fsdp.checkpoint.model_values import ModelValues
from graph_fsdp.checkpoint.optimizer_values import OptimizerValues
from graph_fsdp.checkpoint.saving import finish_pending
from graph_fsdp.checkpoint.state import MODEL, OPTIMIZER, RNG, optimizers_of, set_random_state
from graph_fsdp.checkpoint.storage import access_of, read
from graph_fsdp.initialise.safetensors_files import AnyPath


def load(
    path: AnyPath,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    random_states: bool = True,
    verify: bool = True,
    model_key: str = MODEL,
    optimizer_key: str = OPTIMIZER,
) -> dict[str, Any]:
    """Load a checkpoint into a model, an optimizer and whatever else has a state. All ranks of the model call it, as
    many as there are: they, the mesh, the buckets and the dtypes may be others than those that saved. Each rank reads
    what it holds. Whatever ``torch.distributed.checkpoint`` has written can be loaded, as from FSDP2.

    Nothing in the checkpoint is run: what is not a tensor is loaded with ``weights_only=True``.

    Args:
        optimizer: one, or several, as was saved. None: its state stays unread.
        extra: by the names with which they were saved, what gets its state by ``load_state_dict()``, and DTensors that
            are read into.
        random_states: set torch's, Python's and NumPy's random states to this rank's when it was saved. A rank that
            there was not then keeps its own.
        verify: compare what this rank will read with the sums that were saved with it, before anything is changed.
            It costs reading memory once. Checkpoints that something else has written have none.
        model_key, optimizer_key: where the two are in a checkpoint that something else has written; ``model_key=""``:
            the model's names are the keys.

    Returns:
        What was saved as ``extra``: of what has a ``load_state_dict()``, its state.

    Raises:
        CheckpointError: on all ranks. The checkpoint is not there, damaged, or does not fit the model or the optimizer;
            the message names what differs. Nothing was changed, unless it could not be read a second time.
    """
    finish_pending()
    ranks = Ranks.of(model)
    problem: Exception | None = None
    try:
        optimizers = optimizers_of(optimizer)
        checkpoint = Checkpoint.open(path)
        if ranks.is_first:  # once is enough, and takes as long as there are files
            checkpoint.check_files()
        model_values = ModelValues(model, checkpoint, model_key, (optimizer_key, EXTRA, RNG))
        optimizer_values = OptimizerValues(model, optimizers, checkpoint, optimizer_key)
        extra_values = ExtraValues(extra or {}, checkpoint)
        random_values = _random_values(checkpoint, ranks.index) if random_states else None
    except Exception as error:  # whatever it is, the other ranks are told
        problem = error
    ranks.agree([os.path.abspath(path)], problem)
    try:
        try:
            optimizer_values.prepare()
        except Exception as error:
            problem = error
        ranks.agree([], problem)
        wanted = {**model_values.wanted, **optimizer_values.wanted, **extra_values.wanted}
        access = access_of(model)
        filled = {key: access.to_fill(tensor) for key, tensor in wanted.items()}
        read(checkpoint, filled, ranks, verify)
        for key, tensor in wanted.items():
            access.filled(tensor, filled[key])
    except BaseException:
        optimizer_values.undo()
        raise
    model_values.finish()
    optimizer_values.finish()
    found = extra_values.finish()
    if random_values is not None:
        set_random_state(model, random_values)
    return found


def _random_values(checkpoint: Checkpoint, rank: int) -> dict[str, Any] | None:
    """None where nothing was saved for this rank."""
    key = f"{RNG}.{rank}"
    return {name: checkpoint.value(f"{key}.{name}") for name in checkpoint.under(key)} or None
