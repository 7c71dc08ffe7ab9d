"""This package has the FX graph passes, their dialect, manager and verifier. It needs no device or process group."""

from typing import Literal

import graph_fsdp.compat  # noqa: F401  # first: it says so if torch is too old for the others
from graph_fsdp.passes.analysis.cost import CostModel, GroupShape, Measurements
from graph_fsdp.passes.analysis.hardware import HARDWARE, Hardware, Link, detect_hardware, find_hardware
from graph_fsdp.passes.analysis.memory import MemoryProfile, memory_profile
from graph_fsdp.passes.analysis.simulate import Timeline, simulate
from graph_fsdp.passes.context import GraphPass, PassContext, PassError, PipelineError, VerificationError
from graph_fsdp.passes.ir.agreed_order import Plan
from graph_fsdp.passes.ir.dialect import NodeRecord, Role
from graph_fsdp.passes.ir.graph import BucketNodes, Gather, Graph, Phase, Reduction
from graph_fsdp.passes.ir.stage import Stage
from graph_fsdp.passes.pipeline import PassPipeline, Profiled
from graph_fsdp.passes.transforms.activation_checkpointing import ActivationCheckpointing, CheckpointActivations
from graph_fsdp.passes.transforms.arrange import BucketSize, Messages
from graph_fsdp.passes.transforms.bucket import Bucket
from graph_fsdp.passes.transforms.causal_attention import CausalAttention
from graph_fsdp.passes.transforms.delay import DelayWeightGradients
from graph_fsdp.passes.transforms.insert_gathers import Annotate, InsertGathers
from graph_fsdp.passes.transforms.just_in_time import JustInTime
from graph_fsdp.passes.transforms.offload_activations import OffloadActivations, SaveBases
from graph_fsdp.passes.transforms.prefetch import Distance, Prefetch, defer_reductions
from graph_fsdp.passes.transforms.recompute import TagRecompute
from graph_fsdp.passes.transforms.reshard import Reshard
from graph_fsdp.passes.transforms.schedule import BudgetError
from graph_fsdp.passes.transforms.slots import AssignSlots, Free, SlotTable

__all__ = [
    "HARDWARE",
    "ActivationCheckpointing",
    "Annotate",
    "AssignSlots",
    "Bucket",
    "BucketNodes",
    "BudgetError",
    "CausalAttention",
    "CheckpointActivations",
    "CostModel",
    "DelayWeightGradients",
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
    messages: Messages = "auto",
    prefetch: Distance = "auto",
    forward_prefetch: int | Literal["auto"] | None = None,
    reductions_in_flight: int | None = None,
    delay_wgrad: int | Literal["auto"] = "auto",
    budget: int | None = None,
    hardware: str | Hardware | None = None,
    measured: Measurements | Profiled | None = None,
) -> PassPipeline:
    """Return the passes that ``compile`` runs when it is given none.

    Args:
        bucket: what is gathered and reduced in one collective: ``"unit"``, each unit; ``"none"``, each parameter; a
            number of gathered bytes that several parameters together do not exceed; ``"auto"``, the smallest such
            number that saturates the link by the cost model.
        messages: how a bucket is sent: ``"auto"``, large parameters in messages of their own, which need no copy, in
            one group with that of the others; ``"one"``, all of it in one message, which is copied from where it
            lands, and gradients to where they are sent from.
        prefetch, forward_prefetch, reductions_in_flight: how gathers are started ahead, and how many reductions may be
            under way at once; see :class:`Prefetch`.
        delay_wgrad: of how many buckets the gradients are computed beside backward's last reduction; see
            :class:`DelayWeightGradients`. 0 computes gradients in autograd's order.
        budget: most bytes of gathered parameters at any point; gathers start later to keep to it. A budget that a unit
            does not fit into is a BudgetError at the first step, which names the unit and the bytes it needs.
        hardware: what the cost model computes with: a name of ``HARDWARE`` or a ``Hardware``; None finds the device's.
        measured: times of a running program, which the cost model prefers: what :func:`graph_fsdp.profile` returned.

    Raises:
        ValueError, TypeError: an argument has a value that cannot be.
    """
    passes = [
        CausalAttention(),
        InsertGathers(),
        Annotate(),
        TagRecompute(),
        JustInTime(),
        Bucket(bucket, budget, messages),
        Reshard(budget),
        DelayWeightGradients(delay_wgrad, budget),
        Prefetch(prefetch, reductions_in_flight, budget, forward_prefetch),
        Free(),
        AssignSlots(),
    ]
    return PassPipeline(passes, hardware=hardware, measured=measured)
