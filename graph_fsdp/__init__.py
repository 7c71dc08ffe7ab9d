"""Fully sharded data parallelism by FX graph passes on torch.compile.

[Note: imported when asked for]
Importing this package imports neither torch nor any other part of itself: a name of ``__all__`` brings the module that
has it when it is asked for (PEP 562), and with it Dynamo, which takes as long as torch. A worker of a DataLoader that
imports the training script does not wait for it, nor does ``graph-fsdp --help``. Type checkers read the imports below.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_fsdp import checkpoint, passes
    from graph_fsdp.api import compile
    from graph_fsdp.errors import (
        AlreadyCompiledError,
        AlreadyShardedError,
        BudgetError,
        CheckpointError,
        EmptyPlaceholderError,
        GraphBreakError,
        HostFallbackError,
        MeshError,
        MetaDeviceError,
        ParameterChangedError,
        RankDisagreement,
        RankFailure,
        SettingError,
        UnsupportedError,
        VerificationError,
    )
    from graph_fsdp.parameters.unshard import unsharded
    from graph_fsdp.passes.transforms.activation_checkpointing import ActivationCheckpointing
    from graph_fsdp.planning import Plan, plan
    from graph_fsdp.profiling.profiling import profile
    from graph_fsdp.profiling.table import Profile
    from graph_fsdp.report.file import SavedReport, load_report
    from graph_fsdp.report.report import GraphReport, inspect

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointing",
    "AlreadyCompiledError",
    "AlreadyShardedError",
    "BudgetError",
    "CheckpointError",
    "EmptyPlaceholderError",
    "GraphBreakError",
    "GraphReport",
    "HostFallbackError",
    "MeshError",
    "MetaDeviceError",
    "ParameterChangedError",
    "Plan",
    "Profile",
    "RankDisagreement",
    "RankFailure",
    "SavedReport",
    "SettingError",
    "UnsupportedError",
    "VerificationError",
    "checkpoint",
    "compile",
    "inspect",
    "load_report",
    "passes",
    "plan",
    "profile",
    "unsharded",
]

# Packages and modules that are public as such.
_SUBMODULES = ("checkpoint", "errors", "integrations", "passes", "planning")

# The module of each other name that errors.py does not have.
_MODULES = {
    "ActivationCheckpointing": "passes.transforms.activation_checkpointing",
    "GraphReport": "report.report",
    "Plan": "planning",
    "Profile": "profiling.table",
    "SavedReport": "report.file",
    "compile": "api",
    "inspect": "report.report",
    "load_report": "report.file",
    "plan": "planning",
    "profile": "profiling.profiling",
    "unsharded": "parameters.unshard",
}


def _bring(name: str) -> Any:
    """The public object or submodule of this name, imported. Raises AttributeError for other names, and ImportError
    where torch is too old or missing."""
    if name not in __all__ and name not in _SUBMODULES:
        module = sys.modules[__name__]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=module)
    import random

    drawn = random.getstate()
    try:
        importlib.import_module("graph_fsdp.compat")  # first: it says so if torch is too old for the others
        if name in _SUBMODULES:
            return importlib.import_module(f"graph_fsdp.{name}")
        module = importlib.import_module(f"graph_fsdp.{_MODULES.get(name, 'errors')}")
    finally:
        random.setstate(drawn)  # rich draws a number at its import, and the script may have set its seed before
    globals()[name] = value = getattr(module, name)  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


if not TYPE_CHECKING:  # or a type checker would take any name for one that is there
    __getattr__ = _bring
