"""Does a training suffer from gradients of 8 bits? Losses, errors of gradients and bytes, beside bfloat16.

    OMP_NUM_THREADS=1 python benchmarks/low_precision.py --steps 500

Trains the GPT of ``examples/gpt.py`` on the bytes of the Python standard library's source, from the same weights and on
the same windows in every case. It computes in float32, and only the type of reductions differs.

- loss: the mean over ranks and over the 20 steps that end there, in nats per byte; the last column over windows of
  text that no step has seen;
- error: ``|found - exact| / |exact|`` of all gradients of the first step and of one more step after the last, norms
  over all parameters, against a float32 reduction at the same weights;
- sent: bytes of gradients that a rank gives to reductions in a step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from harness import command_of, default_device, machine, parser_of, process_group, run_on_ranks
from tables import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.layout import quantized_sends

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig
from train_gpt import Data, learning_rate, load_text, mean_over_ranks, validation_loss

CASES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
WINDOW = 20  # steps that a loss is the mean of


def gpt(dtype: str, mesh: DeviceMesh, options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=options.layers, width=options.width, heads=options.heads, context=options.length))
    policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, dtype))
    return graph_fsdp.compile(model, mesh, backend="eager", mp_policy=policy)


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """All gradients of a step, whole and flat, on every rank."""
    model(*batch).backward()
    found = [p.grad for p in model.parameters()]
    flat = torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in found])  # type: ignore[union-attr]
    model.zero_grad()
    return flat


def sent_nbytes(model: nn.Module) -> int:
    graph = graph_fsdp.inspect(model).backward.graph
    starts = graph.with_role(Role.REDUCE_START)
    quantized, instead = quantized_sends(graph)
    whole = sum(dist.get_world_size() * start.meta["fsdp"].nbytes for start in starts)
    return whole - instead + quantized


def train(dtype: str, texts: tuple[Tensor, Tensor], mesh: DeviceMesh, options: Any) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    given = SimpleNamespace(**vars(options), seed=0, context=options.length, lr=6e-4, eval_batches=16)
    data = Data(texts[0], options.batch * world, given)
    model, exact = gpt(dtype, mesh, options), gpt("float32", mesh, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, betas=(0.9, 0.95), foreach=True)

    def error(batch: tuple[Tensor, Tensor]) -> float:
        exact.load_state_dict(model.state_dict())
        expected = gradients(exact, batch)
        return float((gradients(model, batch) - expected).norm() / expected.norm())

    errors, losses = [error(data.next(rank, world))], []
    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, given)
        loss = model(*data.next(rank, world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss.detach()))
    errors.append(error(data.next(rank, world)))
    unseen = validation_loss(model, texts[1], given, rank, world)
    return {"losses": losses, "errors": errors, "unseen": unseen, "sent": sent_nbytes(model)}


def shown_steps(steps: int) -> list[int]:
    return [max(1, steps * part // 5) for part in range(1, 6)]


def table(result: dict[str, Any]) -> Table:
    steps = shown_steps(result["steps"])
    rows = []
    for name, case in result["cases"].items():
        means = [sum(part) / len(part) for part in (case["losses"][max(0, step - WINDOW) : step] for step in steps)]
        first, last = (f"{100 * error:.2f}%" for error in case["errors"])
        rows.append([name, *(f"{loss:.3f}" for loss in means), f"{case['unseen']:.4f}", first, last])
        rows[-1].append(f"{case['sent']:,}")
    header = ["reduced in", *(f"step {step}" for step in steps), "unseen text", "error, first step", "last", "sent"]
    return Table(header, rows)


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__, Path(__file__).stem)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.set_defaults(width=128, heads=4, length=64)
    options = parser.parse_args(arguments)
    options.device = options.device or default_device()

    def run() -> dict[str, Any] | None:
        with process_group(options.device) as mesh:
            texts = load_text(None)
            cases = {name: train(name, texts, mesh, options) for name in options.cases}
            if dist.get_rank():
                return None
            facts = {"benchmark": "low_precision", "command": command_of(__file__, arguments), "steps": options.steps}
            return {**facts, "machine": machine(options.device, dist.get_world_size()), "cases": cases}

    return run_on_ranks(__file__, arguments, options, run, table, lambda result, path: None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
