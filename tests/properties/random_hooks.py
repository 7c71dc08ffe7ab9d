"""Hooks of modules and of parameters that change values, for models with graph_fsdp and without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle


def _mapped(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: change(x) if x.is_floating_point() else x, values)


def _before(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return _mapped(lambda x: x * 1.25, args)


def _before_with_names(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _mapped(lambda x: x.sin() * 1.5, args), kwargs


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _mapped(lambda x: x * 0.75 + 0.125, output)


def _reading(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Add what a parameter of the module is."""
    found = [p for p in module.parameters() if p.is_floating_point() and p.numel()]
    return _mapped(lambda x: x + found[-1].sum().tanh().to(x.dtype), output) if found else None


def _backward(module: nn.Module, into: Any, of: Any) -> Any:
    return _mapped(lambda grad: grad * 0.5, into)


def _before_backward(module: nn.Module, of: Any) -> Any:
    return _mapped(lambda grad: grad * 0.75, of)


OF_MODULES: dict[str, Callable[[nn.Module], RemovableHandle]] = {
    "before": lambda m: m.register_forward_pre_hook(_before),
    "before, first": lambda m: m.register_forward_pre_hook(_before_with_names, prepend=True, with_kwargs=True),
    "after": lambda m: m.register_forward_hook(_after),
    "after, always": lambda m: m.register_forward_hook(_after, always_call=True),
    "reading": lambda m: m.register_forward_hook(_reading),
    "backward": lambda m: m.register_full_backward_hook(_backward),
    "before backward": lambda m: m.register_full_backward_pre_hook(_before_backward),
}
OF_BACKWARD = {"backward", "before backward"}


def hook_parameter(kind: str, p: nn.Parameter, factor: float, active: Callable[[], bool]) -> RemovableHandle:
    """Multiply a parameter's gradients by a factor: each before it is added ("before"), or what has been added, in
    place ("after") or not ("other")."""
    if kind == "before":
        return p.register_hook(lambda grad: grad * factor)

    def after(p: Tensor) -> None:
        assert p.grad is not None
        if active() and kind == "after":
            p.grad.mul_(factor)
        elif active():
            p.grad = p.grad * factor

    return p.register_post_accumulate_grad_hook(after)
