"""The functions that enter compiled code: a model's forward, that of one of its units, and registered methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError


@dataclass(frozen=True)
class Entry:
    """``function`` takes the module first. Each entry has graphs and plans of its own."""

    unit: str
    name: str
    function: Callable[..., Any]

    @property
    def suffix(self) -> str:
        """What the kinds of its graphs end with; equal on all ranks."""
        return "" if (self.unit, self.name) == ("", "forward") else f"/{self.unit}.{self.name}"

    @property
    def hint(self) -> str:
        if self.name == "forward":
            return ""
        return (
            f"\n  A method that calls the model in a loop of Python, as {self.name}() may, need not be registered: "
            "each call of the model is compiled."
        )


class Entered:
    """Names the engine, by number, whose compiled code runs or is traced: its model's functions are then its own."""

    engine = -1


@contextlib.contextmanager
def entered(engine: int) -> Iterator[None]:
    before, Entered.engine = Entered.engine, engine
    try:
        yield
    finally:
        Entered.engine = before


def differentiable_once(outputs: Any, before: Callable[[Any], None] | None = None) -> Any:
    """Outputs whose backward refuses ``create_graph=True``: what it recorded could not be differentiated. ``before``:
    called when their backward begins."""
    if torch.is_grad_enabled():
        tensors: list[Tensor] = []
        compat.tree_map_only(Tensor, tensors.append, outputs)
        for node in dict.fromkeys(tensor.grad_fn for tensor in tensors):
            if node is not None:
                node.register_prehook(_refuse_second_derivative)
                if before is not None:
                    node.register_prehook(before)
    return outputs


def _refuse_second_derivative(gradients: Any) -> None:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "backward with create_graph=True goes through a model compiled by graph_fsdp, and torch.compile cannot "
            "differentiate a backward again; compute a gradient penalty on a model that is not compiled (fully_shard), "
            "or by finite differences of the model's outputs"
        )
