"""When a pass or the verifier fails, the graphs are saved to a file that the error names."""

from __future__ import annotations

import os
import tempfile
from typing import Protocol

from graph_fsdp import compat
from graph_fsdp.passes.context import PassError
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.passes.verify.error import VerificationError
from graph_fsdp.report.data import ErrorData, ReportData, capture_data, unit_data
from graph_fsdp.report.file import SavedReport
from graph_fsdp.report.report import CapturedGraph


class _Captures(Protocol):
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def graphs(self) -> list[CapturedGraph]: ...
    @property
    def whole(self) -> bool: ...


def save_failure(error: VerificationError | PassError, captures: _Captures) -> None:
    """Save the capture that failed, with the graph after each pass and as the failed pass left it, and say so in the
    error's message. The file is the user's alone: in torch's debug directory with ``TORCH_COMPILE_DEBUG=1``, else where
    the system keeps temporary files."""
    report = SavedReport(_data(error, captures), None)
    try:
        path = _new_file()
        with open(path, "w", encoding="utf-8") as file:
            file.write(report.to_json())
    except OSError as reason:  # the pass's error is the one to be seen
        said = f"the graphs could not be saved: {reason}"
    else:
        said = f"the graphs are saved: graph-fsdp report {path}"
    error.args = (f"{error}\n  {said}", *error.args[1:])


def _data(error: VerificationError | PassError, captures: _Captures) -> ReportData:
    spec = captures.spec
    found: ErrorData = {
        "kind": type(error).__name__,
        "message": str(error),
        "pass_name": error.pass_name,
        "phase": error.phase,
        "node": getattr(error, "node", None) or "",
    }
    return {
        "parameters": len(spec.parameters),
        "buckets": len(spec.buckets),
        "world_size": spec.world_size,
        "replicas": spec.replicas,
        "units": unit_data(spec),
        "whole": captures.whole,
        "regions": 0,
        "compiled_regions": 0,
        "peak_gathered_bytes": 0,
        "kept_nbytes": 0,
        "captures": [capture_data(captures.graphs[-1], stages=True)],
        "error": found,
    }


def _new_file() -> str:
    """An empty file that nobody else can read."""
    directory = compat.debug_directory()
    if directory is not None:
        os.makedirs(directory, exist_ok=True)
    handle, path = tempfile.mkstemp(".json", "graph_fsdp_error_", directory)
    os.close(handle)
    return path
