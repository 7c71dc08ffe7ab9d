"""Fully sharded data parallelism in the manner of SimpleFSDP, small enough to be read beside what it is compared with.

R. Zhang et al., "SimpleFSDP: Simpler Fully Sharded Data Parallel with torch.compile" (arXiv 2411.00284). A parameter is
a DTensor shard; reading it from its module redistributes it to a replica (an all-gather), whose gradient is a partial
sum (a reduce-scatter in backward). The whole model is then compiled, communication and all. With ``reshard`` the
redistribution is a checkpoint whose policy computes everything again, so that backward gathers again (ZeRO-3).

What torchtitan adds for GPUs by private compiler passes (bucketing, reordering) is left out: each parameter is a
collective of its own, and Inductor keeps the order of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def shard_parameters(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard: bool) -> None:
    """Turn all parameters into shards over ``mesh`` that are gathered when they are read."""
    shards: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay one
    for module in list(model.modules()):
        properties = {}
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in shards:
                shards[parameter] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            module.register_parameter(name, shards[parameter])
            properties[name] = _property(name, policy, reshard)
        if properties:
            module.__class__ = type(f"Sharded{type(module).__name__}", (type(module),), properties)


def _property(name: str, policy: MixedPrecisionPolicy, reshard: bool) -> property:
    dtypes = policy.param_dtype, policy.reduce_dtype

    def read(module: nn.Module) -> Tensor:
        shard = module._parameters[name]
        assert isinstance(shard, DTensor)
        if not reshard:
            return _gather(shard, *dtypes)
        full: Tensor = checkpoint(_gather, shard, *dtypes, use_reentrant=False, context_fn=_gather_again)
        return full

    return property(read)


def _gather(shard: DTensor, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> Tensor:
    full = shard.redistribute(placements=[Replicate()], forward_dtype=param_dtype, backward_dtype=reduce_dtype)
    return full.to_local(grad_placements=[Partial("avg")])


def _gather_again() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)
