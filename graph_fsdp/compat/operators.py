"""Operators as objects: their types, their schemas, and those that nothing public names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions as get_decompositions
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils import _pytree
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.flop_counter import flop_registry as flop_registry

pytree = _pytree  # its functions for values of any structure: lists, dicts, dataclasses

foreach_copy: Callable[..., Any] = torch._foreach_copy_
set_grad_enabled: Callable[..., Any] = torch._C._set_grad_enabled
log_api_usage: Callable[..., Any] = torch._C._log_api_usage_once


def schema_arguments(operator: OpOverload[..., Any]) -> list[Any]:
    """With ``name`` and ``default_value`` each."""
    return list(operator._schema.arguments)
