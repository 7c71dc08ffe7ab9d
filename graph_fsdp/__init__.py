"""Fully sharded data parallelism by FX graph passes on torch.compile."""

from graph_fsdp import passes
from graph_fsdp.api import compile
from graph_fsdp.errors import (
    AlreadyCompiledError,
    AlreadyShardedError,
    BudgetError,
    EmptyPlaceholderError,
    GraphBreakError,
    MeshError,
    MetaDeviceError,
    ParameterChangedError,
    RankDisagreement,
    UnsupportedError,
    VerificationError,
)
from graph_fsdp.profile_report import Profile
from graph_fsdp.profiling import profile
from graph_fsdp.report import GraphReport, inspect

__version__ = "0.1.0"

__all__ = [
    "AlreadyCompiledError",
    "AlreadyShardedError",
    "BudgetError",
    "EmptyPlaceholderError",
    "GraphBreakError",
    "GraphReport",
    "MeshError",
    "MetaDeviceError",
    "ParameterChangedError",
    "Profile",
    "RankDisagreement",
    "UnsupportedError",
    "VerificationError",
    "compile",
    "inspect",
    "passes",
    "profile",
]
