"""What programs do to a model beside forward and backward: to a compiled one, and what plain PyTorch does for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from random_cases import Case
from random_hooks import OF_MODULES, hook_parameter
from random_models import Block
from resuming import save_and_load
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.units import AutoWrapPolicy, find_units

LEARNING_RATE = 0.1


class Actions:
    """Those of a case on a model without graph_fsdp. ``case.options.program``: name → value, see ``PROGRAM`` of
    ``case_strategies.py``; a value per unit is taken modulo the units, in the order of ``find_units``."""

    def __init__(
        self, case: Case, model: nn.Module, policy: AutoWrapPolicy | None, ignored: Sequence[nn.Parameter]
    ) -> None:
        """``model``: before it is compiled."""
        self.case, self.model, self.given = case, model, case.options.program
        per_unit = {"divide", "summed", "hook", "keeps", "unshard", "reshard", "forward_prefetch", "backward_prefetch"}
        wanted = per_unit & set(self.given)
        self.units = [(unit.name, unit.parameters) for unit in find_units(model, policy, ignored)] if wanted else []
        self.trainable = [p.requires_grad for p in model.parameters()]
        self.optimizer: Any = None
        self.last, self.handles = True, list[Any]()
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        self.layers = [layer for block in blocks for layer in block.layers]
        self.hooked: list[nn.Module] = [model, *blocks, *self.layers]
        self.hook_modules("before")

    def hook_modules(self, when: str) -> list[Any]:
        """Those of the hooks of modules that are registered then: before compile, after it, or after a step. What
        reads a parameter is within a graph."""
        handles = []
        for kind, number, then in self.given.get("module_hooks", ()):
            modules = self.layers if kind == "reading" else self.hooked
            if then == when:
                handles.append(OF_MODULES[kind](modules[number % len(modules)]))
        return handles

    def made(self) -> None:
        """Set what holds for all of the training; ``model`` is compiled by now, if it is."""
        self.hook_modules("after")

    def begin(self) -> None:
        """Begin to train, from the first values."""
        for p, trainable in zip(self.model.parameters(), self.trainable, strict=True):
            p.requires_grad_(trainable)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=0.9, foreach=False)
        chosen = [p for p in self.model.parameters() if p.requires_grad]
        for kind, number, factor in self.given.get("gradient_hooks", ()) if chosen else ():
            handle = hook_parameter(kind, chosen[number % len(chosen)], factor, self.hooks_change)
            self.handles.append(handle)

    def hooks_change(self) -> bool:
        """Whether hooks find all of a gradient, and not what is added up before it is reduced."""
        kept = self.case.no_sync or {"replicas_late", "manual"} & set(self.given)
        return self.last or self.case.mesh.ranks == 1 or not kept

    def before_forward(self, last: bool) -> None:
        """``last``: of the micro-batches of a step."""
        self.last = last

    def before_backward(self) -> None:
        pass

    def with_gradients(self) -> None:
        """All of them are there, and averaged over ranks."""
        parameters, ranks = dict(self.model.named_parameters()), self.case.mesh.ranks
        for number, (_, names) in enumerate(self.units):
            factor = ranks / self.value("divide", number, float(ranks)) * self.value("hook", number, 1.0)
            for name in names:
                if (grad := parameters[name].grad) is not None:
                    grad.mul_(factor)
        if "clip" in self.given:
            self.clip(self.given["clip"])

    def clip(self, norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def step(self, number: int) -> None:
        """End a step, its ``number`` counts from 0."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none="grads_stay" not in self.given)
        if "whole" in self.given:
            self.scale(self.given["whole"])
        if "reload" in self.given:
            self.reload()
        parameters = list(self.model.parameters())
        for chosen in self.given.get("frozen_later", ()) if number == 0 else ():
            p = parameters[chosen % len(parameters)]
            p.grad = None
            p.requires_grad_(False)
        self.handles += self.hook_modules("step") if number == 0 else ()

    def scale(self, factor: float) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                if p.is_floating_point():
                    p.mul_(factor)

    def reload(self) -> None:
        pass

    def end(self) -> None:
        """Training has ended, and parameters are looked at."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def value(self, name: str, number: int, default: Any) -> Any:
        """Of a unit."""
        values = self.given.get(name)
        return values[number % len(values)] if values else default


class CompiledActions(Actions):
    """``compiled``: the model, or its parts that are compiled."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.compiled: list[Any] = []

    def made(self) -> None:
        super().made()
        model: Any = self.model
        modules: list[Any] = [model.get_submodule(name) for name, _ in self.units]
        for number, unit in enumerate(modules):
            if "divide" in self.given:
                unit.set_gradient_divide_factor(self.value("divide", number, 1.0))
            if "summed" in self.given:
                unit.set_force_sum_reduction_for_comms(self.value("summed", number, False))
            if (factor := self.value("hook", number, 1.0)) != 1.0:
                unit.set_all_reduce_hook(lambda reduced, factor=factor: reduced.mul_(factor))
            if "keeps" in self.given:
                unit.set_reshard_after_forward(self.value("keeps", number, True), recurse=False)
        for name in ("forward_prefetch", "backward_prefetch"):
            for first, *others in self.given.get(name, ()):
                chosen = dict.fromkeys(other % len(modules) for other in others)
                lists = getattr(modules[first % len(modules)], f"set_modules_to_{name}")
                lists([modules[other] for other in chosen if other != first % len(modules)])
        if "apart" in self.given:
            model.set_separate_reduce_scatter_group()
        for module in self.compiled if "manual" in self.given else ():
            module.set_manual_backward_finalization(True)
        if "in_flight" in self.given:
            model.set_reduce_scatter_max_input_buffers(self.given["in_flight"])
        if "custom" in self.given:
            model.set_custom_all_gather(_Gather())
            model.set_custom_reduce_scatter(_Reduction())

    def begin(self) -> None:
        super().begin()
        match self.given.get("optimizer"):
            case "slices":
                graph_fsdp.distribute_optimizer(self.optimizer)
            case "in_backward":
                graph_fsdp.distribute_optimizer(self.optimizer, in_backward=True)
            case int(units):
                graph_fsdp.distribute_optimizer(self.optimizer, gather_ahead=units)

    def hooks_change(self) -> bool:
        return True

    def before_forward(self, last: bool) -> None:
        super().before_forward(last)
        model: Any = self.model
        for module in self.compiled if self.case.no_sync else ():
            module.set_requires_gradient_sync(last)
        if "replicas_late" in self.given:
            model.set_requires_all_reduce(last)
        if "stays_whole" in self.given:
            model.set_reshard_after_backward(last)
        for number, is_async in self.given.get("unshard", ()):
            handle = self.unit(number).unshard(async_op=is_async)
            if handle is not None and number % 2:
                handle.wait()

    def before_backward(self) -> None:
        for number in self.given.get("reshard", ()):
            self.unit(number).reshard()

    def with_gradients(self) -> None:
        for module in self.compiled if "manual" in self.given else ():
            module.finalize_backward(async_op=self.given["manual"])
        if "clip" in self.given:
            self.clip(self.given["clip"])

    def clip(self, norm: float) -> None:
        model: Any = self.model
        model.clip_grad_norm_(norm)

    def step(self, number: int) -> None:
        if "unshard" in self.given:  # there was no backward that did so, if nothing needs a gradient
            for name, _ in self.units:
                model: Any = self.model.get_submodule(name)
                model.reshard()
        super().step(number)

    def end(self) -> None:
        """An evaluation leaves the units whole that are to be kept, until a backward ends."""
        super().end()
        for name, _ in self.units if "keeps" in self.given else ():
            model: Any = self.model.get_submodule(name)
            model.reshard()

    def scale(self, factor: float) -> None:
        with graph_fsdp.unsharded(self.model):
            super().scale(factor)

    def reload(self) -> None:
        """All is saved, and loaded again."""
        save_and_load(self.model, self.optimizer)

    def unit(self, number: int) -> Any:
        return self.model.get_submodule(self.units[number % len(self.units)][0])


class _Collective:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(tuple(size), float("nan"), dtype=dtype, device=device)


class _Gather(_Collective):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """End where it starts: the protocol lets it return nothing to wait for."""
        compat.all_gather_single(output_tensor, input_tensor.clone(), group=group)


class _Reduction(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return compat.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
