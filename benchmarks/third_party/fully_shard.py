"""``fully_shard`` as one call of ``graph_fsdp.compile``: what a program shards part by part is compiled as a whole.

A part is kept until the model around it is sharded, and becomes one of its units. A module is a part if a module in its
callers' variables has it within.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import graph_fsdp

Part = tuple[nn.Module, ...]  # one unit
_OF_MODEL = ("reshard_after_forward", "offload_policy", "ignored_params", "dp_mesh_dims")


class FullyShard:
    """Called as torch's ``fully_shard``; returns what it was given. ``parts``: those whose model is still to come."""

    __name__: str  # some of torch's decorators ask for it

    def __init__(self) -> None:
        self.parts: list[tuple[Part, dict[str, Any]]] = []

    def __call__(self, module: Any, **options: Any) -> Any:
        part = tuple(module) if isinstance(module, (list, tuple)) else (module,)
        if len(part) > 1 or _is_part(module, sys._getframe(1)):
            self.parts.append((part, options))
        else:
            self._compile(module, options)
        return module

    def _compile(self, model: nn.Module, options: dict[str, Any]) -> None:
        within = set(model.modules())
        parts = [(part, given) for part, given in self.parts if within.issuperset(part)]
        self.parts = [each for each in self.parts if each not in parts]
        everything: list[tuple[Part, dict[str, Any]]] = [*parts, ((model,), options)]
        mesh = next((given["mesh"] for _, given in reversed(everything) if given.get("mesh") is not None), None)
        graph_fsdp.compile(
            model,
            mesh if mesh is not None else init_device_mesh("cpu", (dist.get_world_size(),)),
            auto_wrap_policy=[part if len(part) > 1 else part[0] for part, _ in parts] or [model],
            mp_policy=_policies(everything),
            shard_placement_fn=_placements(everything),
            backend="eager",
            **{name: options[name] for name in _OF_MODEL if name in options},
        )
        of_model = options.get("reshard_after_forward")
        for (first, *_), given in parts:
            own = given.get("reshard_after_forward")
            if isinstance(own, bool) and own != of_model and isinstance(first, FSDPModule):
                first.set_reshard_after_forward(own, recurse=False)


def _is_part(module: nn.Module, frame: FrameType | None) -> bool:
    while frame is not None:
        for value in frame.f_locals.values():
            models = value if isinstance(value, (list, tuple)) else (value,)
            for model in models:
                around = isinstance(model, nn.Module) and model is not module and not isinstance(model, FSDPModule)
                if around and any(module is part for part in model.modules()):
                    return True
        frame = frame.f_back
    return False


def _policies(everything: Sequence[tuple[Part, dict[str, Any]]]) -> Any:
    """The model's policy, or, where parts have others, a function from a module to its own."""
    own = {module: given.get("mp_policy", MixedPrecisionPolicy()) for part, given in everything for module in part}
    (model,), _ = everything[-1]
    return own[model] if len(set(own.values())) == 1 else own.get


def _placements(everything: Sequence[tuple[Part, dict[str, Any]]]) -> Callable[[nn.Parameter], Any] | None:
    """A function that asks, of each parameter, that of the innermost part that has it."""
    found: dict[nn.Parameter, Callable[[nn.Parameter], Any]] = {}
    for part, given in everything:
        for p in _parameters(part):
            found.setdefault(p, given.get("shard_placement_fn") or _nowhere)
    return None if all(function is _nowhere for function in found.values()) else lambda p: found[p](p)


def _parameters(part: Part) -> Iterator[nn.Parameter]:
    for module in part:
        yield from module.parameters()


def _nowhere(_: torch.Tensor) -> None:
    return None
