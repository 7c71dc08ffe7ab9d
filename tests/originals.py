"""The steps of the scripts that people come with, as their authors have them: with FSDP1, FSDP2 and, for DeepSpeed,
which is not installed, what its ZeRO-3 computes, with FSDP2. Each is the original of an example."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import CNN, load_digits
from from_fsdp2 import load, prefetch, save
from gpt import GPT, GPTConfig, counting
from torch import optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def fsdp1_mnist(epochs: int, batch: int, min_num_params: int) -> tuple[list[float], float]:
    """PyTorch's MNIST tutorial for FSDP1: the mean loss of each epoch over all ranks, and the accuracy afterwards.
    Two of its steps need an accelerator: ``CPUOffload``, which pins memory and changes no number, and saving."""
    rank, world = dist.get_rank(), dist.get_world_size()
    training, test = load_digits()
    torch.manual_seed(0)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    model = FSDP(CNN(8), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.85)
    shuffles = torch.Generator().manual_seed(0)
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(epochs):
        model.train()
        order = torch.randperm(len(training.labels), generator=shuffles)
        ddp_loss = torch.zeros(2, dtype=torch.float64)
        for begin in range(0, len(order) - batch + 1, batch):
            rows = order[begin : begin + batch].chunk(world)[rank]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(training.images[rows]), training.labels[rows])
            loss.backward()
            optimizer.step()
            ddp_loss += torch.tensor([loss.item(), 1])
        dist.all_reduce(ddp_loss)
        losses.append((ddp_loss[0] / ddp_loss[1]).item())
        scheduler.step()
    model.eval()
    with torch.no_grad():
        rows = torch.arange(len(test.labels)).chunk(world)[rank]
        correct = (model(test.images[rows]).argmax(1) == test.labels[rows]).sum()
    dist.all_reduce(correct)
    return losses, correct.item() / len(test.labels)


def fsdp2_transformer(
    steps: int, layers: int, length: int, batch: int, *, mixed: bool, explicit: bool, dcp_api: bool, folder: str
) -> list[float]:
    """PyTorch's FSDP2 tutorial, resumed from the checkpoint in ``folder`` and saved there: the losses."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, width=64, heads=4, context=length))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), **({"mp_policy": policy} if mixed else {})}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if explicit:
        prefetch(model.blocks)
    model.to_empty(device="cpu")
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    load(Path(folder), model, optimizer, dcp_api)
    draws = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        if explicit:
            model.unshard()
        loss = model(*counting(draws, batch, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    save(Path(folder), model, optimizer, dcp_api)
    return losses


def zero3(steps: int, layers: int, length: int) -> list[float]:
    """What ``from_deepspeed.ZERO3`` says, with FSDP2: bfloat16, two forwards of a step, a warm-up, clipping."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=layers, width=64, heads=4, context=length))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    draws = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 4)
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            loss = model(*counting(draws, 8, length))
            (loss / 2).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses
