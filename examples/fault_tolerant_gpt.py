"""A GPT on replica groups that may die: the others leave a dead one out, and heal it when it comes back.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/fault_tolerant_gpt.py --replica 0 &
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/fault_tolerant_gpt.py --replica 1 &

Each group shards over the ranks of its own torchrun. Kill one (`kill -9` of a rank ends its torchrun), and start the
same command again, or have torchrun do so with `--max-restarts` and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: losses go on
as if its batches had been left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft
from gpt import GPT, GPTConfig, counting
from ranks import Ranks, arguments, launched

import graph_fsdp
from graph_fsdp.integrations.torchft import replicate


def manager_of(replica: int, ranks: Ranks) -> torchft.Manager:
    """The manager of this rank. The first rank of the group makes it before the others look for its address in the
    store, where an attempt before may have left another."""
    kinds = {"cpu": torchft.ProcessGroupGloo, "cuda": torchft.ProcessGroupNCCL, "xpu": torchft.ProcessGroupXCCL}
    if ranks.rank > 0:
        dist.barrier()
    manager = torchft.Manager(
        pg=kinds[ranks.device.type](timeout=timedelta(seconds=30)),  # a lost host is left out after so long
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        use_async_quorum=False,  # a group heals before its forward, and takes part in its first step
    )
    if ranks.rank == 0:
        dist.barrier()
    return manager


def run(given: Sequence[str] | None = None) -> None:
    numbers = {"replica": 0, "steps": 100, "batch": 8, "layers": 2, "width": 64, "heads": 2, "context": 16, "vocab": 64}
    args = arguments(__doc__, **numbers, lr=3e-3).parse_args(given)
    config = GPTConfig(**{name: getattr(args, name) for name in ("vocab", "layers", "width", "heads", "context")})
    with launched(args.device) as ranks:
        torch.manual_seed(args.seed)
        model = graph_fsdp.compile(GPT(config).to(ranks.device), ranks.mesh, backend=args.backend)
        manager = manager_of(args.replica, ranks)
        optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=args.lr))
        replicate(model, manager, optimizer)
        while manager.current_step() < args.steps:
            optimizer.zero_grad()  # and who takes part in this step is known
            step = manager.current_step()  # that of the others, if this group has healed
            draws = torch.Generator().manual_seed(step * 1000 + args.replica * ranks.world + ranks.rank)
            inputs, targets = counting(draws, args.batch, args.context, args.vocab)
            loss = model(inputs.to(ranks.device), targets.to(ranks.device))
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()  # if all of it has arrived; else the next step is this one again
            (total,) = ranks.sums(loss.item())
            done = "" if manager.current_step() > step else ", to be repeated"
            ranks.say(f"step {step} loss {total / ranks.world:.4f} of {manager.num_participants()} replicas{done}")
        dist.barrier()
        manager.shutdown()


if __name__ == "__main__":
    run()
