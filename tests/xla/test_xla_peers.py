"""torch_xla's own FSDPv2 in the harness of these tests: what it measures is known to be right."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from reference import Outcome
from torch import nn
from xla_launch import run_xla
from xla_models import BOUND, check_training, train


def fsdpv2(model: nn.Module, mesh: Any) -> nn.Module:
    from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    blocks = {type(m) for m in model.modules() if type(m).__name__ in ("Block", "LlamaDecoderLayer", "ViTLayer")}
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks) if blocks else None
    return SpmdFullyShardedDataParallel(model.to("xla"), mesh=mesh, auto_wrap_policy=policy, shard_output=shard_first)


def shard_first(output: Any, mesh: Any) -> None:
    import torch_xla.distributed.spmd as xs

    logits = getattr(output, "logits", output)
    logits = logits[0] if isinstance(logits, tuple) else logits
    if logits.dim():
        xs.mark_sharding(logits, mesh, ("fsdp", *(None,) * (logits.dim() - 1)))


def train_fsdpv2(name: str) -> Outcome:
    outcome = train(name, fsdpv2)
    outcome.parameters = {n.replace("_orig_module.", ""): p for n, p in outcome.parameters.items()}
    return outcome


# XLA's own BatchNorm takes the variance as a mean of squares less a squared mean, which is off by more.
BOUNDS = {"gpt": BOUND, "cnn_batchnorm": 1e-4}


@pytest.mark.parametrize("name", BOUNDS)
def test_fsdpv2_equals_one_device(name: str) -> None:
    check_training(name, run_xla(train_fsdpv2, name), global_batch=True, bound=BOUNDS[name], buffers=False)
