"""Fully sharded data parallelism by FX graph passes on torch.compile."""

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
from graph_fsdp.passes.activation_checkpointing import ActivationCheckpointing
from graph_fsdp.planning import Plan, plan
from graph_fsdp.profile_report import Profile
from graph_fsdp.profiling import profile
from graph_fsdp.report import GraphReport, inspect
from graph_fsdp.report_file import SavedReport, load_report
from graph_fsdp.unshard import unsharded

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
