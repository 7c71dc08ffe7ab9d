"""A GPT with a mixture of experts, on any number of ranks: experts are divided over some, and sharded over the others.

    python examples/moe_gpt.py --steps 20
    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/moe_gpt.py --steps 20

On four ranks, pairs of them hold all experts (`--expert-ranks 2`) and exchange tokens; the two ranks that hold the same
experts shard these, and all four the rest of the model. The losses are those of one process, whose batch is that of all
ranks: each sequence of bytes chooses experts by itself, and each expert has room for as many bytes of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from gpt import Attention, GPTConfig
from ranks import Ranks, arguments, launched
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from train_gpt import load_text

import graph_fsdp


class Experts(nn.Module):
    """``[experts, tokens, width]``, of each expert its tokens, to the same shape."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(0.02 * torch.randn(experts, width, 2 * width))
        self.down = nn.Parameter(0.02 * torch.randn(experts, 2 * width, width))

    def divide(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts of those that all ranks of ``mesh`` hold."""
        self.up = nn.Parameter(distribute_tensor(self.up.detach(), mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(self.down.detach(), mesh, [Shard(0)]))

    def forward(self, tokens: Tensor) -> Tensor:
        if not isinstance(self.up, DTensor):
            return torch.bmm(F.gelu(torch.bmm(tokens, self.up)), self.down)
        # An all-to-all: from some tokens for each expert to all tokens for some experts.
        mesh = self.up.device_mesh
        tokens = DTensor.from_local(tokens, mesh, [Shard(1)]).redistribute(mesh, [Shard(0)]).to_local()
        out = torch.bmm(F.gelu(torch.bmm(tokens, self.up.to_local())), self.down.to_local())
        return DTensor.from_local(out, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)]).to_local()


class MixtureOfExperts(nn.Module):
    """Each token goes to the one expert that its router chooses, while that has room (GShard, Switch Transformer)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        scores = self.router(x).softmax(-1)  # [batch, length, experts]
        count = scores.shape[-1]
        weight, chosen = scores.max(-1)
        mine = F.one_hot(chosen, count)
        room = 2 * length // count
        place = (mine.cumsum(1) * mine).sum(-1) - 1  # of a token among those of its sequence for its expert
        slots = F.one_hot(place.clamp(max=room), room + 1)[..., :room]  # a token that comes too late has none
        sent = (mine[..., None] * slots[..., None, :]).to(x.dtype)  # [batch, length, experts, room]
        tokens = torch.einsum("blec,blw->ebcw", sent, x).reshape(count, batch * room, width)
        out = self.experts(tokens).view(count, batch, room, width)
        return torch.einsum("blec,ebcw->blw", sent * weight[..., None, None], out)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, experts: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mixture = MixtureOfExperts(config.width, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mixture(self.norm2(x))


class MoEGPT(nn.Module):
    def __init__(self, config: GPTConfig, experts: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, experts) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def sharded(model: MoEGPT, ranks: Ranks, expert_ranks: int, backend: str) -> MoEGPT:
    if ranks.mesh is None:
        return graph_fsdp.compile(model, backend=backend)
    sizes = (ranks.world // expert_ranks, expert_ranks)
    mesh = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=("efsdp", "ep"))
    for block in model.blocks:
        block.mixture.experts.divide(mesh["ep"])
    return graph_fsdp.compile(model, ranks.mesh, meshes={Experts: mesh["efsdp"]}, backend=backend)


def run(given: Sequence[str] | None = None) -> list[float]:
    """Train, and return the loss of each step, the mean over all ranks."""
    numbers = {"steps": 20, "batch": 8, "layers": 2, "width": 64, "heads": 2, "context": 64, "experts": 4, "lr": 3e-3}
    parser = arguments(__doc__, **numbers, expert_ranks=2)
    args = parser.parse_args(given)
    losses = []
    with launched(args.device) as ranks:
        expert_ranks = min(args.expert_ranks, ranks.world)
        if args.batch % ranks.world or ranks.world % expert_ranks or args.experts % expert_ranks:
            parser.error(
                f"--batch {args.batch} must be divisible by the {ranks.world} ranks, and these and --experts "
                f"{args.experts} by --expert-ranks {expert_ranks}"
            )
        torch.manual_seed(args.seed)
        text, _ = load_text(None)
        config = GPTConfig(layers=args.layers, width=args.width, heads=args.heads, context=args.context)
        model = MoEGPT(config, args.experts).to(ranks.device)
        model = sharded(model, ranks, expert_ranks, args.backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        draws = torch.Generator().manual_seed(args.seed)
        for step in range(1, args.steps + 1):
            starts = torch.randint(len(text) - args.context, (args.batch,), generator=draws)
            windows = text[starts[:, None] + torch.arange(args.context + 1)].long().chunk(ranks.world)[ranks.rank]
            windows = windows.to(ranks.device)
            loss = model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            (total,) = ranks.sums(loss.item())
            losses.append(total / ranks.world)
            ranks.say(f"step {step} loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    run()
