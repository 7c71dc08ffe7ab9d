"""Trainings on four virtual devices beside one without any sharding (`tests/reference.py`), for four models.

| model | what is particular |
|---|---|
| ``example_gpt`` | the GPT of the examples: computes its loss itself, a scalar |
| ``llama`` | Hugging Face: a dict of outputs; rotary tables are buffers |
| ``cnn_batchnorm`` | statistics over the rows that are together, and buffers that are written |
| ``vit`` | Hugging Face: a convolution and a parameter that is no module's weight |

AdamW makes a full step in the direction of a rounding error where the gradient is zero but for that. So no model has a
bias of attention's keys, or of a convolution before BatchNorm, and ``eps`` is well above the rounding of single values
and well below the gradients.

[Note: whose statistics]
BatchNorm sees a device's rows in the local view of a graph (``global_batch=False``: the reference computes each
device's rows by themselves and averages), and all rows in the global view (``global_batch=True``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import CASES, CLASSES, SEQUENCE, VOCABULARY, WIDTH, Batch, Case, hf_images, loss_of
from reference import OPTIMIZERS, Outcome, Step, check_close, train_reference
from torch import Tensor, nn
from torch.optim import AdamW
from xla_launch import DEVICES

sys.path.append(str(Path(__file__).parents[2] / "examples"))

ROWS = 4  # of each device
# Of the largest difference of a tensor, over its largest value. A bias that begins at zero is as large as what it has
# moved, so that this is the rounding of gradients: up to 1.05e-5 of BatchNorm's, as a processor sums.
BOUND = 5e-5
STEPS = 8


def example_gpt() -> nn.Module:
    from gpt import GPT, GPTConfig

    return GPT(GPTConfig(vocab=VOCABULARY, layers=2, width=WIDTH, heads=2, context=SEQUENCE))


def text(rows: int, generator: torch.Generator) -> Batch:
    inputs = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=generator)
    return {"inputs": inputs, "targets": (5 * inputs + 3) % VOCABULARY}


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=CLASSES,
        qkv_bias=False,
    )
    return ViTForImageClassification(config)


OPTIMIZERS.setdefault("adamw_eps", lambda parameters: AdamW(parameters, lr=1e-3, eps=1e-5))
CASES.setdefault("example_gpt", Case(example_gpt, text))
CASES.setdefault("vit_no_key_bias", Case(vit, hf_images))
MODELS = {
    "gpt": "example_gpt",
    "llama": "hf_llama",
    "cnn_batchnorm": "cnn_batchnorm",
    "vit": "vit_no_key_bias",
    "lstm": "lstm",
}


def reference(name: str, *, global_batch: bool, steps: int = STEPS, optimizer: str = "adamw_eps") -> list[Outcome]:
    """What each of the devices must see, or, with ``global_batch``, all of them together; see the note above."""
    plan = [Step(ROWS)] * steps
    return train_reference(MODELS[name], plan, optimizer, world_size=DEVICES, global_batch=global_batch)


def fsdp_mesh() -> Any:
    """All devices along one axis named ``fsdp``; SPMD is on afterwards, for the rest of the process."""
    import numpy
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    return xs.Mesh(numpy.arange(DEVICES), (DEVICES,), ("fsdp",))


def to_devices(batch: Batch, mesh: Any) -> Batch:
    """On the XLA device, rows sharded over the axis ``fsdp``."""
    import torch_xla.distributed.spmd as xs

    sharded = {}
    for name, tensor in batch.items():
        moved = tensor.to("xla")
        xs.mark_sharding(moved, mesh, ("fsdp", *(None,) * (tensor.dim() - 1)))
        sharded[name] = moved
    return sharded


def train(
    name: str,
    wrap: Callable[[nn.Module, Any], nn.Module],
    *,
    steps: int = STEPS,
    optimizer: str = "adamw_eps",
    mesh: Any = None,
    after_last_step: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None,
) -> Outcome:
    """Train a model on all devices of this process. ``wrap`` takes it, on the CPU, and a mesh, and returns what is
    called.

    What comes back is on the CPU: losses (the mean over devices where each has its own), and parameters and buffers
    under the names that they had.
    """
    import torch_xla

    mesh = fsdp_mesh() if mesh is None else mesh
    case = CASES[MODELS[name]]
    module = case.model()
    model = wrap(module, mesh)
    step_optimizer = OPTIMIZERS[optimizer](iter(list(model.parameters())))
    outcome = Outcome()
    for index in range(steps):
        loss = loss_of(model, to_devices(case.batch(DEVICES * ROWS, index), mesh)).mean()
        loss.backward()
        step_optimizer.step()
        if after_last_step is not None and index == steps - 1:
            after_last_step(model, step_optimizer)
        step_optimizer.zero_grad()
        torch_xla.sync()
        outcome.losses.append(loss.detach().cpu())
    outcome.parameters = {name: on_cpu(p) for name, p in module.named_parameters()}
    outcome.buffers = {name: on_cpu(b) for name, b in module.named_buffers()}
    return outcome


def on_cpu(tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its parts are."""
    tensor = tensor.detach()
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).cpu()


def check_training(
    name: str, outcome: Outcome, *, global_batch: bool, steps: int = STEPS, bound: float = BOUND, buffers: bool = True
) -> None:
    """Losses, parameters and buffers of a training against the reference's; all parameters must have moved.

    A buffer is the same on all devices: the mean of what it would be on each.
    """
    expected = reference(name, global_batch=global_batch, steps=steps)
    losses = torch.stack([torch.stack(rank.losses) for rank in expected]).mean(0)
    assert len(losses) == steps
    check_close(dict(enumerate(outcome.losses)), dict(enumerate(losses)), bound, "losses")
    check_close(outcome.parameters, expected[0].parameters, bound, "parameters")
    if buffers:
        means = {n: _mean([rank.buffers[n] for rank in expected]) for n in expected[0].buffers}
        check_close(outcome.buffers, means, bound, "buffers")
    initial = dict(CASES[MODELS[name]].model().named_parameters())
    moved = {n: (p - initial[n]).abs().max().item() for n, p in outcome.parameters.items()}
    still = [n for n, distance in moved.items() if distance < steps * 1e-4]
    assert not still, f"parameters that hardly moved: {still}"


def _mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0) if tensors[0].is_floating_point() else tensors[0]
