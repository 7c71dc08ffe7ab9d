"""The implementations of data parallelism that the benchmarks compare, each a function of a few lines.

A builder takes a model, whole and on its device, and returns what is called in its place. What its parameters are
afterwards (shards or whole) is what the optimizer updates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import graph_fsdp


@dataclass(frozen=True)
class Setup:
    """``blocks``: finds the repeated blocks of a model. ``reshard_after_forward``: True is ZeRO-3, False ZeRO-2, None
    what each implementation does by itself."""

    blocks: Callable[[nn.Module], nn.ModuleList]
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard_after_forward: bool | None = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.mesh.device_type)


Builder = Callable[[nn.Module, Setup], nn.Module]


@dataclass(frozen=True)
class Implementation:
    """``alone``: each rank trains on its own batches, without the others. ``inductor``: compiles with it."""

    about: str
    build: Builder
    alone: bool = False
    inductor: bool = True


# graph_fsdp


def ours(**options: Any) -> Builder:
    def build(model: nn.Module, setup: Setup) -> nn.Module:
        return graph_fsdp.compile(
            model,
            setup.mesh,
            mp_policy=setup.policy,
            reshard_after_forward=setup.reshard_after_forward,
            **options,
        )

    return build


# Whole replicas


class CastParameters(nn.Module):
    """Computes with parameters of another dtype than they are kept and updated in: what ``MixedPrecisionPolicy`` is to
    a sharded model. ``None`` changes nothing."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, **batch: Tensor) -> Any:
        if self.dtype is None:
            return self.model(**batch)
        cast = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, cast, (), batch)


def eager_alone(model: nn.Module, setup: Setup) -> nn.Module:
    return CastParameters(model, setup.policy.param_dtype)


def eager_replicated(model: nn.Module, setup: Setup) -> nn.Module:
    """The definition of data parallelism, in as little code as it takes: gradients are means over the ranks."""

    def reduce(parameter: Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=setup.mesh.get_group())
        parameter.grad /= setup.mesh.size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return CastParameters(model, setup.policy.param_dtype)


def local(model: nn.Module, setup: Setup) -> nn.Module:
    return _compiled(CastParameters(model, setup.policy.param_dtype))


def ddp(model: nn.Module, setup: Setup) -> nn.Module:
    model = CastParameters(model, setup.policy.param_dtype)
    replicated = DistributedDataParallel(model, process_group=setup.mesh.get_group(), gradient_as_bucket_view=True)
    return _compiled(replicated)


def _compiled(model: nn.Module, **options: Any) -> nn.Module:
    compiled = torch.compile(model, **options)
    assert isinstance(compiled, nn.Module)
    return compiled


# FSDP2


def fsdp2(model: nn.Module, setup: Setup) -> nn.Module:
    for block in setup.blocks(model):
        _fully_shard(block, setup)
    return _fully_shard(model, setup)


def fsdp2_compiled(model: nn.Module, setup: Setup) -> nn.Module:
    """Blocks compiled one by one, as torchtitan does it: hooks run between compiled code."""
    for block in setup.blocks(model):
        block.compile(fullgraph=True)
    return fsdp2(model, setup)


def _fully_shard(module: nn.Module, setup: Setup) -> nn.Module:
    return fully_shard(
        module, mesh=setup.mesh, mp_policy=setup.policy, reshard_after_forward=setup.reshard_after_forward
    )


# SimpleFSDP


def simple_fsdp(model: nn.Module, setup: Setup) -> nn.Module:
    from simple_fsdp import shard_parameters

    shard_parameters(model, setup.mesh, setup.policy, reshard=setup.reshard_after_forward is not False)
    return _compiled(model, fullgraph=True)


def _find_implementations() -> dict[str, Implementation]:
    found = {
        "ours_eager": Implementation("graph_fsdp, eager backend", ours(backend="eager"), inductor=False),
        "ours": Implementation("graph_fsdp, Inductor by regions", ours(backend="inductor")),
        "local": Implementation("torch.compile of the plain model, no communication", local, alone=True),
        "ddp": Implementation("DistributedDataParallel, torch.compile", ddp),
        "fsdp2": Implementation("FSDP2, eager", fsdp2, inductor=False),
        "fsdp2_compiled": Implementation("FSDP2, blocks compiled", fsdp2_compiled),
        "simple_fsdp": Implementation("SimpleFSDP, torch.compile of the whole model", simple_fsdp),
    }
    if "regions" in inspect.signature(graph_fsdp.compile).parameters:
        whole = Implementation("graph_fsdp, Inductor on whole graphs", ours(backend="inductor", regions="whole"))
        found["ours_whole"] = whole
    if torch.cuda.is_available():
        graphs = Implementation("graph_fsdp, Inductor by regions, as CUDA graphs", ours(cuda_graphs=True))
        found["ours_cuda_graphs"] = graphs
    return found


IMPLEMENTATIONS = _find_implementations()

# What losses are compared with. All of it is plain PyTorch without torch.compile.
REFERENCE = Implementation("plain PyTorch, gradients all-reduced", eager_replicated, inductor=False)
REFERENCE_ALONE = Implementation("plain PyTorch", eager_alone, alone=True, inductor=False)
