"""The script of PyTorch's FSDP2 tutorial with graph_fsdp: a Transformer made on the meta device, mixed precision,
explicit prefetching, clipped gradients, and a checkpoint of whole tensors that the next start resumes from.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/from_fsdp2.py --checkpoints runs
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/from_fsdp2.py \\
        --mixed-precision --explicit-prefetching --dcp-api

docs/migrating.md has its steps beside those of the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, counting
from ranks import Ranks, arguments, launched
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

import graph_fsdp


def prefetch(blocks: Sequence[Any], ahead: int = 2) -> None:
    """Each block's forward gathers the next ones, its backward those before it."""
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + ahead]))
        block.set_modules_to_backward_prefetch(list(blocks[max(0, index - ahead) : index])[::-1])


def whole(value: Any) -> Any:
    """A sharded tensor gathered, on the CPU."""
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, dcp_api: bool) -> None:
    """Whole tensors, written by the first rank; all ranks call it. With ``dcp_api`` the names of the optimizer's state
    are those of the parameters, and else their numbers."""
    if dcp_api:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # empty but on the first rank
        of_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
        parts = get_model_state_dict(model, options=options), of_optimizer
    else:
        state = optimizer.state_dict()
        whole_state = {key: {name: whole(v) for name, v in entry.items()} for key, entry in state["state"].items()}
        parts = {name: whole(v) for name, v in model.state_dict().items()}, {**state, "state": whole_state}
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(parts, folder / "checkpoint.partial")
        (folder / "checkpoint.partial").replace(folder / "checkpoint.pt")  # the one before may still be mapped
    if dist.is_initialized():
        dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, dcp_api: bool) -> None:
    parameters, state = torch.load(folder / "checkpoint.pt", mmap=True, weights_only=True, map_location="cpu")
    if dcp_api:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
        set_model_state_dict(model, parameters, options=options)
        set_optimizer_state_dict(model, optimizer, state, options=options)
        return
    shards = dict(model.named_parameters())

    def sharded(value: Tensor, like: Tensor) -> Tensor:
        if isinstance(like, DTensor) and value.shape == like.shape:  # not a count of steps
            return distribute_tensor(value, like.device_mesh, like.placements)
        return value

    model.load_state_dict({name: sharded(value, shards[name]) for name, value in parameters.items()})
    of = [p for group in optimizer.param_groups for p in group["params"]]
    entries = state["state"].items()
    state["state"] = {key: {name: sharded(v, of[key]) for name, v in entry.items()} for key, entry in entries}
    optimizer.load_state_dict(state)


def new_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def run(given: Sequence[str] | None = None) -> list[float]:
    """The losses of each step on this rank, nats."""
    parser = arguments(str(__doc__), steps=10, layers=10, width=64, heads=4, length=64, batch=32, lr=1e-2)
    parser.add_argument("--explicit-prefetching", action="store_true")
    parser.add_argument("--mixed-precision", action="store_true", help="compute in bfloat16, reduce in float32")
    parser.add_argument("--dcp-api", action="store_true", help="checkpoints by DCP's state dicts, not by DTensor's")
    parser.add_argument("--checkpoints", type=Path, help="folder: resume from it, and save there")
    args = parser.parse_args(given)
    with launched(args.device) as ranks:
        torch.manual_seed(args.seed)
        with torch.device("meta"):
            model = GPT(GPTConfig(layers=args.layers, width=args.width, heads=args.heads, context=args.length))
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mp_policy = bf16 if args.mixed_precision else MixedPrecisionPolicy()
        graph_fsdp.compile(model, ranks.mesh, mp_policy=mp_policy, backend=args.backend)
        if args.explicit_prefetching:
            prefetch(model.blocks)
        optimizer = new_optimizer(model, args.lr)
        if args.checkpoints is not None and (args.checkpoints / "checkpoint.pt").exists():
            load(args.checkpoints, model, optimizer, args.dcp_api)
        losses = train(model, optimizer, ranks, args)
        if args.checkpoints is not None:
            save(args.checkpoints, model, optimizer, args.dcp_api)
    return losses


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, args: Any) -> list[float]:
    draws = torch.Generator().manual_seed(args.seed + ranks.rank)  # each rank has its own batches
    losses = []
    for step in range(args.steps):
        if args.explicit_prefetching:
            model.unshard()
        inputs, targets = counting(draws, args.batch, args.length)
        loss = model(inputs.to(ranks.device), targets.to(ranks.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ranks.say(f"step {step + 1} loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    run()
