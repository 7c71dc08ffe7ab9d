"""FX graph passes: the dialect, the passes, the pass manager and the verifier. Needs no device and no process group."""

from typing import Literal

import graph_fsdp.passes.compat  # noqa: F401  # first: it says so if torch is too old for the others
from graph_fsdp.passes.accessors import BucketNodes, Gather, Reduction
from graph_fsdp.passes.activation_checkpointing import ActivationCheckpointing, CheckpointActivations
from graph_fsdp.passes.annotate import Annotate
from graph_fsdp.passes.arrange import BucketSize
from graph_fsdp.passes.bucket import Bucket
from graph_fsdp.passes.cost import CostModel, GroupShape, Measurements
from graph_fsdp.passes.dialect import NodeRecord, Role
from graph_fsdp.passes.free import Free
from graph_fsdp.passes.graph import Graph, Phase
from graph_fsdp.passes.hardware import HARDWARE, Hardware, Link, detect_hardware, find_hardware
from graph_fsdp.passes.insert_gathers import InsertGathers
from graph_fsdp.passes.just_in_time import JustInTime
from graph_fsdp.passes.memory import MemoryProfile, memory_profile
from graph_fsdp.passes.offload_activations import OffloadActivations, SaveBases
from graph_fsdp.passes.pipeline import GraphPass, PassContext, PassError, PassPipeline, PipelineError, Profiled
from graph_fsdp.passes.plan import Plan
from graph_fsdp.passes.prefetch import BudgetError, Distance, Prefetch
from graph_fsdp.passes.recompute import TagRecompute
from graph_fsdp.passes.reductions import defer_reductions
from graph_fsdp.passes.reshard import Reshard
from graph_fsdp.passes.simulate import Timeline, simulate
from graph_fsdp.passes.slots import AssignSlots, SlotTable
from graph_fsdp.passes.stage import Stage
from graph_fsdp.passes.verification_error import VerificationError

__all__ = [
    "HARDWARE",
    "ActivationCheckpointing",
    "Annotate",
    "AssignSlots",
    "Bucket",
    "BucketNodes",
    "BudgetError",
    "CheckpointActivations",
    "CostModel",
    "Free",
    "Gather",
    "Graph",
    "GraphPass",
    "GroupShape",
    "Hardware",
    "InsertGathers",
    "JustInTime",
    "Link",
    "Measurements",
    "MemoryProfile",
    "NodeRecord",
    "OffloadActivations",
    "PassContext",
    "PassError",
    "PassPipeline",
    "Phase",
    "PipelineError",
    "Plan",
    "Prefetch",
    "Reduction",
    "Reshard",
    "Role",
    "SaveBases",
    "SlotTable",
    "Stage",
    "TagRecompute",
    "Timeline",
    "VerificationError",
    "default_pipeline",
    "defer_reductions",
    "detect_hardware",
    "find_hardware",
    "memory_profile",
    "simulate",
]


def default_pipeline(
    *,
    bucket: BucketSize = "unit",
    prefetch: Distance = "auto",
    forward_prefetch: int | Literal["auto"] | None = None,
    reductions_in_flight: int | None = None,
    budget: int | None = None,
    hardware: str | Hardware | None = None,
    measured: Measurements | Profiled | None = None,
) -> PassPipeline:
    """The passes that ``compile`` runs when it is given none.

    Args:
        bucket: what is gathered and reduced in one collective: ``"unit"``, each unit; ``"none"``, each parameter; a
            number of gathered bytes that several parameters together do not exceed; ``"auto"``, the smallest such
            number that saturates the link by the cost model.
        prefetch: how gathers are started ahead: ``"auto"``, as late as still hides them; a number of buckets; 0, one
            by one; FSDP1's ``BackwardPrefetch.BACKWARD_PRE`` and ``BACKWARD_POST`` or None, for backward.
        forward_prefetch: the same for forward, where it differs: a number of buckets or ``"auto"``.
        reductions_in_flight: reductions that may be under way at once; None is 2, and 1 where backward computes
            activations again or gradients are copied into a wider type to be reduced.
        budget: most bytes of gathered parameters at any point; gathers start later to keep to it. A budget that a
            unit does not fit into is a BudgetError at the first step, which names the unit and the bytes it needs.
        hardware: what the cost model computes with: a name of ``HARDWARE`` or a ``Hardware``; None finds the device's.
        measured: times of a running program, which the cost model prefers: what :func:`graph_fsdp.profile` returned.

    Raises:
        ValueError, TypeError: an argument has a value that none of these is.
    """
    passes = [
        InsertGathers(),
        Annotate(),
        TagRecompute(),
        JustInTime(),
        Bucket(bucket, budget),
        Reshard(budget),
        Prefetch(prefetch, reductions_in_flight, budget, forward_prefetch),
        Free(),
        AssignSlots(),
    ]
    return PassPipeline(passes, hardware=hardware, measured=measured)
