"""Options of ``graph_fsdp.compile``, and what programs do to a compiled model, alone and together, as trainings."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from both_devices import Training, ours
from models import MLP, MLPBlock
from option_actions import (
    accumulated,
    accumulated_shards,
    clipped,
    custom,
    divided,
    evaluated,
    hooked,
    interrupted,
    monitored,
    one_reduction,
    optimized_beside,
    prefetch_lists,
    profiled,
    read_monitor,
    resharded,
    saved,
    separate_group,
    state_on_the_host,
    two_models,
    unsharded,
    whole,
)
from test_extensions import extended
from test_extensions_float8 import Scaled
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from graph_fsdp.passes import HARDWARE, ActivationCheckpointing, default_pipeline

Place: TypeAlias = Literal["made", "forward", "backward", "optimizer", "end"]
Action: TypeAlias = Callable[[Any], None]
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "hybrid": ((2, 2), ("replicate", "shard")),
    "replicated": ((4,), ("replicate",)),
    "from the CPU": ((4,), ("fsdp",)),
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
INT8 = MixedPrecisionPolicy(reduce_dtype=torch.int8)
# One more message costs less than a copy: buckets are gathered in several.
_QUICK = dataclasses.replace(HARDWARE["h100"].intra, latency=1e-12)
CHEAP_MESSAGES = dataclasses.replace(HARDWARE["h100"], intra=_QUICK, inter=_QUICK)
DEPTH = 2


@dataclass(frozen=True)
class Option:
    """``compile``: keyword arguments; ``pipeline``: those of ``default_pipeline``; ``mesh``: of ``MESHES``; ``make``:
    another model; ``at``: what it does in a step. Numbers of the training: "kept" are those without the option,
    "changed" are others, and "mixed" others that also depend on what else is set."""

    compile: Mapping[str, Any] = field(default_factory=dict)
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    mesh: str = ""
    make: Callable[[], nn.Module] | None = None
    at: Mapping[Place, Action] = field(default_factory=dict)
    numbers: Literal["kept", "changed", "mixed"] = "kept"

    @property
    def parts(self) -> set[str]:
        """What two options cannot both set."""
        others = {name for name in ("mesh", "make") if getattr(self, name)}
        return {*self.compile, *self.pipeline, *others}


class Checkpointed(MLPBlock):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


class Breaking(MLPBlock):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def _columns(p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.dim() > 1 else None


OPTIONS: dict[str, Option] = {
    "ZeRO-3": Option({"reshard_after_forward": True}),
    "ZeRO-2": Option({"reshard_after_forward": False}),
    "int": Option({"reshard_after_forward": 2}),
    "auto": Option({"reshard_after_forward": "auto"}, {"budget": 8_000}),
    "HSDP": Option(mesh="hybrid", numbers="changed"),
    "replicated": Option(mesh="replicated", numbers="changed"),
    "from the CPU": Option(mesh="from the CPU"),
    "columns": Option({"shard_placement_fn": _columns}, numbers="changed"),
    "one unit": Option({"auto_wrap_policy": {MLP}}),
    "bf16": Option({"mp_policy": BF16}, numbers="changed"),
    "fp16": Option({"mp_policy": FP16}, numbers="mixed"),
    "int8 gradients": Option({"mp_policy": INT8}, numbers="mixed"),
    "float8": Option(make=lambda: extended(Scaled, depth=DEPTH), numbers="changed"),
    "float8, offload": Option(
        {"offload_policy": CPUOffloadPolicy()}, make=lambda: extended(Scaled, depth=DEPTH), numbers="changed"
    ),
    "offload": Option({"offload_policy": CPUOffloadPolicy()}),
    "offload, pageable": Option({"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "activation offload": Option({"activation_checkpointing": "offload"}),
    "units recomputed": Option({"activation_checkpointing": "unit"}),
    "selective": Option({"activation_checkpointing": "selective"}),
    "both": Option({"activation_checkpointing": ActivationCheckpointing(recompute="selective", offload=True)}),
    "checkpoint()": Option(make=lambda: MLP(DEPTH, block=lambda width: Checkpointed(width))),
    "graph breaks": Option({"fullgraph": False}, make=lambda: MLP(DEPTH, block=lambda width: Breaking(width))),
    "accumulation": Option(at={"forward": accumulated}),
    "accumulated shards": Option(mesh="hybrid", at={"forward": accumulated_shards}, numbers="changed"),
    "serial": Option({}, {"prefetch": 0, "reductions_in_flight": 1}),
    "three ahead": Option({}, {"prefetch": 3, "reductions_in_flight": 4}),
    "weight gradients delayed": Option({}, {"delay_wgrad": 2}),
    "post": Option({}, {"prefetch": BackwardPrefetch.BACKWARD_POST, "bucket": "none"}),
    "forward prefetch": Option({}, {"forward_prefetch": 1}),
    "small buckets": Option({}, {"bucket": 700}),
    "messages": Option({}, {"hardware": CHEAP_MESSAGES}),
    "budget": Option({}, {"prefetch": 2, "budget": 9_000}),
    "prefetch lists": Option(at={"made": prefetch_lists}),
    "one reduction": Option(at={"made": one_reduction}),
    "reductions apart": Option(at={"made": separate_group}),
    "custom collectives": Option(at={"made": custom}),
    "divided": Option(at={"made": divided}, numbers="changed"),
    "hooked": Option(at={"made": hooked}, numbers="changed"),
    "unshard()": Option(at={"forward": unsharded}, numbers="changed"),
    "reshard()": Option({"reshard_after_forward": False}, at={"backward": resharded}),
    "whole": Option(at={"end": whole}, numbers="changed"),
    "evaluation": Option(at={"end": evaluated}, numbers="changed"),
    "monitor": Option(at={"made": monitored, "end": read_monitor}),
    "profile": Option(at={"made": profiled}),
    "state offload": Option(at={"made": state_on_the_host}),
    "clipped": Option(at={"optimizer": clipped}, numbers="mixed"),
    "saved": Option(at={"end": saved}),
    "interrupted": Option(at={"forward": interrupted}),
    "optimizer beside": Option(at={"made": optimized_beside}),
    "two models": Option(at={"backward": two_models}, numbers="changed"),
}


def rows(generator: torch.Generator) -> Tensor:
    return torch.randn(16, 16, generator=generator)  # of two kilobytes in a block: less is not offloaded


class OptionTraining(Training):
    """A model with these options, in training on a device. A step is of two micro-batches, ``last`` says which."""

    def __init__(self, names: Sequence[str], device: str) -> None:
        self.options = [OPTIONS[name] for name in names]
        self.last, self.others = False, []  # type: ignore[var-annotated]
        given = dict(itertools.chain.from_iterable(option.compile.items() for option in self.options))
        pipeline = dict(itertools.chain.from_iterable(option.pipeline.items() for option in self.options))
        # The schedule of the device that is not there, on both.
        given["passes"] = default_pipeline(**{"hardware": "h100", **pipeline})
        self.mesh = next((option.mesh for option in self.options if option.mesh), "")
        if self.mesh:
            shape, dimensions = MESHES[self.mesh]
            given["mesh"] = init_device_mesh(device, shape, mesh_dim_names=dimensions)
        make = next((option.make for option in self.options if option.make), functools.partial(MLP, DEPTH))

        def shard(model: nn.Module) -> nn.Module:
            return ours(model.cpu() if self.mesh == "from the CPU" else model, **given)

        super().__init__(shard, make, rows, device)
        self.update: Callable[[], Any] = self.updated
        self.at("made")

    def at(self, place: Place) -> None:
        for option in self.options:
            if place in option.at:
                option.at[place](self)

    def generators(self) -> list[torch.Generator]:
        return [self.generator, *(other.generator for other, _ in self.others)]

    def state(self) -> list[Tensor]:
        return [*super().state(), *(value for other, _ in self.others for value in other.state())]

    def updated(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> Tensor:
        losses = []
        for self.last in (False, True):
            self.at("forward")
            loss = self.loss()
            self.at("backward")
            loss.backward()
            losses.append(loss.detach())
        self.at("optimizer")
        self.update()
        self.at("end")
        return torch.stack(losses)


def trained(names: Sequence[str], device: str) -> list[Tensor]:
    return OptionTraining(names, device).values(steps=2)


def reference(names: Sequence[str]) -> tuple[str, ...]:
    """Those options without which the numbers would be others."""
    if any(OPTIONS[name].numbers == "mixed" for name in names):
        return tuple(names)
    return tuple(name for name in names if OPTIONS[name].numbers == "changed")


def pairs(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Random pairs of options that can both be set."""
    draw, drawn = random.Random(seed), set[tuple[str, str]]()
    while len(drawn) < count:
        first, second = sorted(draw.sample(sorted(OPTIONS), 2))
        if OPTIONS[first].parts & OPTIONS[second].parts or (first, second) in drawn:
            continue
        drawn.add((first, second))
        yield first, second
