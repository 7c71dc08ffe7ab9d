"""When a pass or the verifier fails, the graphs are saved to a file that the error names."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from graph_fsdp import compat
from graph_fsdp.passes.context import PassError, VerificationError
from graph_fsdp.report.data import report_data
from graph_fsdp.report.file import SavedReport
from graph_fsdp.report.report import GraphReport


def save_failure(error: VerificationError | PassError, engine: Any) -> None:
    """Save the capture that failed, with the graph after each pass and as the failed pass left it, and say so in the
    error's message. The file is the user's alone: in torch's debug directory with ``TORCH_COMPILE_DEBUG=1``, else where
    the system keeps temporary files."""
    report = GraphReport(engine, engine.graphs[-1:])
    saved = SavedReport(report_data(report, stages=True, error=error), None)
    try:
        path = _new_file()
        with open(path, "w", encoding="utf-8") as file:
            file.write(saved.to_json())
    except OSError as reason:  # the pass's error is the one to be seen
        said = f"the graphs could not be saved: {reason}"
    else:
        said = f"the graphs are saved: graph-fsdp report {path}"
    error.args = (f"{error}\n  {said}", *error.args[1:])


def _new_file() -> str:
    """An empty file that nobody else can read."""
    directory = compat.debug_directory()
    if directory is not None:
        os.makedirs(directory, exist_ok=True)
    handle, path = tempfile.mkstemp(".json", "graph_fsdp_error_", directory)
    os.close(handle)
    return path
