"""Each kind of failure has an exception class here. Messages name what was wrong and what to do."""

from __future__ import annotations

from graph_fsdp.passes.context import PassError as PassError
from graph_fsdp.passes.context import PipelineError as PipelineError
from graph_fsdp.passes.context import VerificationError as VerificationError
from graph_fsdp.passes.ir.settings import SettingError as SettingError
from graph_fsdp.passes.transforms.schedule import BudgetError as BudgetError
from graph_fsdp.runtime.ranks.agreement import RankDisagreement as RankDisagreement
from graph_fsdp.runtime.ranks.failure import RankFailure as RankFailure
from graph_fsdp.runtime.xla.host_fallbacks import HostFallbackError as HostFallbackError


class MeshError(ValueError):
    """The mesh does not fit the model, or there is none where one is needed."""


class MetaDeviceError(ValueError):
    """A parameter or buffer is on the meta device, and nothing gives it a value."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not fit the model. (``nn.Module.load_state_dict`` raises RuntimeError.)"""


class AlreadyShardedError(ValueError):
    """A parameter or module is already sharded or wrapped by another data parallelism."""


class AlreadyCompiledError(ValueError):
    """``graph_fsdp.compile`` was called on a model that it has compiled before."""


class UnsupportedError(NotImplementedError):
    """This version does not have an option or method. Nothing is ignored silently."""


class GraphBreakError(RuntimeError):
    """The model cannot be traced in one graph, and ``fullgraph=True`` asks for that."""


class EmptyPlaceholderError(RuntimeError):
    """Code that was not compiled touched a parameter while the model's forward ran."""


class ParameterChangedError(RuntimeError):
    """A sharded parameter was replaced by something that its storage cannot hold."""
