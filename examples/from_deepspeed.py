"""A script for DeepSpeed ZeRO with graph_fsdp: its configuration file stays, and says the same.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/from_deepspeed.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/from_deepspeed.py \\
        --deepspeed-config zero3.json

A key that is not known here is an error that names it. docs/migrating.md has the steps beside those of the original.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig, counting
from ranks import Ranks, arguments, launched
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp.passes import default_pipeline

ZERO3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "stage3_max_live_parameters": 2e6,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
}

# What graph_fsdp does without being told, or what only says how DeepSpeed itself works.
WITHOUT_EFFECT = {
    "": {"steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "prescale_gradients"},
    "zero_optimization": {
        *("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "allgather_bucket_size"),
        *("reduce_bucket_size", "sub_group_size", "stage3_max_reuse_distance", "stage3_param_persistence_threshold"),
        "stage3_gather_16bit_weights_on_model_save",
    },
    "zero_optimization.offload_param": {"pin_memory", "buffer_count", "buffer_size", "max_in_cpu"},
    "zero_optimization.offload_optimizer": {"pin_memory", "buffer_count", "fast_init"},
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Keys:
    """A part of the file, of which every key has to be taken."""

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self.values, self.place = dict(values), place

    def take(self, key: str, default: Any = None) -> Any:
        value = self.values.pop(key, default)
        if value == "auto":
            raise ValueError(f"deepspeed_config: {self._name(key)} is 'auto', which transformers fills in; say a value")
        return value

    def part(self, key: str) -> Keys:
        return Keys(self.take(key) or {}, self._name(key))

    def done(self) -> list[str]:
        """Names of keys without effect here."""
        without = [key for key in self.values if key in WITHOUT_EFFECT.get(self.place, ())]
        unknown = [self._name(key) for key in self.values if key not in without]
        if unknown:
            raise ValueError(f"deepspeed_config: {', '.join(unknown)} has no counterpart here; take it out")
        return [self._name(key) for key in without]

    def _name(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key


@dataclass
class Settings:
    """What a configuration says, here."""

    compile: dict[str, Any]  # arguments of graph_fsdp.compile
    batch: int  # rows of a rank's forward
    accumulation: int  # forwards of a step
    clipping: float  # norm of the gradients, 0 for none
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None
    without_effect: list[str]


def read(config: Mapping[str, Any], ranks: Ranks) -> Settings:
    """
    Raises:
        ValueError: names a key that has no counterpart, or numbers that do not fit together.
    """
    top = Keys(config)
    accumulation = int(top.take("gradient_accumulation_steps", 1))
    total, batch = top.take("train_batch_size"), top.take("train_micro_batch_size_per_gpu")
    if batch is None:
        batch = (total or 0) // (accumulation * ranks.world)
    if batch < 1 or total not in (None, batch * accumulation * ranks.world):
        raise ValueError(
            f"deepspeed_config: train_batch_size {total} is not train_micro_batch_size_per_gpu {batch} x "
            f"gradient_accumulation_steps {accumulation} x {ranks.world} ranks"
        )
    clipping = float(top.take("gradient_clipping", 0))
    precision, itemsize, unused = mixed_precision(top)
    compile_arguments, zero_unused = zero(top.part("zero_optimization"), ranks, itemsize)
    optimizer, optimizer_unused = new_optimizer(top.part("optimizer"))
    scheduler = new_scheduler(top.part("scheduler")) if "scheduler" in top.values else None
    unused += zero_unused + optimizer_unused + top.done()
    compile_arguments["mp_policy"] = precision
    return Settings(compile_arguments, batch, accumulation, clipping, optimizer, scheduler, unused)


def mixed_precision(top: Keys) -> tuple[MixedPrecisionPolicy, int, list[str]]:
    """DeepSpeed reduces in the dtype that it computes in, where ``communication_data_type`` says nothing else."""
    communication, bf16, fp16 = top.take("communication_data_type"), top.part("bf16"), top.part("fp16")
    if fp16.take("enabled", False):
        raise ValueError("deepspeed_config: fp16.enabled needs torch.amp.GradScaler in the loop; take bf16, or add it")
    reduced = None if communication is None else DTYPES[communication]
    enabled = bf16.take("enabled", False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if enabled else None, reduce_dtype=reduced)
    return policy, 2 if enabled else 4, bf16.done() + [f"fp16.{key}" for key in fp16.values]


def zero(part: Keys, ranks: Ranks, itemsize: int) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {"mesh": ranks.mesh}
    stage = part.take("stage", 0)
    if stage == 0 and ranks.mesh is not None:
        found["mesh"] = init_device_mesh(ranks.device.type, (ranks.world,), mesh_dim_names=("replicate",))
    elif stage in (1, 2):
        found["reshard_after_forward"] = False
    elif stage == 3:
        found["reshard_after_forward"] = True
    elif stage != 0:
        raise ValueError(f"deepspeed_config: zero_optimization.stage is {stage}; it is 0, 1, 2 or 3")
    unused = []
    for name in ("offload_param", "offload_optimizer"):
        offload = part.part(name)
        device = offload.take("device", "none")
        if device == "cpu":  # here both stay where the shards are
            found["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type != "cpu")
        elif device != "none":
            raise ValueError(f"deepspeed_config: {offload.place}.device is {device!r}; here it is 'cpu' or 'none'")
        unused += offload.done()
    live, bucket = part.take("stage3_max_live_parameters"), part.take("stage3_prefetch_bucket_size")
    if live is not None or bucket is not None:  # both count elements
        found["passes"] = default_pipeline(
            bucket="unit" if bucket is None else int(bucket) * itemsize,
            budget=None if live is None else int(live) * itemsize,
        )
    return found, unused + part.done()


def new_optimizer(part: Keys) -> tuple[Callable[[nn.Module], torch.optim.Optimizer], list[str]]:
    kind, params = part.take("type", "AdamW"), part.take("params") or {}
    kinds = {"Adam": torch.optim.AdamW, "AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
    if kind not in kinds:  # DeepSpeed's own Adam decays weights as AdamW does
        raise ValueError(f"deepspeed_config: optimizer.type is {kind!r}; here it is one of {', '.join(kinds)}")
    return lambda model: kinds[kind](model.parameters(), **params), part.done()


def new_scheduler(part: Keys) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """WarmupLR, from ``warmup_min_lr`` to ``warmup_max_lr`` in equal steps."""
    kind, params = part.take("type"), part.part("params")
    low, high = params.take("warmup_min_lr", 0.0), params.take("warmup_max_lr", 1e-3)
    steps, shape = params.take("warmup_num_steps", 1000), params.take("warmup_type", "log")
    if (kind, shape) != ("WarmupLR", "linear"):
        raise ValueError(f"deepspeed_config: scheduler {kind}, {shape}: here it is WarmupLR with warmup_type linear")
    params.done()
    part.done()

    def new(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        for group in optimizer.param_groups:
            group["lr"] = high
        factors: Callable[[int], float] = lambda step: min(1.0, (low + (high - low) * step / steps) / high)  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factors)

    return new


def run(given: Sequence[str] | None = None) -> list[float]:
    """The losses of each forward on this rank, nats."""
    parser = arguments(str(__doc__), steps=10, layers=4, width=64, heads=4, length=32)
    parser.add_argument("--deepspeed-config", "--deepspeed_config", type=Path, help="JSON (default: its own ZeRO-3)")
    args = parser.parse_args(given)
    with launched(args.device) as ranks:
        config = json.loads(args.deepspeed_config.read_text()) if args.deepspeed_config else ZERO3
        settings = read(config, ranks)
        ranks.say(f"without effect here: {', '.join(settings.without_effect) or 'nothing'}")
        torch.manual_seed(args.seed)
        model = GPT(GPTConfig(layers=args.layers, width=args.width, heads=args.heads, context=args.length))
        graph_fsdp.compile(model.to(ranks.device), **settings.compile, backend=args.backend)
        optimizer = settings.optimizer(model)
        scheduler = settings.scheduler(optimizer) if settings.scheduler else None
        draws = torch.Generator().manual_seed(args.seed + ranks.rank)
        losses = []
        for step in range(args.steps):
            for part in range(settings.accumulation):
                model.set_requires_gradient_sync(part == settings.accumulation - 1)
                inputs, targets = counting(draws, settings.batch, args.length)
                loss = model(inputs.to(ranks.device), targets.to(ranks.device))
                (loss / settings.accumulation).backward()
                losses.append(loss.item())
            if settings.clipping:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clipping)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
            ranks.say(f"step {step + 1} loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    run()
