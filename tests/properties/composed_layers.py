"""Layers that compute as modules of torch and of users do: convolutions, recurrences, attention, parametrised weights,
functions of autograd, parameters that are read in parts or by another module. As ``random_layers.py`` says of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from wrapped import Wrapped


def random(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


class Convolution(nn.Module):
    """Along each row, with as many groups as channels in between."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.up = nn.Conv1d(1, size, 3, padding=1, bias=size % 2 == 0)
        self.each = nn.Conv1d(size, size, 1, groups=size)
        self.down = nn.ConvTranspose1d(size, 1, 1) if size % 3 == 0 else nn.Conv1d(size, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.each(self.up(x.unsqueeze(1))))).squeeze(1)


class Recurrence(nn.Module):
    """Along the beginning of each row: every step is traced."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.cell = (nn.GRUCell if size % 2 else nn.LSTMCell)(1, size)
        self.down, self.size = nn.Linear(size, 1), size

    def forward(self, x: Tensor) -> Tensor:
        state: Any = x.new_zeros(len(x), self.size)
        state = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        seen = []
        for column in x[:, :2].unsqueeze(2).unbind(1):
            state = self.cell(column, state)
            seen.append(self.down(state[0] if isinstance(state, tuple) else state))
        return torch.cat([*seen, x[:, 2:]], 1)


class Attention(nn.Module):
    """Within each row, of heads that parts of one parameter make."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.causal, self.size = size % 2 == 0, size
        self.weight, self.out = random(3 * size, 1), nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x.unsqueeze(2), self.weight.to(x.dtype)).chunk(3, dim=2)
        y = F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal=self.causal)
        return self.out(y.squeeze(1)).squeeze(2)


class Heads(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1 + size % 2, bias=size % 3 != 0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([x, -x], dim=2)
        return self.attention(y, y, y, need_weights=False)[0].sum(2)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Function(nn.Module):
    """A function of autograd that saves the parameter, or a view of it."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight, self.turned = random(width, width), size % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(_Product.apply(x, self.weight.t() if self.turned else self.weight))


class WeightNorm(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(width, width, bias=size % 2 == 0), dim=size % 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class _Directed(nn.Module):
    """Divides a weight by its size along a direction, which follows the weight."""

    direction: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("direction", torch.ones(width))

    def forward(self, weight: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                toward = weight.t() @ (weight @ self.direction.to(weight.dtype))
                self.direction.copy_(F.normalize(toward, dim=0))
        direction = self.direction.clone().to(weight.dtype)
        return weight / (1 + (weight @ direction).norm())


class Spectral(nn.Module):
    """A weight that is computed with a buffer, which forward writes to."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=size % 2 == 0)
        parametrize.register_parametrization(self.linear, "weight", _Directed(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Reassigned(nn.Module):
    """A buffer that is set to another tensor."""

    level: Tensor

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(width), persistent=size % 2 == 0)
        self.gain = random(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.level = self.level * 0.9 + 0.05
        return x * self.level.to(x.dtype) + self.gain


class Parts(nn.Module):
    """A parameter that is read in parts, which torch has several functions for."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight, self.variant = random(2 * width, width), size

    def forward(self, x: Tensor) -> Tensor:
        w, width = self.weight, x.shape[1]
        match self.variant:
            case 1:
                first, second = w.chunk(2)
            case 2:
                first, second = w.index_select(0, torch.arange(2 * width).flip(0)).split(width)
            case 3:
                first, second = w.t().split([width, width], dim=1)
            case 4:
                first, second = w.unflatten(0, (width, 2)).unbind(1)
            case 5:
                first, second = w[::2], w[1::2].clone()
            case 6:
                first, second = w.view(2, width, width).movedim(0, 2).unbind(2)
            case _:
                first, second = w[:width].diagonal().diag(), torch.tril(w[width:])
        return x @ torch.tanh(first) + torch.sin(x @ second)


class _Giver(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = random(width, width)

    def forward(self) -> dict[str, Any]:
        return {"whole": self.weight, "parts": [self.weight[0], self.weight.t()]}


class Given(nn.Module):
    """A parameter, and views of it, that another module's forward returns."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.giver, self.variant = _Giver(width), size % 3

    def forward(self, x: Tensor) -> Tensor:
        given = self.giver()
        first, turned = given["parts"]
        if self.variant == 0:
            return x + first
        return x @ (turned if self.variant == 1 else given["whole"])


class Complex(nn.Module):
    """A real parameter that is read as complex numbers."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.pairs = random(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.pairs.double()) * x.double()
        return (turned.real + turned.imag.sin()).to(x.dtype)


class Imaginary(nn.Module):
    """A parameter of complex numbers that is read as real ones."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.randn(width, dtype=torch.complex128) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        real, imaginary = torch.view_as_real(self.numbers).unbind(1)
        return x * real.to(x.dtype) + torch.tanh(imaginary).to(x.dtype)


class Experts(nn.Module):
    """The first choices of a router among matrices of one parameter, by a mask."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.router, self.weights = nn.Linear(width, size, bias=False), random(size, width, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(1)
        chosen = F.one_hot(scores.argmax(1), scores.shape[1]).to(x.dtype)
        return x + torch.einsum("re,ri,eio->ro", scores * chosen, x, self.weights)


class Products(nn.Module):
    """Products of three, and a parameter of one number that has a dimension."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(width, width, width, bias=size % 2 == 0)
        self.slope = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(torch.tanh(self.bilinear(x, torch.sin(x))))


class Named(nn.Module):
    """Parameters of a dict, and ones that a container of another kind has."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.by_name = nn.ParameterDict({"weight": random(width), "a bias": random(width)} if size % 2 else {})
        self.norms = nn.ModuleDict({"group": nn.GroupNorm(1 if size % 3 else width, width)})

    def forward(self, x: Tensor) -> Tensor:
        for value in self.by_name.values():
            x = x + value
        return self.norms["group"](x.unsqueeze(2).expand(-1, -1, 2) * torch.arange(1, 3).to(x.dtype)).mean(2)


class _Halves(Wrapped):
    """Travels as two numbers of half the bits, which sum up to it."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        high = self._data.to(torch.float32)
        return (high, (self._data - high).to(torch.float32)), None

    def restore(self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype) -> Tensor:
        high, low = outputs
        return (high.to(torch.float64) + low.to(torch.float64)).to(dtype)


class Extended(nn.Module):
    """A weight that is a tensor extension."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, size), nn.Linear(size, width, bias=False)
        self.up.weight = nn.Parameter(_Halves(self.up.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


COMPOSED: dict[str, Callable[[int, int], nn.Module]] = {
    "convolution": Convolution,
    "recurrence": Recurrence,
    "attention": Attention,
    "heads": Heads,
    "function": Function,
    "weight_norm": WeightNorm,
    "spectral": Spectral,
    "reassigned": Reassigned,
    "parts": Parts,
    "given": Given,
    "complex": Complex,
    "imaginary": Imaginary,
    "experts": Experts,
    "products": Products,
    "named": Named,
    "extended": Extended,
}
WRITE_BUFFERS = {"spectral", "reassigned"}
