"""Classify handwritten digits with the CNN of PyTorch's MNIST example, sharded by graph_fsdp.

    python examples/digits.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/digits.py --mnist DIR
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/digits.py --device xpu --save digits.pt

The digits are scikit-learn's (1,797 of 8 x 8), or those of MNIST's files in the folder given by `--mnist`.
"""

from __future__ import annotations

import functools
import gzip
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ranks import Ranks, arguments, launched
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import graph_fsdp


class Data(NamedTuple):
    """Float32 images of shape (count, 1, size, size) with mean 0 and deviation 1, and their int64 labels."""

    images: Tensor
    labels: Tensor


class Outcome(NamedTuple):
    losses: list[float]  # of each epoch, nats, mean over all images
    accuracy: float  # on the test images
    model: nn.Module


class CNN(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * ((size - 4) // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(self.dropout2(x))


def read_idx(path: Path) -> Tensor:
    """A file in MNIST's format, compressed or not: a header of big-endian numbers, then bytes."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    zero, kind, dims = struct.unpack(">HBB", data[:4])
    if zero != 0 or kind != 8:
        raise ValueError(f"{path} is no idx file of unsigned bytes")
    begin = 4 + 4 * dims
    shape = struct.unpack(f">{dims}I", data[4:begin])
    return torch.frombuffer(bytearray(data[begin:]), dtype=torch.uint8).view(shape)


def load_mnist(folder: Path) -> tuple[Data, Data]:
    def load(prefix: str) -> Data:
        tensors = []
        for kind in ("images?idx3", "labels?idx1"):
            found = sorted(folder.rglob(f"{prefix}-{kind}-ubyte*"))  # "-" or ".", with .gz or without
            if not found:
                raise FileNotFoundError(f"no {prefix}-{kind}-ubyte in {folder}")
            tensors.append(read_idx(found[0]))
        return Data((tensors[0].unsqueeze(1) / 255 - 0.1307) / 0.3081, tensors[1].long())

    return load("train"), load("t10k")


def load_digits() -> tuple[Data, Data]:
    """scikit-learn's digits: four fifths to train on, the others to test."""
    from sklearn import datasets

    found = datasets.load_digits()
    images, labels = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1), torch.tensor(found.target).long()
    images = (images - images.mean()) / images.std()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, test = order.split([len(labels) * 4 // 5, len(labels) - len(labels) * 4 // 5])
    return Data(images[training], labels[training]), Data(images[test], labels[test])


def train_epoch(
    model: nn.Module, data: Data, optimizer: torch.optim.Optimizer, ranks: Ranks, size: int, draws: torch.Generator
) -> float:
    """Mean loss over the epoch, in nats."""
    model.train()
    total, batches = 0.0, ranks.batches(len(data.labels), size, draws)
    for rows in batches:
        loss = F.cross_entropy(model(data.images[rows].to(ranks.device)), data.labels[rows].to(ranks.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    (total,) = ranks.sums(total)
    return total / (len(batches) * ranks.world)


@torch.no_grad()
def accuracy(model: nn.Module, data: Data, ranks: Ranks, size: int = 256) -> float:
    """Part of the images whose label the model finds."""
    model.eval()
    right = 0.0
    for rows in ranks.batches(len(data.labels), size):
        right += (model(data.images[rows].to(ranks.device)).argmax(1).cpu() == data.labels[rows]).sum().item()
    return ranks.sums(right)[0] / len(data.labels)


def run(given: Sequence[str] | None = None) -> Outcome:
    """Train and test."""
    parser = arguments(str(__doc__), epochs=14, batch=64, lr=1.0, gamma=0.85)
    parser.add_argument("--mnist", type=Path, help="folder of MNIST's four idx files (default: scikit-learn's digits)")
    parser.add_argument("--min-num-params", type=int, help="parameters of a unit (default: what repeats is one)")
    parser.add_argument("--offload", action="store_true", help="keep shards and gradients on the host")
    parser.add_argument("--save", type=Path, help="file for the trained weights, whole, as plain PyTorch loads them")
    args = parser.parse_args(given)
    with launched(args.device) as ranks:
        training, test = load_mnist(args.mnist) if args.mnist else load_digits()
        torch.manual_seed(args.seed)  # every rank makes the same weights
        model = CNN(training.images.shape[-1]).to(ranks.device)
        by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=args.min_num_params)
        model = graph_fsdp.compile(
            model,
            ranks.mesh,
            auto_wrap_policy=None if args.min_num_params is None else by_size,
            offload_policy=CPUOffloadPolicy() if args.offload else OffloadPolicy(),
            backend=args.backend,
        )
        optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
        draws = torch.Generator().manual_seed(args.seed)  # and shuffles alike, but drops out activations of its own
        torch.manual_seed(args.seed + 1 + ranks.rank)
        losses, found = [], 0.0
        for epoch in range(1, args.epochs + 1):
            losses.append(train_epoch(model, training, optimizer, ranks, args.batch // ranks.world, draws))
            found = accuracy(model, test, ranks)
            ranks.say(f"epoch {epoch}: training loss {losses[-1]:.4f}, test accuracy {found:.2%}")
            scheduler.step()
        if args.save is not None:
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if ranks.rank == 0:  # the others have none of it
                torch.save(state, args.save)
        return Outcome(losses, found, model)


if __name__ == "__main__":
    run()
