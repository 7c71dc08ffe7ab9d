"""What ``mp_policy`` casts of inputs and outputs that are dataclasses."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp

WIDTH = 8
BF16, FP32 = torch.bfloat16, torch.float32


@dataclasses.dataclass(frozen=True)
class Stream:
    x: Tensor
    rows: int


@dataclasses.dataclass
class Streams:
    first: Stream
    others: list[Stream]
    scale: Tensor | None = None


class OfStreams(nn.Module):
    """Records the dtypes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: set[torch.dtype] = set()

    def forward(self, streams: Streams) -> Streams:
        self.seen |= {stream.x.dtype for stream in (streams.first, *streams.others)}
        first, *others = (Stream(self.linear(s.x), s.rows + 1) for s in (streams.first, *streams.others))
        return Streams(first, others)


def test_fields_of_dataclasses_are_cast_in_a_copy() -> None:
    model = nn.Sequential(OfStreams(), OfStreams())
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32)
    graph_fsdp.compile(model, auto_wrap_policy={OfStreams}, backend="eager", mp_policy=policy)
    x = torch.ones(4, WIDTH, requires_grad=True)
    given = Streams(Stream(x, 0), [Stream(x.double(), 1)])
    found = model(given)
    assert [layer.seen for layer in model] == [{BF16}, {BF16}]
    assert given.first.x is x and given.others[0].x.dtype == torch.float64
    assert [(s.x.dtype, s.rows) for s in (found.first, *found.others)] == [(FP32, 2), (FP32, 3)]
    found.first.x.sum().backward()
    assert x.grad is not None and x.grad.dtype == FP32


class Cached(nn.Module):
    """Keeps what it computes in a dict of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: dict[str, list[Tensor]]) -> Tensor:
        y: Tensor = self.linear(x)
        cache["values"] = [*cache["values"], y.detach()]
        return y


def test_what_has_nothing_to_cast_is_the_callers_own() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    model = graph_fsdp.compile(Cached(), backend="eager", mp_policy=policy)
    cache: dict[str, list[Tensor]] = {"values": []}
    for count in range(1, 4):
        model(torch.ones(4, WIDTH), cache)
        assert [value.dtype for value in cache["values"]] == [BF16] * count
