"""Seconds on given hardware, by the cost model of ``graph_fsdp.passes``: of an operator's call (one kernel, unfused),
and of a collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from simulated_link import Link, Message
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graph_fsdp.passes import HARDWARE, Graph, GroupShape, Hardware
from graph_fsdp.passes.analysis.cost import CostModel


class Kernels:
    """Remembers the seconds of calls by operator, shapes and other arguments."""

    def __init__(self, hardware: Hardware) -> None:
        self.model = CostModel(hardware, {}, fused=False)
        self._known: dict[Any, float] = {}

    def copy(self, target: Tensor, source: Tensor) -> float:
        """On the device, or between it and the host."""
        if target.device != source.device:
            return self.model.transfer_seconds(min(target.nbytes, source.nbytes))
        return self.call(torch.ops.aten.copy_.default, (target, source), {}, target)

    def call(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> float:
        """``value``: what the call writes. What it only writes is not among the arguments."""
        leaves, structure = pytree.tree_flatten((args, kwargs, value))
        key = (operator, structure, *map(_described, leaves))
        try:
            return self._known[key]
        except KeyError:
            self._known[key] = self._seconds(operator, args, kwargs, value)
            return self._known[key]
        except TypeError:  # an argument that is no key
            return self._seconds(operator, args, kwargs, value)

    def _seconds(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> float:
        graph = fx.Graph()

        def given(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = _meta(leaf)
            return node

        args, kwargs = pytree.tree_map(given, (tuple(args), kwargs))
        node = graph.call_function(operator, args, kwargs)
        node.meta["val"] = pytree.tree_map(lambda leaf: _meta(leaf) if isinstance(leaf, Tensor) else leaf, value)
        graph.output((node,))
        module: Any = SimpleNamespace(graph=graph)  # a GraphModule would generate code
        return self.model.graph_seconds(Graph(module, "forward"))[node]


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _described(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True)
class Network(Link):
    """The links between the ranks of a cluster of ``hardware``, on which collectives take what the cost model says."""

    bandwidth: float = math.inf
    latency: float = 0.0
    hardware: Hardware = HARDWARE["h100"]

    def seconds(self, messages: Sequence[Message], group: dist.ProcessGroup) -> float:
        model, size = self._model(group), group.size()
        doubled = any(message.kind == "all_reduce" for message in messages)
        # A ring moves all of the full buffer but one rank's part of it, and for an all-reduce twice as much.
        full = sum(message.moved for message in messages) * size / (size - 1)
        return model.all_reduce_seconds(full / 2, "group") if doubled else model.all_gather_seconds(full, "group")

    def levels(self, group: dist.ProcessGroup) -> frozenset[str]:
        return self._model(group).levels("group")

    def _model(self, group: dist.ProcessGroup) -> CostModel:
        first, second, *_ = [*dist.get_process_group_ranks(group), 1, 1]
        return CostModel(self.hardware, {"group": GroupShape(group.size(), max(1, second - first))})
