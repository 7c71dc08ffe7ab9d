"""What the ranks of a model must have in common before anything is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graph_fsdp.parameters.extensions import describe

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


def facts(engine: Engine) -> list[str]:
    """A line each, which ranks compare before they plan."""
    spec = engine.spec
    lines = [f"torch {torch.__version__}", f"backend {engine.backend.name}"]
    lines.append(f"regions {'whole' if engine.whole else 'cut'}")
    lines += ["CUDA graphs"] if engine.cuda_graphs is not None else []
    lines.append(f"reshard_after_forward {engine.reshard_after_forward}")
    lines.append(f"mesh of {spec.replicas} replicas of {spec.world_size} ranks")
    if spec.offload is not None:
        device, pinned = spec.offload.device.type, spec.offload.pin_memory
        lines.append(f"shards on the {'pinned ' if pinned else ''}CPU, computed with on {device}")
    if spec.reshard_size:
        lines.append(f"resharded to {spec.reshard_size} ranks")
    lines += [f"pass {p.settings()}" for p in engine.pipeline]
    for bucket in spec.buckets:
        lines.append(f"bucket {bucket.name} in {len(bucket.messages) or 1} messages {list(bucket.messages)}")
    for p in spec.parameters.values():
        dtypes = " ".join(str(d).removeprefix("torch.") for d in (p.dtype, p.param_dtype, p.reduce_dtype))
        frozen = "" if p.trainable else " frozen"
        dim = f" sharded on dimension {p.shard_dim}" if p.shard_dim else ""
        lines.append(f"parameter {p.name} {list(p.shape)} of unit {p.unit or 'root'} {dtypes}{frozen}{dim}")
    return [*lines, *describe(engine.extensions)]
