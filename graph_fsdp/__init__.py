"""graph_fsdp trains models fully sharded data parallel, by FX graph passes on torch.compile.

[Note: imported when asked for]
A name of ``__all__`` imports its module, and with it torch, when it is first asked for (PEP 562). Type checkers read
the imports below. Why: docs/decisions/package_and_libraries.md.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_fsdp import checkpoint as checkpoint
    from graph_fsdp import passes as passes
    from graph_fsdp.api import compile as compile
    from graph_fsdp.checkpoint.export import export as export
    from graph_fsdp.checkpoint.export import receive as receive
    from graph_fsdp.checkpoint.importing import import_ as import_
    from graph_fsdp.errors import AlreadyCompiledError as AlreadyCompiledError
    from graph_fsdp.errors import AlreadyShardedError as AlreadyShardedError
    from graph_fsdp.errors import BudgetError as BudgetError
    from graph_fsdp.errors import CheckpointError as CheckpointError
    from graph_fsdp.errors import EmptyPlaceholderError as EmptyPlaceholderError
    from graph_fsdp.errors import GraphBreakError as GraphBreakError
    from graph_fsdp.errors import HostFallbackError as HostFallbackError
    from graph_fsdp.errors import MeshError as MeshError
    from graph_fsdp.errors import MetaDeviceError as MetaDeviceError
    from graph_fsdp.errors import ParameterChangedError as ParameterChangedError
    from graph_fsdp.errors import RankDisagreement as RankDisagreement
    from graph_fsdp.errors import RankFailure as RankFailure
    from graph_fsdp.errors import SettingError as SettingError
    from graph_fsdp.errors import UnsupportedError as UnsupportedError
    from graph_fsdp.errors import VerificationError as VerificationError
    from graph_fsdp.monitoring.monitor import Monitor as Monitor
    from graph_fsdp.monitoring.monitor import monitor as monitor
    from graph_fsdp.monitoring.record import MonitorRecord as MonitorRecord
    from graph_fsdp.optimizers.distribute import distribute_optimizer as distribute_optimizer
    from graph_fsdp.parameters.unshard import unsharded as unsharded
    from graph_fsdp.passes.transforms.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
    from graph_fsdp.planning import Plan as Plan
    from graph_fsdp.planning import plan as plan
    from graph_fsdp.planning.precompile import precompile as precompile
    from graph_fsdp.profiling.profiling import profile as profile
    from graph_fsdp.profiling.table import Profile as Profile
    from graph_fsdp.report.file import SavedReport as SavedReport
    from graph_fsdp.report.file import load_report as load_report
    from graph_fsdp.report.report import GraphReport as GraphReport
    from graph_fsdp.report.report import inspect as inspect

__version__ = "0.1.0"

# As torch's loggers, ours write what they are asked for (TORCH_LOGS, setLevel), and a script's
# logging.basicConfig(level=INFO) does not ask for a line per pass and graph.
if logging.getLogger(__name__).level == logging.NOTSET:
    logging.getLogger(__name__).setLevel(logging.WARNING)

# Module → the public names that it defines.
_NAMES = {
    "api": ("compile",),
    "checkpoint.export": ("export", "receive"),
    "checkpoint.importing": ("import_",),
    "errors": (
        "AlreadyCompiledError",
        "AlreadyShardedError",
        "BudgetError",
        "CheckpointError",
        "EmptyPlaceholderError",
        "GraphBreakError",
        "HostFallbackError",
        "MeshError",
        "MetaDeviceError",
        "ParameterChangedError",
        "RankDisagreement",
        "RankFailure",
        "SettingError",
        "UnsupportedError",
        "VerificationError",
    ),
    "monitoring.monitor": ("Monitor", "monitor"),
    "monitoring.record": ("MonitorRecord",),
    "optimizers.distribute": ("distribute_optimizer",),
    "parameters.unshard": ("unsharded",),
    "passes.transforms.activation_checkpointing": ("ActivationCheckpointing",),
    "planning": ("Plan", "plan"),
    "planning.precompile": ("precompile",),
    "profiling.profiling": ("profile",),
    "profiling.table": ("Profile",),
    "report.file": ("SavedReport", "load_report"),
    "report.report": ("GraphReport", "inspect"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
# Public packages and modules.
_SUBMODULES = ("checkpoint", "errors", "integrations", "passes", "planning")

__all__ = sorted(["checkpoint", "passes", *_MODULES])


def _bring(name: str) -> Any:
    """Import and return the public object or submodule of this name. Raises AttributeError for other names."""
    if name not in __all__ and name not in _SUBMODULES:
        module = sys.modules[__name__]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=module)
    import random

    drawn = random.getstate()
    try:
        importlib.import_module("graph_fsdp.compat")  # first: it says so if torch is too old for the others
        if name in _SUBMODULES:
            return importlib.import_module(f"graph_fsdp.{name}")
        module = importlib.import_module(f"graph_fsdp.{_MODULES[name]}")
    finally:
        random.setstate(drawn)  # rich draws a number at its import, and the script may have set its seed before
    globals()[name] = value = getattr(module, name)  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = _bring
