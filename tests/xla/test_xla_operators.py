"""Operators that torch_xla computes otherwise than PyTorch does elsewhere: with ``backend="xla"`` they are the same, or
refused by name."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from xla_compare import compare, mesh, vectors
from xla_launch import DEVICES, XlaFacts

pytestmark = pytest.mark.timeout(2000)  # the first test waits for all facts

FACTS = XlaFacts(__name__)


def filled(x: Tensor, w: Tensor) -> Tensor:
    """By a number what is made on the host, and by a tensor what is made on the device."""
    places = torch.zeros(4, dtype=torch.int64)
    places[1:] = 3
    return x @ w[places] * torch.fill(w[0], w.mean())


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "std": lambda x, w: (x @ w).std(1),
    "kl_div": lambda x, w: F.kl_div((x @ w).log_softmax(1), x.softmax(1), reduction="none"),
    "selu": lambda x, w: F.selu(x @ w),
    "diag": lambda x, w: x @ torch.diag(w[0]),
    "inverse": lambda x, w: x @ torch.inverse(w + 5 * torch.eye(len(w), device=w.device)),
    "elu": lambda x, w: F.elu(x @ w),
    "celu": lambda x, w: F.celu(x @ w, alpha=0.5),
    "max_pool1d": lambda x, w: F.max_pool1d(x @ w, 2),  # saves the indices, which have 32 bits in XLA
    "indices": lambda x, w: x @ w + F.max_pool2d((x @ w).view(-1, 1, 2, 2), 2, return_indices=True)[1].view(-1, 1),
    "max_pool3d": lambda x, w: F.max_pool3d((x @ w).view(-1, 1, 1, 2, 2), (1, 1, 2)),
    "amax": lambda x, w: x @ w * w.amax() + torch.norm(w, math.inf) * w.mean([]),
    "as_strided": lambda x, w: x @ torch.as_strided_scatter(w, w[:2, :2] * 2, (2, 2), (1, 8)),
    "count_nonzero": lambda x, w: x @ w * w.count_nonzero(),
    "slice": lambda x, w: torch.slice_scatter(x @ w[-9:], x[:, :2], 1, -9, 3, 2),
    "diagonal": lambda x, w: x @ w * torch.einsum("iij->j", w.view(2, 2, 4)),
    "diagonal_scatter": lambda x, w: (
        x @ torch.diagonal_scatter(w.view(2, 2, 4), w[:2, :2] * 2, dim1=0, dim2=2).view(4, 4)
    ),
    "adaptive_avg_pool": lambda x, w: (
        F.adaptive_avg_pool2d((x @ w).view(-1, 1, 1, 4), (2, 3)).sum(2)
        + F.adaptive_avg_pool3d((x @ w).view(-1, 1, 1, 1, 4), (1, 1, 3)).flatten(2)
    ),
    "adaptive_max_pool": lambda x, w: (
        F.adaptive_max_pool1d(x @ w, 2).view(-1, 1, 1, 1, 2)
        + F.adaptive_max_pool3d((x @ w).view(-1, 1, 1, 2, 2), (1, 1, 2))
    ),
    "glu": lambda x, w: F.glu(F.huber_loss(x, x @ w, reduction="none")),
    "nansum": lambda x, w: x @ w + (x @ w).log().nansum(1, keepdim=True),
    "in place": lambda x, w: (x @ w).unsqueeze_(0).transpose_(0, 1).squeeze_(1),
    "quantile": lambda x, w: torch.quantile(x @ w, 0.3, dim=1),
    "fill": filled,
}


class Function(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(FUNCTIONS[self.name](x, self.weight)).square().mean()


@FACTS
def operators_of_others_have_their_gradients() -> None:
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes, x = mesh(DEVICES), torch.randn(8, 4)
    for number, name in enumerate(FUNCTIONS):
        reference, sharding = Function(name), ("manual", "auto")[number % 2]
        model = graph_fsdp.compile(copy.deepcopy(reference), axes, backend="xla", sharding=sharding)
        expected, found = reference(x), model(shard_batch(x, axes))
        expected.backward()
        found.backward()
        assert torch.allclose(found.detach().cpu(), expected, rtol=1e-4), (name, sharding)
        assert reference.weight.grad is not None and model.weight.grad is not None
        assert reference.weight.grad.abs().max() > 1e-4, name
        found_gradient = model.weight.grad.cpu()
        assert torch.allclose(found_gradient, reference.weight.grad, rtol=1e-4, atol=1e-5), (name, sharding)


# Shapes of a parameter, and functions that XLA's partitioner divides wrongly or not at all.
DIVIDED: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "scatter": ((10, 5), lambda w, _: w.tanh().max(1)[0] + w.topk(2, 1)[0].sum(1) + w.cummax(1)[0].sum(1)),
    "scatter_reduce": ((10, 5), lambda w, _: w.scatter_reduce(1, torch.ones_like(w[:4, :2]).long(), w[:4, :2], "prod")),
    "slice_backward": ((20, 10), lambda w, _: w[-10:-2:2] * w[0:19:5]),
    "slice_scatter": ((20, 10), lambda w, _: torch.slice_scatter(w, 3 * w[:2], 0, 16, 20, 2) * w),
    "index_put": ((4, 6), lambda w, x: (x @ w).index_put((torch.arange(2, device=w.device),), 2 * (x @ w)[:2])),
}


class Divided(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        shape, self.function = DIVIDED[name]
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        values = self.function(self.weight, x).flatten()
        return x.mean() * (values * torch.arange(len(values), device=x.device).cos()).sum()


@FACTS
def values_are_divided_by_rows_as_the_partitioner_can() -> None:
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    x = torch.ones(8, 4)
    for name, axes in itertools.product(DIVIDED, (mesh(DEVICES), mesh(2, DEVICES // 2))):
        reference = Divided(name)
        model = graph_fsdp.compile(copy.deepcopy(reference), axes, backend="xla", sharding="auto")
        expected, found = reference(x), model(shard_batch(x, axes))
        expected.backward()
        found.backward()
        assert torch.allclose(found.detach().cpu(), expected, rtol=1e-4), name
        assert torch.allclose(model.weight.grad.cpu(), reference.weight.grad, rtol=1e-4, atol=1e-6), name


class Copied(nn.Module):
    """Computed again in backward, it depends on a buffer as it was before forward copies into it."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(16))
        self.linear = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "xla":  # PyTorch would copy once more in backward
            return checkpoint(self.scaled, x, use_reentrant=False)
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        self.level.copy_(torch.tanh(self.linear.weight.detach().sum(0) + self.level))
        return self.linear(x * self.level.clone())


@FACTS
def what_is_copied_into_is_saved_as_it_was() -> None:
    for sharding in ("manual", "auto"):
        model = compare(Copied(), vectors, sharding=sharding)
        assert model.model.level.min() < 1


class Recurrent(nn.Module):
    """Learns the states that both layers begin with, and uses those that they end with."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrence, self.begin = kind(4, 5, num_layers=2, batch_first=True), nn.Parameter(torch.randn(2, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        begin: Any = self.begin.expand(-1, len(x), -1).contiguous()
        output, end = self.recurrence(x.view(-1, 4, 4), (begin, begin * 2) if self.is_lstm else begin)
        return output[:, -1] + (end[0] if self.is_lstm else end)[0]

    @property
    def is_lstm(self) -> bool:
        return isinstance(self.recurrence, nn.LSTM)


@FACTS
def layers_of_recurrences_have_their_own_states() -> None:
    for kind in (nn.RNN, nn.LSTM):
        for sharding in ("manual", "auto"):
            compare(Recurrent(kind), vectors, steps=3, sharding=sharding)


class Sliced(nn.Module):
    """Gives an operator of a user's own a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.linear = nn.Parameter(torch.randn(2, 16)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.ops.xla_operators.scaled(x, self.scales.detach()[1:2])[:, :5]


@FACTS
def operators_of_users_have_their_slices() -> None:
    @torch.library.custom_op("xla_operators::scaled", mutates_args=())
    def scaled(x: Tensor, scales: Tensor) -> Tensor:
        return x * scales.unbind(0)[0].sin()

    scaled.register_fake(lambda x, scales: torch.empty_like(x))

    for sharding in ("manual", "auto"):
        compare(Sliced(), vectors, steps=2, sharding=sharding)


class Pair(nn.Module):
    """Two parameters of one shape; what their product is made by says which of them is saved first for backward."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.p, self.q, self.product = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16)), product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.p * 1, self.q * 1) + x.sum() * 0


@FACTS
def graphs_that_return_inputs_in_another_order_are_no_one_program() -> None:
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    for product in (torch.vdot, torch.dot):
        model = Pair(product)
        q = model.q.detach().clone()
        graph_fsdp.compile(model, axes, backend="xla", sharding="auto")(shard_batch(torch.ones(8, 2), axes)).backward()
        assert model.p.grad is not None and torch.allclose(model.p.grad.cpu(), q), product


class Turned(nn.Module):
    """A parameter that is read as complex numbers; its gradient is real numbers again."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.linear = nn.Parameter(torch.randn(16, 2)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.pairs) * x
        return self.linear(turned.real + turned.imag.sin())


@FACTS
def complex_numbers_leave_as_real_ones() -> None:
    for sharding in ("manual", "auto"):
        compare(Turned(), vectors, sharding=sharding)


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "another shape": (
        lambda x: torch.linalg.svdvals(x.view(-1, 2, 2)),
        r"a tensor of shape \[2\], and PyTorch one of \[2, 2\], of aten._linalg_svd.*used by module '0' \(Calls\)",
    ),
    "an error of torch_xla": (
        lambda x: x * torch.cumsum(x.sum(), 0),
        r"XLA fails at aten.cumsum.default, used by module '0' \(Calls\): Value out of range .*; write it with other",
    ),
    "to the host": (lambda x: x.cpu() * 2, r"aten._to_copy.default to the host, used by module '0' \(Calls\)"),
    "read by the host": (
        lambda x: x * torch.linspace(x.sum(), 1.0, 4, device=x.device),
        r"aten::_local_scalar_dense, used by module '0' \(Calls\)",
    ),
    "a shape by values": (
        lambda x: x * x[x > 0.5].sum(),
        r"what aten.index.Tensor, used by module '0' \(Calls\) returns depends on values.*torch.where",
    ),
    "on the host in a kernel of ours": (
        lambda x: F.ctc_loss(x.log_softmax(1), torch.ones(1, dtype=torch.int64, device=x.device), (2,), (1,)),
        "1 of the model's operators: aten::_ctc_loss, used by module '0'",
    ),
}


@FACTS
def what_torch_xla_computes_otherwise_is_refused_by_name() -> None:
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    for function, message in REFUSED.values():
        model = graph_fsdp.compile(nn.Sequential(Calls(function)), axes, backend="xla")
        with pytest.raises(graph_fsdp.HostFallbackError, match=message):
            model(shard_batch(torch.rand(8, 4), axes))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


@FACTS
def products_of_two_dtypes_are_refused_by_name() -> None:
    import graph_fsdp
    from graph_fsdp.xla import shard_batch

    axes = mesh(DEVICES)
    model = graph_fsdp.compile(nn.Sequential(nn.Linear(4, 4), Doubled(4, 4)), axes, backend="xla")
    with pytest.raises(TypeError, match=r"addmm.* in module '1' \(Doubled\) .* torch.float32 and torch.float64; cast"):
        model(shard_batch(torch.ones(8, 4), axes))


test_on_four_devices = FACTS.on_devices(timeout=1800)
