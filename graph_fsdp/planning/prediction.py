"""``graph_fsdp.plan`` predicts what a training step takes on a cluster that is not there."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from graph_fsdp.compat import pytree
from graph_fsdp.parameters.inputs import tokens_in
from graph_fsdp.passes import Hardware, PassPipeline, default_pipeline, find_hardware
from graph_fsdp.passes.analysis.kernels import Kind, kind_of, node_flops
from graph_fsdp.passes.analysis.memory import shards_on_device
from graph_fsdp.passes.analysis.optimizers import OPTIMIZERS, optimizer_seconds
from graph_fsdp.passes.analysis.simulate import Conditions
from graph_fsdp.passes.ir.settings import check_flags
from graph_fsdp.passes.pipeline import collector_paused
from graph_fsdp.planning.allocator import Reserved, StepAllocations, planned_step, replay
from graph_fsdp.planning.dimensions import Dimensions, Parallelize
from graph_fsdp.planning.tracing import Traced, find_dimensions, trace
from graph_fsdp.report.report import GraphReport

Optimizer = Literal["adamw", "adamw_foreach", "adamw_on_cpu", "sgd", "momentum", None]

_GRADIENT_PASSES = 3  # backward multiplies twice where forward multiplies once


class Plan(GraphReport):
    """Reports on graphs that were planned and did not run, with what a training step takes on one rank, as the cost and
    the memory model predict it. Times are in seconds, sizes in bytes."""

    def __init__(
        self,
        traced: Traced,
        dimensions: Dimensions,
        optimizer: Optimizer,
        inputs: Any,
        conditions: Conditions,
        clips_gradients: bool,
        expandable_segments: bool,
    ) -> None:
        """Take the ``inputs`` of one rank: ``tokens`` of the first 2-D integers, ``rows`` of the first tensor."""
        self.__dict__.update(traced.report.__dict__)
        assert traced.context.cost is not None
        self.traced, self.hardware = traced, traced.context.cost.hardware
        self.dimensions, self.optimizer = dimensions, optimizer
        self.inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
        leaves = pytree.tree_leaves(self.inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.tokens = tokens_in(self.inputs)
        self.rows = next((t.shape[0] for t in tensors if t.dim()), None)
        self.conditions, self.clips_gradients = conditions, clips_gradients
        self.expandable_segments = expandable_segments
        self._views = [self.latest(phase) for phase in traced.graphs]
        for view in self._views:
            view.conditions = conditions
        parameters = self.spec.parameters.values()
        self._numel = sum(math.prod(p.shape) for p in parameters)
        trained = [p for p in parameters if p.trainable and "backward" in traced.graphs]
        # What an optimizer does with shards on the CPU takes that one's time and memory.
        here = bool(shards_on_device(traced.context))
        self._trained_nbytes = here * sum(p.shard_numel * p.dtype.itemsize for p in trained)

    @property
    def mesh_shape(self) -> tuple[int, ...] | dict[str, int]:
        """Return ``(ranks that shard,)`` or ``(replicas, ranks that shard)``; with other dimensions, their sizes."""
        return self.dimensions.plain_shape if self.dimensions.is_plain else self.dimensions.sizes()

    # Time

    @property
    def graph_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase's graph."""
        return {view.phase: view.scheduled().timeline.seconds for view in self._views}

    @property
    def compute_seconds(self) -> float:
        return sum(view.scheduled().timeline.compute for view in self._views)

    @property
    def exposed_seconds(self) -> float:
        """Return the seconds in which the device waits for communication."""
        return sum(view.scheduled().timeline.exposed for view in self._views)

    @property
    def optimizer_seconds(self) -> float:
        """Return the seconds of the optimizer's memory traffic, and of clipping gradients, on the slowest rank."""
        clips, straggler = self.clips_gradients, self.conditions.straggler
        return optimizer_seconds(self.optimizer, self._trained_nbytes, self.hardware, clips=clips, straggler=straggler)

    @property
    def step_seconds(self) -> float:
        return sum(self.graph_seconds.values()) + self.optimizer_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second of one rank; None where no input looks like tokens. Ranks of ``tp`` share
        theirs."""
        return None if self.tokens is None else self.tokens / self.dimensions.tp / self.step_seconds

    @functools.cached_property
    def model_flops(self) -> int:
        """Return the FLOPs of the model's matrix multiplications in a step: those of forward, three times in training.
        What backward recomputes does not count."""
        times = _GRADIENT_PASSES if "forward" in self.traced.graphs else 1
        return times * sum(node_flops(node) for node in self.traced.forward.nodes if kind_of(node) is Kind.KERNEL)

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilisation (Chowdhery et al. 2022), by the peak in most parameters' dtype."""
        return self.model_flops / (self.step_seconds * self.peak_flops)

    @property
    def peak_flops(self) -> float:
        """Return the hardware's FLOP/s in most parameters' dtype."""
        dtypes = [p.param_dtype for p in self.spec.parameters.values()]
        return self.hardware.peak_flops(max(dict.fromkeys(dtypes), key=dtypes.count, default=torch.float32))

    # Memory

    @property
    def memory(self) -> dict[str, int]:
        """Return the bytes of each category where the most are held; "optimizer" is its state."""
        found = [view.memory for view in self._views if view.memory is not None]
        highest = max(found, key=lambda memory: memory.peak)
        parts: dict[str, int] = {category: nbytes for category, nbytes in highest.by_category.items()}
        if state := OPTIMIZERS[self.optimizer].kept * self._trained_nbytes:
            parts["optimizer"] = state
        return parts

    @property
    def peak_nbytes(self) -> int:
        return sum(self.memory.values())

    @functools.cached_property
    def reserved(self) -> Reserved:
        """Return what torch's caching allocator reserves: ``peak_nbytes`` with gradients and free blocks."""
        return replay(self.step(), expandable_segments=self.expandable_segments)

    def step(self) -> StepAllocations:
        """Return what a step allocates and frees."""
        traffic = OPTIMIZERS[self.optimizer]
        return planned_step(self.traced.graphs, self.traced.context, traffic.kept, traffic.temporaries)

    @property
    def fits(self) -> bool:
        """Say whether live tensors fit; what is reserved beyond them torch gives back before it fails."""
        return self.peak_nbytes <= self.hardware.memory

    def summary(self) -> dict[str, Any]:
        """Return the plan's figures as a dict that ``json.dumps`` takes."""
        return {
            "hardware": self.hardware.name,
            "mesh_shape": self.mesh_shape if isinstance(self.mesh_shape, dict) else list(self.mesh_shape),
            "parameters": self._numel,
            "step_seconds": self.step_seconds,
            **{f"{phase}_seconds": seconds for phase, seconds in self.graph_seconds.items()},
            "optimizer_seconds": self.optimizer_seconds,
            "compute_seconds": self.compute_seconds,
            "exposed_seconds": self.exposed_seconds,
            "tokens_per_second": self.tokens_per_second,
            "rows_per_second": None if self.rows is None else self.rows / self.step_seconds,
            "model_flops": self.model_flops,
            "mfu": self.mfu,
            "peak_nbytes": self.peak_nbytes,
            "reserved_nbytes": self.reserved.nbytes,
            "memory": self.memory,
            "fits": self.fits,
            "conditions": dataclasses.asdict(self.conditions),
        }

    def __str__(self) -> str:
        seconds = ", ".join(f"{phase} {s * 1e3:,.1f}" for phase, s in self.graph_seconds.items())
        speed = f"{self.tokens_per_second:,.0f} tokens/s per rank, " if self.tokens_per_second is not None else ""
        held = ", ".join(f"{name} {n / 1e9:.2f}" for name, n in sorted(self.memory.items(), key=lambda i: -i[1]))
        room = "fits" if self.fits else "does not fit"
        met = f", with {self.conditions}" if str(self.conditions) else ""
        over = self.fits and self.reserved.nbytes > self.hardware.memory
        more = ", more than there is: torch will wait for the device, and give back free blocks" if over else ""
        lines = [
            f"plan: {self._numel:,} parameters on a mesh of {self.dimensions} {self.hardware.name}{met}",
            f"  step {self.step_seconds * 1e3:,.1f} ms: {seconds}, optimizer {self.optimizer_seconds * 1e3:,.1f}; "
            f"exposed communication {self.exposed_seconds * 1e3:,.1f}",
            f"  {speed}{self.mfu:.1%} MFU",
            f"  peak {self.peak_nbytes / 1e9:.2f} GB, {room} in {self.hardware.memory / 1e9:.0f}: {held}",
            f"  reserved {self.reserved.nbytes / 1e9:.2f} GB{more}",
        ]
        return "\n".join(lines)


@collector_paused()
def plan(
    model_fn: Callable[[], nn.Module],
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    mesh_shape: Mapping[str, int] | Sequence[int] | Dimensions,
    hardware: str | Hardware,
    parallelize: Parallelize | None = None,
    finalization: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer = "adamw",
    clip_gradients: bool = False,
    expandable_segments: bool = False,
    straggler: float = 1.0,
    contention: bool = False,
    **compile_options: Any,
) -> Plan:
    """Predict what a training step of a model takes on a mesh of ranks, without devices, weights or other processes.

    The result is the report of ``graph_fsdp.inspect`` with predicted times and bytes.

    Args:
        model_fn: builds the model, on the meta device.
        example_inputs: of one rank: positional, or a mapping of keyword arguments.
        mesh_shape: ``(ranks that shard,)``, ``(replicas, ranks that shard)``, or ``{name: size}`` of the dimensions of
            :mod:`graph_fsdp.planning.dimensions`, but ``pp``: see :func:`graph_fsdp.planning.plan_pipeline`.
        parallelize: divides the model over ``tp``, ``cp`` and ``ep``, as the training program does.
        finalization: plan a microbatch, which keeps its gradients; see :func:`graph_fsdp.planning.trace`.
        hardware: of every rank: a name of ``graph_fsdp.passes.HARDWARE``, or a description.
        loss: computes the loss of the model's outputs; None if the model computes it.
        optimizer: whose state and time count: "adamw" (fused), "adamw_foreach", "adamw_on_cpu" (``offload_state=True``:
            its copies count, and not what the CPU computes), "sgd", "momentum" (SGD with it), None for none.
        clip_gradients: whether gradients are clipped by their norm, before the optimizer.
        expandable_segments: whether the allocator has them, as by ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
        straggler: how many times slower than the others one rank computes.
        contention: whether collectives share links with each other, and processors with compute
            (:class:`graph_fsdp.passes.analysis.simulate.Conditions`).
        compile_options: of :func:`graph_fsdp.compile`; ``meshes`` by name, as in ``{Experts: "efsdp"}``, see
            :func:`graph_fsdp.planning.trace`.

    Raises:
        ValueError: an argument has a value that cannot be; for hardware, the message lists what is known.
        TypeError: ``passes`` is no PassPipeline, or a switch is neither True nor False.
        MeshError: the mesh does not divide into the hardware's nodes.
        All that :func:`graph_fsdp.planning.trace` raises.
    """
    described, conditions = find_hardware(hardware), Conditions(straggler, contention)
    if optimizer not in OPTIMIZERS:
        known = ", ".join(map(repr, OPTIMIZERS))
        raise ValueError(f"optimizer: {optimizer!r} is not known; known are {known}")
    check_flags(clip_gradients=clip_gradients, expandable_segments=expandable_segments, finalization=finalization)
    passes = _pipeline_for(described, compile_options.pop("passes", None))
    dimensions = find_dimensions(mesh_shape, parallelize, None, compile_options)
    if dimensions.pp > 1 and not finalization:
        raise ValueError(
            f"mesh_shape: pp={dimensions.pp} are stages, which are programs of their own; call "
            "graph_fsdp.planning.plan_pipeline"
        )
    dimensions.check_nodes(described)
    traced = trace(
        model_fn,
        example_inputs,
        mesh_shape=dimensions,
        parallelize=parallelize,
        finalization=finalization,
        loss=loss,
        passes=passes,
        **compile_options,
    )
    return Plan(traced, dimensions, optimizer, example_inputs, conditions, clip_gradients, expandable_segments)


def _pipeline_for(described: Hardware, passes: Any) -> PassPipeline:
    """Return the user's passes, or the default ones, with the cost model of this hardware."""
    if passes is None:
        return default_pipeline(hardware=described)
    if not isinstance(passes, PassPipeline):
        raise TypeError(f"passes must be a PassPipeline, got {type(passes).__name__}")
    if passes.hardware is None:
        return PassPipeline(passes.passes, hardware=described, measured=passes.measured)
    if (own := find_hardware(passes.hardware)) != described:
        raise ValueError(
            f"passes: the pipeline is for {own.name}, and hardware is {described.name}; give both the same"
        )
    return passes
