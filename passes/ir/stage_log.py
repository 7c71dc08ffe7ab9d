"""The log shows stages where torch's users look for them: ``TORCH_LOGS`` and ``TORCH_TRACE``.

``TORCH_LOGS="graph_fsdp"`` says what each pass did, ``TORCH_LOGS="+graph_fsdp"`` prints the graph after each pass too.
With ``TORCH_TRACE=DIR`` each stage is an artifact of its compilation, which ``tlparse`` shows between Dynamo's graph
and Inductor's code.
"""

from __future__ import annotations

import logging
import os

from graph_fsdp import compat
from graph_fsdp.passes.ir.stage import Stage

log = logging.getLogger(__name__)

_TRACE = "TORCH_TRACE"  # torch reads it when it is imported


def log_stage(stage: Stage) -> None:
    """Write a stage to the logs that ask for it."""
    log.info("%s, %d nodes%s", stage.title, len(stage.snapshot), f": {stage.summary}" if stage.summary else "")
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", stage.code)
    if os.environ.get(_TRACE):
        compat.trace_artifact(f"graph_fsdp_{stage.phase}_{stage.name}", lambda: stage.code)
