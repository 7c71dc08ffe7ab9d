"""A small mixture of experts: experts lie on a dimension of ranks, and tokens are exchanged by all-to-alls."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

_funcol = torch.ops._c10d_functional


class AllToAll(torch.autograd.Function):
    """Exchanges equal parts of dimension 0 among the ranks of a group; so are the gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return exchanged(x, group, size)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return exchanged(grad, ctx.group, ctx.size), None, None


def exchanged(x: Tensor, group: str, size: int) -> Tensor:
    parts = [x.shape[0] // size] * size
    return _funcol.wait_tensor(_funcol.all_to_all_single(x.contiguous(), parts, parts, group))


class Experts(nn.Module):
    """``count`` experts of two layers. ``forward`` takes ``[count, tokens, width]``, of each expert its tokens."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, width, 2 * width) / width**0.5)
        self.w2 = nn.Parameter(torch.randn(count, 2 * width, width) / width**0.5)
        self.group, self.ranks = "", 1

    def forward(self, tokens: Tensor) -> Tensor:
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        count, each, width = tokens.shape
        if self.ranks > 1:  # [ranks, own experts, tokens]: of each rank those for the experts here
            tokens = AllToAll.apply(tokens, self.group, self.ranks)
            tokens = tokens.view(self.ranks, -1, each, width).transpose(0, 1).reshape(count // self.ranks, -1, width)
        out = torch.bmm(torch.relu(torch.bmm(tokens, w1)), w2)
        if self.ranks > 1:
            out = out.view(count // self.ranks, self.ranks, each, width).transpose(0, 1)
            out = AllToAll.apply(out.reshape(count, each, width), self.group, self.ranks)
        return out


class Layer(nn.Module):
    """Every expert takes all tokens, weighted by a router: how many there are depends on no value. The last expert is
    given none: its weight is zero."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, count)
        self.experts = Experts(count, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(self.norm(x)).softmax(-1) * self._used(x)  # [tokens, experts]
        tokens = scores.t()[:, :, None] * x  # [experts, tokens, width]
        return x + self.experts(tokens).sum(0)

    def _used(self, x: Tensor) -> Tensor:
        count = self.router.out_features
        return (torch.arange(count, device=x.device) < count - 1).to(x.dtype)


class MoE(nn.Module):
    def __init__(self, count: int, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(count, width) for _ in range(layers))
        self.head = nn.Linear(width, width)

    @property
    def experts(self) -> list[Experts]:
        return [layer.experts for layer in self.layers]

    def distribute(self, mesh: DeviceMesh) -> MoE:
        """Divide the experts over ``mesh``, of one dimension, as ``parallelize_module`` does."""
        for experts in self.experts:
            for name, p in list(experts.named_parameters()):
                setattr(experts, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
            experts.group, experts.ranks = mesh.get_group().group_name, mesh.size()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
