"""A GPT in pipeline stages, each of them sharded, under a schedule of torch.distributed.pipelining.

    python examples/pipeline_gpt.py --steps 20
    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/pipeline_gpt.py --steps 20

On four ranks, two have the first stage and two the second (`--stages 2`); the two that have the same stage shard it and
share the batch. The losses are those of one process, which runs the whole model on the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from ranks import Ranks, arguments, launched
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class
from train_gpt import load_text

import graph_fsdp
from graph_fsdp.integrations.pipelining import PipelineStage

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


class Stage(nn.Module):
    """Part ``index`` of ``count`` of a model: tokens to hidden states, hidden states to hidden states, or to logits."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        first, last = (len(model.blocks) * i // count for i in (index, index + 1))
        self.blocks = model.blocks[first:last]
        self.tokens, self.positions = (model.tokens, model.positions) if index == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if index == count - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Alone:
    """The whole model in one process."""

    def __init__(self, model: GPT, backend: str) -> None:
        self.models: list[nn.Module] = [graph_fsdp.compile(Stage(model, 0, 1), backend=backend)]

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        loss = loss_fn(self.models[0](inputs), targets)
        loss.backward()
        return loss.item()


class Pipeline:
    """This rank's stages: one, or two with a ``schedule`` of several stages per rank, in a loop or in a V."""

    def __init__(self, model: GPT, ranks: Ranks, stages: int, schedule: str, microbatches: int, backend: str) -> None:
        sizes = (stages, ranks.world // stages)
        mesh = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=("pp", "dp"))
        self.place, self.replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        self.group, self.replicas = mesh.get_group("pp"), sizes[1]
        count = stages if schedule in ("GPipe", "1F1B") else 2 * stages
        in_v = schedule in ("ZBVZeroBubble", "DualPipeV")
        mine = (self.place, count - 1 - self.place) if in_v else range(self.place, count, stages)
        self.has_last = count - 1 in mine
        self.models = [graph_fsdp.compile(Stage(model, i, count), mesh["dp"], backend=backend) for i in mine]
        parts = [
            PipelineStage(part, i, count, ranks.device, group=self.group)
            for i, part in zip(mine, self.models, strict=True)
        ]
        given: Any = parts if len(parts) > 1 else parts[0]
        self.schedule = get_schedule_class(schedule)(given, microbatches, loss_fn=loss_fn)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Return the loss of this rank's part of the batch, a mean over microbatches; 0 without the last stage."""
        inputs, targets = (whole.chunk(self.replicas)[self.replica] for whole in (inputs, targets))
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if self.has_last else {}
        self.schedule.step(*([inputs] if self.place == 0 else []), **given)
        return torch.stack(losses).mean().item() / self.replicas if self.has_last else 0.0


def run(given: Sequence[str] | None = None) -> list[float]:
    """Train, and return the loss of each step, the mean over the batch of all ranks."""
    numbers = {"steps": 20, "batch": 16, "layers": 4, "width": 64, "heads": 2, "context": 64, "lr": 3e-3}
    parser = arguments(__doc__, **numbers, stages=2, microbatches=4)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    args = parser.parse_args(given)
    losses = []
    with launched(args.device) as ranks:
        if ranks.mesh is not None:
            if ranks.world % args.stages or args.stages < 2:
                parser.error(f"--stages {args.stages} must be 2 or more, and divide the {ranks.world} ranks")
            if args.batch % (ranks.world // args.stages * args.microbatches):
                parser.error(
                    f"--batch {args.batch} must be divisible by the {ranks.world // args.stages} ranks of a stage "
                    f"times --microbatches {args.microbatches}"
                )
        torch.manual_seed(args.seed)
        text, _ = load_text(None)
        config = GPTConfig(layers=args.layers, width=args.width, heads=args.heads, context=args.context)
        model = GPT(config).to(ranks.device)
        trained: Alone | Pipeline = (
            Alone(model, args.backend)
            if ranks.mesh is None
            else Pipeline(model, ranks, args.stages, args.schedule, args.microbatches, args.backend)
        )
        optimizer = torch.optim.AdamW([p for part in trained.models for p in part.parameters()], lr=args.lr)
        draws = torch.Generator().manual_seed(args.seed)
        for step in range(1, args.steps + 1):
            starts = torch.randint(len(text) - args.context, (args.batch,), generator=draws)
            windows = text[starts[:, None] + torch.arange(args.context + 1)].long().to(ranks.device)
            loss = trained.step(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
            optimizer.step()
            optimizer.zero_grad()
            (total,) = ranks.sums(loss)
            losses.append(total)
            ranks.say(f"step {step} loss {total:.6f}")
    return losses


if __name__ == "__main__":
    run()
