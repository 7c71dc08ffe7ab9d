"""FX graph passes: the dialect, the passes, the pass manager and the verifier. Needs no device and no process group."""

import graph_fsdp.passes.compat  # noqa: F401  # first: it says so if torch is too old for the others
from graph_fsdp.passes.annotate import Annotate
from graph_fsdp.passes.bucket import Bucket
from graph_fsdp.passes.dialect import NodeRecord, Role
from graph_fsdp.passes.free import Free
from graph_fsdp.passes.graph import Graph
from graph_fsdp.passes.insert_gathers import InsertGathers
from graph_fsdp.passes.just_in_time import JustInTime
from graph_fsdp.passes.memory import MemoryProfile, memory_profile
from graph_fsdp.passes.pipeline import GraphPass, PassContext, PassPipeline, PipelineError
from graph_fsdp.passes.prefetch import BudgetError, Prefetch
from graph_fsdp.passes.recompute import TagRecompute
from graph_fsdp.passes.reshard import Reshard
from graph_fsdp.passes.stage import Stage
from graph_fsdp.passes.verify import VerificationError

__all__ = [
    "Annotate",
    "Bucket",
    "BudgetError",
    "Free",
    "Graph",
    "GraphPass",
    "InsertGathers",
    "JustInTime",
    "MemoryProfile",
    "NodeRecord",
    "PassContext",
    "PassPipeline",
    "PipelineError",
    "Prefetch",
    "Reshard",
    "Role",
    "Stage",
    "TagRecompute",
    "VerificationError",
    "default_pipeline",
    "memory_profile",
]


def default_pipeline(*, prefetch: int = 1, reductions_in_flight: int = 2, budget: int | None = None) -> PassPipeline:
    """The passes that ``compile`` runs when it is given none.

    Args:
        prefetch: buckets that a gather starts ahead of its use; 0 runs them one by one.
        reductions_in_flight: reductions that may be under way at once.
        budget: most bytes of gathered parameters at any point; gathers start later to keep to it. A budget that a
            unit does not fit into is a BudgetError at the first step, which names the unit and the bytes it needs.
    """
    return PassPipeline(
        [
            InsertGathers(),
            Annotate(),
            TagRecompute(),
            JustInTime(),
            Bucket(),
            Reshard(),
            Prefetch(prefetch, reductions_in_flight, budget),
            Free(),
        ]
    )
