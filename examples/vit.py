"""Train a vision transformer that no rank ever holds whole; backward computes its activations again.

    python examples/vit.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/vit.py --layers 12 --width 192

It is built on the meta device; `graph_fsdp.compile` initialises it block by block, each rank keeping its shards, and
keeps of each block's activations only its input (`activation_checkpointing`). The images are scikit-learn's digits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from digits import accuracy, load_digits, train_epoch
from ranks import arguments, launched
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graph_fsdp


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, size: int, patch: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty((size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of this module's own parameters; compile calls it, and that of every module of torch's."""
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def run(given: Sequence[str] | None = None) -> float:
    """Train and test; the accuracy on the test images."""
    parser = arguments(str(__doc__), epochs=20, batch=64, lr=2e-3, layers=4, width=64, heads=4)
    args = parser.parse_args(given)
    with launched(args.device) as ranks:
        training, test = load_digits()
        with torch.device("meta"):
            model = ViT(training.images.shape[-1], 2, args.layers, args.width, args.heads)
        torch.manual_seed(args.seed)
        model = graph_fsdp.compile(model, ranks.mesh, backend=args.backend, activation_checkpointing="unit")
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
        ranks.say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {held:,} of them on this rank")

        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs + 1)
        draws = torch.Generator().manual_seed(args.seed)
        found = 0.0
        for epoch in range(1, args.epochs + 1):
            loss = train_epoch(model, training, optimizer, ranks, args.batch // ranks.world, draws)
            found = accuracy(model, test, ranks)
            ranks.say(f"epoch {epoch}: training loss {loss:.4f}, test accuracy {found:.2%}")
            scheduler.step()
        return found


if __name__ == "__main__":
    run()
