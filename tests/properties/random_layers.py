"""Layers of every kind that parameters, buffers and activations come in, for models that are made of a description.

All layers map (rows, width) to (rows, width) and compute row by row, but those of ``OVER_ROWS``. They take
floating-point activations of any type: what they make of parameters and buffers they cast to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from composed_layers import COMPOSED, random
from composed_layers import WRITE_BUFFERS as COMPOSED_WRITE_BUFFERS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_layers import NOT_CAST as TORCH_NOT_CAST
from torch_layers import OF_TORCH
from torch_layers import OVER_ROWS as TORCH_OVER_ROWS
from torch_layers import WRITE_BUFFERS as TORCH_WRITE_BUFFERS


class Affine(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.up = nn.Linear(width, size, bias=size % 2 == 0)
        self.down = nn.Linear(size, width, bias=size % 3 != 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Norm(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=size % 4 != 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if x.shape[1] > 1 else x


class Scalar(nn.Module):
    """Parameters without a dimension."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(0.5 + 0.1 * n)) for n in range(1 + size % 3))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


class Rows(nn.Module):
    """``size`` - 1 rows: none, fewer than ranks, or uneven."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.rows = random(size - 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.rows.sum(0))


class Columns(nn.Module):
    """An empty dimension that is not the one that is sharded; memory that is not contiguous."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.columns = random(width, size // 2) if size % 2 else nn.Parameter((torch.randn(size // 2, width) / 2).t())

    def forward(self, x: Tensor) -> Tensor:
        return x - torch.sin(self.columns.sum(1))


class Sliced(nn.Module):
    """One parameter read through views that overlap."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.flat = random(2 * width + size)

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        first, rest = self.flat[:width], self.flat[1 : 2 * width + 1].view(2, width)
        return x * torch.sigmoid(first) + rest[1] * self.flat.narrow(0, 0, 1).squeeze(0)


class Many(nn.Module):
    """Three dimensions, and a product with a view that is transposed."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = random(size, width, width)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weight.transpose(1, 2)
        for weight in weights.unbind(0):
            x = torch.tanh(x @ weight)
        return x


class Lookup(nn.Module):
    """Rows chosen by the data."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, width, padding_idx=0 if size % 3 == 0 else None)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.argmax(1) % self.table.num_embeddings).to(x.dtype)


class Integers(nn.Module):
    """A parameter of integers, which cannot be trained."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.randperm(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order]


class Single(nn.Module):
    """A parameter of another floating-point type than the others."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(width, dtype=torch.float32) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.narrow).to(x.dtype)


class Counter(nn.Module):
    """Buffers that forward writes to, whatever the data."""

    count: Tensor
    level: Tensor

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.ones(width), persistent=size % 2 == 0)
        self.gain = random(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1)
            self.level.mul_(0.9).add_(0.05)
        return x * self.level.to(x.dtype) + self.gain * (self.count % 3).to(x.dtype)


class Statistics(nn.Module):
    """A buffer that follows the rank's own batch, and is used."""

    mean: Tensor

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.3)
        return x - self.mean.to(x.dtype)


class BatchNorm(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=size % 2 == 0, track_running_stats=size % 3 != 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class InPlace(nn.Module):
    """Writes to activations, and to views of them."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.variant = size % 6
        self.weight = random(width)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        if self.variant == 0:
            y[:, 0] = 1.0
            y += self.weight
        elif self.variant == 1:
            y.view(-1)[:: x.shape[1]].mul_(0.5)  # of each row alike: ranks have some of them
            y.mul_(self.weight)
        elif self.variant == 2:
            transposed = y.t()
            transposed.add_(self.weight.unsqueeze(1)).tanh_()
        elif self.variant == 3:
            y[:, ::2] *= self.weight[::2].to(y.dtype)
            F.relu(y, inplace=True)
        elif self.variant == 4:
            z = torch.zeros_like(y)
            z.copy_(y * self.weight)
            z[:1].neg_()
            y = z.add_(y)  # y itself is what the product needs in backward
        else:
            first, second = y.narrow(1, 0, 1), y.narrow(1, 1, y.shape[1] - 1)
            first.sub_(self.weight[:1])
            second.copy_(second * 0.5)
        return y


class Views(nn.Module):
    """Views of activations, with and without memory of their own."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.variant = size % 5
        self.weight = random(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.variant == 0:
            return x.t().contiguous().t() * self.weight.squeeze(1)
        if self.variant == 1:
            return x.unsqueeze(1).expand(-1, 2, -1).mean(1) + self.weight.view(-1)
        if self.variant == 2:
            return torch.cat(x.flip(1).split(1, dim=1), dim=1) * self.weight.t()
        if self.variant == 3:
            return x.unflatten(1, (1, -1)).transpose(1, 2).mul(self.weight).flatten(1)
        return (x[:] * self.weight.select(1, 0))[:, :].unsqueeze(0)[0]


class Dead(nn.Module):
    """Computes with a parameter, and uses nothing of it."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = random(width + size)

    def forward(self, x: Tensor) -> Tensor:
        unused = self.weight * 2
        unused.exp()
        return x


class Unused(nn.Module):
    """A parameter that forward never reads, or not while it trains."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.never = random(size, width)
        self.evaluation = random(width)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x + self.evaluation


class Detached(nn.Module):
    """Parameters that are read, and have no gradient."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight, self.linear = random(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.linear(x)
        return x + torch.tanh(y) + self.weight.detach()


class Half(nn.Module):
    """A parameter of which one use has a gradient and one has none."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = random(width)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cos(self.weight) + self.weight.detach() * 0.1


class Checkpointed(nn.Module):
    """``recompute``: unset where parameters are other tensors by the time of backward."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        affine = Affine(width, size)
        self.inner, self.recompute = affine if size < 5 else nn.Sequential(Scalar(width, size), affine), True

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)


class Masked(nn.Module):
    """Branches by mask, of which a rank's data may take one."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x[:, :1] > 0.3).to(x.dtype)
        return x + mask * self.experts[0](x) + (1 - mask) * self.experts[1](x)


class Dropout(nn.Module):
    """A mask that each call draws, and that backward needs again. One for all rows, so that it is that of all ranks."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight, self.part = random(width), 0.1 * size

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.sin(self.weight), self.part, self.training) * self.weight


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "affine": Affine,
    "norm": Norm,
    "scalar": Scalar,
    "rows": Rows,
    "columns": Columns,
    "sliced": Sliced,
    "many": Many,
    "lookup": Lookup,
    "integers": Integers,
    "single": Single,
    "counter": Counter,
    "statistics": Statistics,
    "batch_norm": BatchNorm,
    "in_place": InPlace,
    "views": Views,
    "dead": Dead,
    "unused": Unused,
    "detached": Detached,
    "half": Half,
    "checkpointed": Checkpointed,
    "masked": Masked,
    "dropout": Dropout,
    **COMPOSED,
    **OF_TORCH,
}
OVER_ROWS = {"statistics", "batch_norm", *TORCH_OVER_ROWS}
WRITE_BUFFERS = {"counter", *OVER_ROWS, *COMPOSED_WRITE_BUFFERS, *TORCH_WRITE_BUFFERS}
EXTENDED = {"extended"}  # have tensor extensions
NOT_CAST = {"batch_norm", *TORCH_NOT_CAST}
