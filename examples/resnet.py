"""Train a ResNet-18 on images, its BatchNorm included, sharded by graph_fsdp.

    python examples/resnet.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/resnet.py --images DIR

`--images` is a folder with one folder of images per class; without it, scikit-learn's digits are scaled up.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from digits import load_digits
from PIL import Image
from ranks import Ranks, arguments, launched
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

import graph_fsdp

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
MEAN, DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])  # of ImageNet


class Outcome(NamedTuple):
    losses: list[float]  # of each epoch, in nats
    accuracy: float  # on images that were not trained on


class Digits:
    """``images(rows)``: float32 of shape (rows, 3, size, size)."""

    def __init__(self, size: int) -> None:
        training, test = load_digits()
        self.small = torch.cat([training.images, test.images])
        self.labels = torch.cat([training.labels, test.labels])
        self.size, self.classes = size, 10

    def images(self, rows: Tensor) -> Tensor:
        scaled = F.interpolate(self.small[rows], (self.size, self.size), mode="bilinear", align_corners=False)
        return scaled.expand(-1, 3, -1, -1)


class Folder:
    """The images below a folder; what is in one folder of it has one label. They are read when they are asked for."""

    def __init__(self, path: Path, size: int) -> None:
        names = sorted(child.name for child in path.iterdir() if child.is_dir())
        found = [(f, i) for i, n in enumerate(names) for f in sorted((path / n).rglob("*"))]
        found = [(file, label) for file, label in found if file.suffix.lower() in SUFFIXES]
        if not found:
            raise FileNotFoundError(f"{path} has no folder with images ({', '.join(sorted(SUFFIXES))})")
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
        self.files = [found[i][0] for i in order]
        self.labels = torch.tensor([found[i][1] for i in order])
        self.size, self.classes = size, len(names)

    def images(self, rows: Tensor) -> Tensor:
        return torch.stack([self._read(self.files[row]) for row in rows.tolist()])

    def _read(self, file: Path) -> Tensor:
        with Image.open(file) as image:
            pixels = np.array(image.convert("RGB").resize((self.size, self.size)))
        return ((torch.from_numpy(pixels) / 255 - MEAN) / DEVIATION).permute(2, 0, 1)


def resnet18(classes: int, width: int) -> nn.Module:
    """The first of its four stages has ``width`` channels, 64 in the paper."""
    sizes = [width * factor for factor in (1, 2, 4, 8)]
    config = ResNetConfig(
        embedding_size=width, hidden_sizes=sizes, depths=[2, 2, 2, 2], layer_type="basic", num_labels=classes
    )
    return ResNetForImageClassification(config)


def train(model: nn.Module, data: Digits | Folder, args: argparse.Namespace, ranks: Ranks) -> Outcome:
    """The last fifth of the images is to test."""
    count = len(data.labels) * 4 // 5
    draws = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    size = args.batch // ranks.world
    steps = args.epochs * len(ranks.batches(count, size, draws))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps)
    losses, found = [], 0.0
    for epoch in range(1, args.epochs + 1):
        model.train()
        batches = ranks.batches(count, size, draws)
        total = 0.0
        for rows in batches:
            loss = F.cross_entropy(model(data.images(rows).to(ranks.device)).logits, data.labels[rows].to(ranks.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total += loss.item()
        losses.append(ranks.sums(total)[0] / (len(batches) * ranks.world))
        found = accuracy(model, data, range(count, len(data.labels)), ranks, size)
        ranks.say(f"epoch {epoch}: training loss {losses[-1]:.4f}, test accuracy {found:.2%}")
    return Outcome(losses, found)


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits | Folder, rows: range, ranks: Ranks, size: int) -> float:
    """BatchNorm uses the statistics that each rank has gathered from its own batches."""
    model.eval()
    right = 0.0
    for part in ranks.batches(len(rows), size):
        chosen = part + rows.start
        right += (model(data.images(chosen).to(ranks.device)).logits.argmax(1).cpu() == data.labels[chosen]).sum()
    return ranks.sums(float(right))[0] / len(rows)


def run(given: Sequence[str] | None = None) -> Outcome:
    parser = arguments(str(__doc__), epochs=10, batch=64, lr=0.1, size=32, width=64)
    parser.add_argument("--images", type=Path, help="folder of folders of images (default: scikit-learn's digits)")
    args = parser.parse_args(given)
    with launched(args.device) as ranks:
        data = Folder(args.images, args.size) if args.images else Digits(args.size)
        torch.manual_seed(args.seed)
        model = resnet18(data.classes, args.width).to(ranks.device)
        ranks.say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(data.labels):,} images")
        model = graph_fsdp.compile(model, ranks.mesh, backend=args.backend)
        return train(model, data, args, ranks)


if __name__ == "__main__":
    run()
