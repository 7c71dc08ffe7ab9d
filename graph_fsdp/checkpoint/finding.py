"""Find the checkpoint from which a training goes on."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from graph_fsdp.checkpoint.folder import complete
from graph_fsdp.checkpoint.group import Ranks
from graph_fsdp.checkpoint.hosts import place_of, survey
from graph_fsdp.checkpoint.saving import finish_pending
from graph_fsdp.initialise.safetensors_files import AnyPath
from graph_fsdp.passes.ir.settings import check_path


def latest(folder: AnyPath, model: nn.Module | None = None) -> Path | None:
    """Return the newest complete checkpoint in a folder; None where there is none, or no folder.

    Args:
        model: look into the memory of its ranks' hosts, too, for what ``save(…, memory=True)`` has written. All ranks
            of the model call it, and get the same checkpoint. One in memory counts if every file of it is on some host.

    Returns:
        Its path, for ``load``. One in memory has a path on this host, where not all of it may be, or nothing.

    Raises:
        CheckpointError: with ``model``, a rank could not look, or does not answer.
    """
    if model is None:
        found = complete(folder)
        return found[-1] if found else None
    ranks = Ranks.of(model)
    with ranks.agreeing([]):  # an error of an earlier save may be known to one of them
        check_path("folder", folder)
        finish_pending()
        root = Path(os.path.abspath(folder))
    seen = survey(ranks, root, [f"latest of {root}"])
    sequence, name = seen.disk or (-1, "")
    if seen.generations and seen.generations[-1].sequence > sequence:
        return place_of(root) / seen.generations[-1].name
    return root / name if name else None
