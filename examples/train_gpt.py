"""Train a small GPT on bytes of text, sharded by graph_fsdp.

    python examples/train_gpt.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_gpt.py --steps 20
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 \\
        examples/train_gpt.py --checkpoint runs
    python examples/train_gpt.py --backend xla      # one process has all XLA devices of its host

With `--checkpoint` it resumes by itself from the last complete checkpoint, on any number of ranks that divides the rows
of a step: when torchrun restarts it after a rank has died, or when it is started again. (The variable gives restarted
ranks a new store: in the old one they could take what dead ranks left for each other's.)

The text is the Python standard library's own source, or any file or folder given by `--text`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import xla_devices
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import graph_fsdp
from graph_fsdp import checkpoint


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, help="file or folder of text (default: the standard library)")
    parser.add_argument("--backend", choices=("inductor", "eager", "xla"), default="inductor")
    parser.add_argument("--device", help="cpu, cuda or xpu (default: the accelerator, or else cpu; xla's own)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, reduce in float32")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank, or XLA device")
    parser.add_argument("--lr", type=float, default=6e-4, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--eval-batches", type=int, default=16, help="validation batches per rank")
    parser.add_argument("--report", type=Path, help="write every graph after every pass to this file")
    parser.add_argument("--checkpoint", type=Path, help="folder: save there, and resume from what is there")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--memory-every", type=int, default=0, help="steps, for those in the memory of hosts (0: none)")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that are kept")
    return parser.parse_args()


def load_text(path: Path | None) -> tuple[Tensor, Tensor]:
    """Training and validation bytes: the first 95 % of the text and the rest."""
    if path is not None:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    else:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        files = [p for p in sorted(root.rglob("*.py")) if skipped.isdisjoint(p.relative_to(root).parts)]
    data = torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in files)), dtype=torch.uint8)
    split = int(0.95 * len(data))
    return data[:split], data[split:]


def windows(data: Tensor, starts: Tensor, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Inputs, and the same bytes one position later, as int64 of shape (len(starts), context)."""
    chunks = data[starts[:, None] + torch.arange(args.context + 1)].long()
    batch = chunks[:, :-1].contiguous(), chunks[:, 1:].contiguous()
    if args.device == "xla":
        return xla_devices.shard_batch(batch)
    return batch[0].to(args.device), batch[1].to(args.device)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warmup over a tenth of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(1, args.steps // 10)
    if step <= warmup:
        return args.lr * step / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def local_bytes(tensors: Iterable[object]) -> int:
    """Bytes that this rank, or XLA device, holds; numbers on the host among an optimizer's state do not count."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    held = [t for t in local if isinstance(t, Tensor)]
    return sum(
        xla_devices.bytes_of_a_device(t) if t.device.type == "xla" else t.numel() * t.element_size() for t in held
    )


def memory_line(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    parameters = list(model.parameters())
    state = [value for values in optimizer.state.values() for value in values.values()]
    sizes = {
        "parameters": local_bytes(parameters),
        "gradients": local_bytes(p.grad for p in parameters),
        "optimizer": local_bytes(state),
    }
    return "bytes per rank: " + ", ".join(f"{name} {size:,}" for name, size in sizes.items())


@torch.no_grad()
def validation_loss(model: nn.Module, data: Tensor, args: argparse.Namespace, rank: int, world: int) -> float:
    """Mean nats per byte over windows spread evenly over the validation text, shared out among the ranks."""
    model.eval()
    count = args.batch * args.eval_batches * world
    starts = torch.linspace(0, len(data) - args.context - 1, count).long()[rank::world]
    losses = [model(*windows(data, part, args)) for part in starts.split(args.batch)]
    model.train()
    return mean_over_ranks(torch.stack(losses).mean())


class Data:
    """Windows of the text, drawn for all ranks at once: those of a step do not depend on how many ranks share them."""

    def __init__(self, text: Tensor, rows: int, args: argparse.Namespace) -> None:
        self.text, self.rows, self.args = text, rows, args
        self.draws = torch.Generator().manual_seed(args.seed * 1_000_003)

    def next(self, rank: int, world: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.text) - self.args.context, (self.rows,), generator=self.draws)
        return windows(self.text, starts.chunk(world)[rank], self.args)

    def state_dict(self) -> dict[str, object]:
        return {"rows": self.rows, "draws": self.draws.get_state()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.rows = int(state["rows"])
        self.draws.set_state(state["draws"])


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, folder: Path | None) -> int:
    """Load the last complete checkpoint, if there is one. The step that it was saved after."""
    newest = checkpoint.latest(folder, model) if folder else None
    return checkpoint.load(newest, model, optimizer, extra={"data": data})["step"] if newest else 0


def write_report(report: graph_fsdp.GraphReport, path: Path) -> None:
    with path.open("w") as file:
        print(report, file=file)
        for graph in (report.forward, report.backward):
            for stage in graph.stages.values():
                print(stage.code, file=file)


def main() -> None:
    args = parse_arguments()
    if args.backend == "xla":
        args.device = "xla"
    elif args.device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        args.device = accelerator.type if accelerator else "cpu"
    rank, world, mesh, devices = 0, 1, None, 1
    if args.backend == "xla":
        mesh = xla_devices.make_mesh()
        devices = int(mesh.size())
        args.batch *= devices
    elif "RANK" in os.environ:  # set by torchrun
        dist.init_process_group(dist.get_default_backend_for_device(args.device))
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh(args.device, (world,))
        if args.device != "cpu":
            args.device = f"{args.device}:{os.environ['LOCAL_RANK']}"

    # Every rank makes the same weights, and draws the same windows of the text, of which it takes its own.
    torch.manual_seed(args.seed)
    training, validation = load_text(args.text)
    config = GPTConfig(layers=args.layers, width=args.width, heads=args.heads, context=args.context)
    model = GPT(config).to("cpu" if args.backend == "xla" else args.device)
    size = sum(p.numel() for p in model.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = graph_fsdp.compile(
        model, mesh, backend=args.backend, mp_policy=policy if args.bf16 else MixedPrecisionPolicy()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), foreach=True)

    data = Data(training, args.batch * world, args)
    done = resume(model, optimizer, data, args.checkpoint)
    if data.rows % world:
        raise ValueError(
            f"{data.rows} rows of a step cannot be shared out equally among {world} ranks; start on others"
        )

    def say(line: str) -> None:
        if rank == 0:
            tqdm.write(line)
            sys.stdout.flush()

    say(f"{size:,} parameters on {world * devices} x {args.device}, {args.backend}; {len(training):,} bytes of text")
    if done:
        say(f"resumed after step {done}")
    terminal = sys.stderr.isatty()
    bar = tqdm(total=args.steps, initial=done, unit="step", disable=rank != 0 or not terminal)
    saves: dict[bool, checkpoint.PendingSave] = {}
    start = time.perf_counter()
    for step in range(done + 1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.zero_grad()
        loss = model(*data.next(rank, world))
        loss.backward()
        optimizer.step()
        if args.backend == "xla":
            xla_devices.sync()
        mean = mean_over_ranks(loss.detach())
        bar.update()
        bar.set_postfix(loss=f"{mean:.3f}")
        if not terminal:
            say(f"step {step} loss {mean:.6f}")
        to_disk = step % args.checkpoint_every == 0 or step == args.steps
        to_memory = not to_disk and args.memory_every > 0 and step % args.memory_every == 0
        if args.checkpoint and (to_disk or to_memory):
            extra, path = {"step": step, "data": data}, args.checkpoint / f"step_{step}"
            where = {"keep": args.keep} if to_disk else {"memory": True}
            saves[to_disk] = checkpoint.save(path, model, optimizer, extra=extra, asynchronous=True, **where)
        if step == done + 1:
            say(f"first step, compilation included: {time.perf_counter() - start:.1f} s")
            start = time.perf_counter()
    seconds = time.perf_counter() - start
    for save in saves.values():
        save.result()
    bar.close()

    if args.steps > done + 1:
        tokens = (args.steps - done - 1) * data.rows * args.context
        say(f"{tokens / seconds:,.0f} tokens per second over {seconds:.1f} s")
    say(memory_line(model, optimizer))
    if args.report and rank == 0:
        write_report(graph_fsdp.inspect(model), args.report)
    say(f"final validation loss {validation_loss(model, validation, args, rank, world):.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
