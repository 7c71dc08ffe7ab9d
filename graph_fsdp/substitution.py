"""A graph's placeholder parameters become shards: what Dynamo traced with has full shapes, what AOTAutograd traces has
those of this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from graph_fsdp.passes import PassContext, compat
from graph_fsdp.sharding import Storage
from graph_fsdp.tensor_parallel import as_model_uses_it


def substitute_shards(
    module: fx.GraphModule, inputs: list[Any], context: PassContext, storage: Storage
) -> list[tuple[int, str]]:
    """Which inputs of the graph are placeholders, and of which parameters; ``inputs`` gets fake shards in their
    places, which ``context`` is told of."""
    mode = compat.current_fake_mode()
    substituted = []
    for index, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder"):
        argument = node.meta.get("grapharg")
        example = getattr(argument, "example", None)
        parameter = storage.by_placeholder.get(id(example)) if example is not None else None
        if parameter is None:
            continue
        with mode:
            shard = torch.empty_strided(
                parameter.spec.shard_shape,
                parameter.input.stride(),
                dtype=parameter.spec.dtype,
                device=parameter.input.device,
                requires_grad=parameter.placeholder.requires_grad,
            )
        context.shard_inputs[node] = (parameter.spec, shard)
        if isinstance(parameter.placeholder, DTensor):
            context.as_used[node] = as_model_uses_it(parameter.placeholder)
        inputs[index] = shard
        substituted.append((index, parameter.spec.name))
    return substituted
