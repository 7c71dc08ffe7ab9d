"""Four models through ``backend="xla"`` on four virtual devices: eight steps of AdamW equal one device's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from reference import Outcome
from torch import nn
from xla_launch import DEVICES, run_xla
from xla_models import MODELS, check_training, train

# The global view of the other two is in test_xla_auto.py.
TRAININGS = [*((name, "manual") for name in MODELS), ("llama", "auto"), ("vit", "auto")]


def compiled(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    import graph_fsdp

    return graph_fsdp.compile(model, mesh, backend="xla", **options)


def train_compiled(name: str, sharding: str) -> tuple[Outcome, dict[str, int], dict[str, int]]:
    """What the training has seen, and bytes of parameters and of the optimizer's state: all, and on a device."""
    import torch

    whole, held = {"parameters": 0, "optimizer": 0}, {"parameters": 0, "optimizer": 0}

    def count(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import torch_xla

        torch_xla.sync(wait=True)
        for name, parameter in model.named_parameters():
            state = [t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor) and t.dim()]
            assert len(state) == 2, name
            for kind, tensors in (("parameters", [parameter]), ("optimizer", state)):
                whole[kind] += sum(t.numel() * t.element_size() for t in tensors)
                held[kind] += sum(_bytes_of_a_device(t) for t in tensors)

    outcome = train(name, functools.partial(compiled, sharding=sharding), after_last_step=count)
    return outcome, whole, held


def _bytes_of_a_device(tensor: Any) -> int:
    from graph_fsdp.compat import xla as compat_xla

    shard = compat_xla.device_shards(tensor.detach())[0].padded
    return shard.numel() * shard.element_size()


@pytest.mark.parametrize(("name", "sharding"), TRAININGS)
def test_four_devices_equal_one(name: str, sharding: str) -> None:
    outcome, whole, held = run_xla(train_compiled, name, sharding)
    check_training(name, outcome, global_batch=sharding == "auto")
    for kind in whole:
        padding = 1.1  # rows that do not divide by the devices, of small parameters
        assert whole[kind] / DEVICES <= held[kind] <= padding * whole[kind] / DEVICES
