"""The partitioner saves a part of the activations that it would save by itself."""

from __future__ import annotations

import contextlib
import operator
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._inductor import fx_utils


def budget_that_is_set() -> float:
    """Return what a user has asked of ``torch.compile``: the part of the activations that a partitioner may save."""
    return functorch_config.activation_memory_budget


@contextlib.contextmanager
def activation_memory_budget(budget: float) -> Iterator[None]:
    """Let the partitioner save this part of the activations for backward; 1 is its own rule. What a user has set is not
    looked at. The meshes of DTensors, which are inputs of a graph since torch 2.13, count as nothing.

    Until torch 2.13 it takes an operator of several results, which has no storage, for an input of a graph that has a
    symbolic size among its inputs, which has none either, and saves nothing of it: a dropout's mask would be drawn
    again."""
    options = {"activation_memory_budget": budget}
    if budget == 1:
        with functorch_config.patch(options):
            yield
        return
    choose = partitioners.choose_saved_values_set

    def chosen(*args: Any, **kwargs: Any) -> list[torch.fx.Node]:
        return list(dict.fromkeys(node for found in choose(*args, **kwargs) for node in _tensors_of(found)))

    def storage_of(node: torch.fx.Node) -> Any:
        storage = get_storage(node)
        return node if storage is None else storage

    get_storage = fx_utils.get_node_storage
    if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
        options["unsafe_treat_script_objects_as_zero_size"] = True
    with (
        functorch_config.patch(options),
        unittest.mock.patch.object(partitioners, "choose_saved_values_set", chosen),
        unittest.mock.patch.object(fx_utils, "get_node_storage", storage_of),
    ):
        yield


def _tensors_of(saved: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the results of an operator that has several: a forward graph cannot return the operator itself."""
    if isinstance(saved.meta.get("val"), (tuple, list)):
        return [user for user in saved.users if user.target is operator.getitem]
    return [saved]
