"""torch's composable ``checkpoint(module)``, applied before ``compile``: traced as ``torch.utils.checkpoint`` is.

It puts a generator between hooks of a module, which Dynamo does not trace. The module's forward gets a checkpoint
around it instead, with what the user has set, and the hooks go.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from graph_fsdp import compat


def trace_composable_checkpoints(model: nn.Module) -> None:
    """For all modules of ``model``."""
    for module in model.modules():
        options = compat.take_composable_checkpoint(module)
        if options is not None:
            vars(module)["forward"] = _checkpointed(module, options)


def _checkpointed(module: nn.Module, options: dict[str, Any]) -> Any:
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run
